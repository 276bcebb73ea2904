"""Which states are saved, of those that vLLM offers: against its own connector, and where slots are scarce."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm.v1.core.kv_cache_manager")

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import MooncakeStoreScheduler

from kvprefetch.connector.words.metadata import KVPrefetchMetadata
from kvprefetch.kv.groups import Group, Groups, Kind

from .fakes import BLOCK, Engine, Request
from .reports import scheduled_output
from .test_group_blocks import a_request, manager_of

GROUPS = Groups((Group(Kind.STATE, BLOCK), Group(Kind.FULL, BLOCK), Group(Kind.STATE, BLOCK)), BLOCK)
Offer = tuple[int, int, int]


def make_engine(credits: Sequence[int] = range(40), **options: Any) -> Engine:
    return Engine(groups=GROUPS, credits=credits, retention=0, **options)


def step(engine: Engine, request: Request, tokens: int, *offers: Offer) -> KVPrefetchMetadata:
    """A step in which vLLM offers these states."""
    tables = ([0] * 40, list(range(200, 240)), [0] * 40)
    return engine.step([(request, tokens)] if tokens else [], tables=tables, offers={request.request_id: offers})


def states(engine: Engine, *steps: KVPrefetchMetadata, groups: Sequence[int] = (0, 2)) -> dict[bytes, int]:
    """The states that these steps save: of each name the block. Their slots are granted again."""
    blocks: dict[int, int] = {}
    for meta in steps:
        engine.acknowledge(meta)
        for save in meta.saves:
            blocks |= dict(zip(save.slots, save.block_ids, strict=True))
    engine.daemon.drain()
    engine.daemon.credits.grant(list(blocks))
    named = [pair for saved in engine.daemon.saved for pair in zip(saved.names, saved.slots, strict=True)]
    engine.daemon.saved.clear()
    return {name: blocks[slot] for name, slot in named if name[-1] in groups}


def test_states_of_no_use_are_not_saved() -> None:
    """Inside a unit, of generated tokens, of requests that ended or whose KV rests on other weights."""
    engine = make_engine(credits=range(40), save_decode_cache=True)
    request = engine.admitted("r", 2 * BLOCK + 5)
    meta = step(engine, request, 2 * BLOCK + 5, (0, 77, 2 * BLOCK + 1), (0, 78, 3 * BLOCK))
    assert states(engine, meta) == {}
    engine.side.finished(request, ([], [], []))
    assert states(engine, step(engine, request, 0, (0, 79, 2 * BLOCK))) == {}
    old = engine.admitted("old", 2 * BLOCK + 5)
    old.num_computed_tokens = 1
    engine.side.requests["old"].taint()
    assert states(engine, step(engine, old, 2 * BLOCK, (0, 80, 2 * BLOCK))) == {}


def test_a_state_is_that_of_the_group_that_vllm_means() -> None:
    """Where vLLM has groups outside its prefix cache, these count in its numbers."""
    engine = make_engine(numbers=(1, 2, 4))
    request = engine.admitted("r", 4 * BLOCK + 5)
    tables = ([9] * 40, [0] * 40, list(range(200, 240)), [9], [0] * 40)
    offers = {"r": ((1, 77, 4 * BLOCK), (4, 78, 4 * BLOCK))}
    meta = engine.step([(request, 4 * BLOCK)], tables=tables, offers=offers)
    digest = request.block_hashes[3]
    assert states(engine, meta) == {digest + b"\0": 77, digest + b"\2": 78}


def test_states_come_before_what_a_running_request_keeps_and_wait_where_vllm_may_reuse_their_block() -> None:
    engine = make_engine(credits=[0])
    request = engine.admitted("r", 4 * BLOCK + 5)
    digest = request.block_hashes[3]
    first = step(engine, request, 4 * BLOCK, (0, 77, 4 * BLOCK), (2, 78, 4 * BLOCK))
    assert [save.block_ids for save in first.saves] == [[77]]
    engine.cache.names = {78: digest + b"\2"}
    engine.daemon.credits.grant([1, 2, 3, 4, 5])
    later = step(engine, request, 5)
    assert states(engine, first, later) == {digest + b"\0": 77, digest + b"\2": 78}
    assert states(engine, step(engine, request, 0, (0, 77, 4 * BLOCK))) == {}, "it is saved, and offered again"
    engine = make_engine(credits=[])
    request = engine.admitted("r", 4 * BLOCK + 5)
    step(engine, request, 4 * BLOCK, (0, 77, 4 * BLOCK))
    engine.cache.names = {77: b"another's"}
    engine.daemon.credits.grant(list(range(9)))
    assert states(engine, step(engine, request, 5)) == {}
    assert engine.side.counters["save_blocks_unsaved"] == 1


def test_no_more_states_wait_than_blocks_of_finished_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvprefetch.connector.request.saves.MAX_LEFT", 1)
    engine = make_engine(credits=[])
    request = engine.admitted("r", 4 * BLOCK + 5)
    step(engine, request, 4 * BLOCK, (0, 77, 4 * BLOCK), (2, 78, 4 * BLOCK))
    assert len(engine.side.saves.left) == 1
    assert engine.side.counters["save_blocks_unsaved"] == 1


def theirs(request: Any, offers: dict[str, list[Offer]], states_of: frozenset[int], prefill: int) -> set[Offer]:
    """The states that vLLM's own connector takes of these offers."""
    side: Any = object.__new__(MooncakeStoreScheduler)
    tracker = SimpleNamespace(prefill_end_tokens=prefill, allocated_block_ids=(), token_len=0)
    vars(side).update(
        _request_trackers={request.request_id: tracker},
        _unfinished_requests={request.request_id: (request, ())},
        _boundary_state_group_ids=states_of,
        _store_group_id_by_kv_cache_group_id={group: group for group in range(8)},
    )
    found: list[Any] = []
    meta: Any = SimpleNamespace(requests=[], add_request=found.append)
    MooncakeStoreScheduler._handle_boundary_state_offloads(side, offers, meta)
    taken = [getattr(each, "boundary_puts", None) or each.boundary_state_offloads for each in found]
    return {tuple(offer) for offers in taken for offer in offers}


@given(
    st.lists(st.sampled_from([Kind.STATE, Kind.FULL]), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.integers(0, BLOCK - 1),
    st.sampled_from([None, 0, 1, 2, 3]),
    st.integers(0, 40),
)
def test_the_saved_states_are_those_that_vllms_own_connector_takes(
    kinds: list[Kind], chunks: list[int], rest: int, retention: int | None, generated: int
) -> None:
    """A prompt in chunks of whole blocks, as vLLM's scheduler splits it, then tokens that the request generates."""
    groups = Groups(tuple(Group(kind, BLOCK) for kind in (*kinds, Kind.STATE, Kind.FULL)), BLOCK)
    manager = manager_of(groups, None if retention is None else retention * BLOCK)
    tokens = sum(chunks) * BLOCK + rest
    real = a_request(groups, tokens)
    engine = Engine(groups=groups, credits=range(64), retention=None, save_decode_cache=True)
    request = engine.add(real.request_id, tokens)
    engine.admit(request)
    of_states = frozenset(number for number, group in enumerate(groups.groups) if group.kind is Kind.STATE)
    wanted, found = dict[bytes, int](), dict[bytes, int]()
    for size in [each * BLOCK for each in chunks] + [1] * (rest + generated):
        if real.num_computed_tokens == real.num_tokens:
            real.append_output_token_ids(1)
            request.num_tokens += 1
        manager.new_step_starts()
        assert manager.allocate_slots(real, size) is not None
        offers = manager.take_boundary_state_offloads()
        taken = theirs(real, offers, of_states, tokens)
        wanted |= {request.block_hashes[end // BLOCK - 1] + bytes([group]): block for group, block, end in taken}
        meta = engine.side.take_loads(scheduled_output([]))
        table = {real.request_id: manager.get_block_ids(real.request_id)}
        engine.side.plan_step(scheduled_output([(request, size)], table, offers), meta)
        real.num_computed_tokens += size
        request.num_computed_tokens += size
        found |= states(engine, meta, groups=sorted(of_states))
    assert found == wanted
