"""The scheduler side with two KV groups: what hints carry, which slots and blocks a load names, and what is saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvprefetch.connector.words.metadata import KVPrefetchMetadata, LoadOrder
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring.wire.records import FlagState, Outcome

from .fakes import BLOCK, Engine, Request
from .reports import Blocks, scheduled_output
from .test_worker import EPOCH, make
from .waiting import TOKEN_MS, measured

# A window of two blocks beside full attention.
GROUPS = Groups((Group(Kind.WINDOW, BLOCK, 2 * BLOCK + 1), Group(Kind.FULL, BLOCK)), BLOCK)
PENDING, NOTHING = (None, False), (0, False)
WINDOWS, FULL = [0, 0, 0, 0, 14, 15, 16], [21, 22, 23, 24, 25, 26, 27]
ALL = [11, 12, 13, 14, 15, 16, 17]


def make_engine(**options: Any) -> Engine:
    return Engine(**{"groups": GROUPS, **options})


def stage(engine: Engine, name: str, blocks: int, *, ready: bool = True) -> list[int]:
    """Publish a prefix of so many blocks; return its slots, in the order of the items."""
    hint = engine.daemon.hint(name)
    count = sum(map(len, GROUPS.items(hint.local_blocks * BLOCK, blocks * BLOCK)))
    slots = list(range(40, 40 + count))
    engine.daemon.flags.write_slots(hint.flag, 0, slots)
    engine.daemon.flags.set_found(hint.flag, blocks)
    engine.daemon.move(hint.flag, FlagState.READY if ready else FlagState.HINTED, blocks)
    return slots


def allocated(
    engine: Engine, request: Request, tokens: int, tables: Sequence[list[int]] = (WINDOWS, FULL)
) -> LoadOrder:
    engine.side.allocated(request, Blocks(*tables), tokens)
    (order,) = engine.side.take_loads(scheduled_output([])).loads
    return order


def test_a_hint_carries_every_digest_and_pages_for_what_a_prefix_may_need() -> None:
    fine = Groups((Group(Kind.WINDOW, BLOCK // 2, BLOCK), Group(Kind.FULL, BLOCK)), BLOCK // 4)
    engine = Engine(groups=fine)
    request = engine.add("r", 3 * BLOCK + 1, ratio=4)
    hint = engine.daemon.hint("r")
    assert (hint.blocks, hint.local_blocks, len(hint.pages)) == (3, 0, 1)
    assert bytes(hint.hashes) == b"".join(request.block_hashes[:12])


@pytest.mark.parametrize(
    "tables",
    [
        ([0, 0, 0, 13, 14, 15, 16], FULL),  # a block that the rules do not fill
        ([0, 0, 0, 0, 0, 15, 16], FULL),  # none where the rules want one
        ([0, 0, 0, 0, 14], FULL),
    ],
)
def test_where_vllms_blocks_are_not_the_rules_the_load_fails_and_nothing_is_computed_on_them(
    tables: Sequence[list[int]],
) -> None:
    """The worker reports the request, and vLLM recomputes it."""
    engine = make_engine()
    request = engine.add("r", 6 * BLOCK + 5, local=BLOCK)
    stage(engine, "r", 6)
    assert engine.match(request) == (5 * BLOCK, True)
    order = allocated(engine, request, 5 * BLOCK, tables)
    assert (list(order.block_ids), list(order.slots)) == ([], [])
    worker, cache, _, _ = make(groups=GROUPS)
    worker.load(KVPrefetchMetadata(loads=[LoadOrder(order.load_id, "r", EPOCH, True, [], [])], live_epochs=(EPOCH,)))
    assert worker.failed_requests() == {"r"} == worker.received()
    assert worker.failed_requests() == set()
    assert not cache.any()


# Of vLLM's four groups the first and the third take no part in its prefix cache; their blocks would be wrong ones.
DECOYS = [91, 92, 93, 94, 95, 96, 97], [98]


def test_groups_outside_the_prefix_cache_have_tables_of_their_own() -> None:
    """A load fills, and saves read, the blocks of the others alone; vLLM's events have its own numbers of groups."""
    engine = make_engine(
        numbers=(1, 3), credits=range(9), retention=0, publish=True, spec_kinds=(("a", 3), ("b", None))
    )
    request = engine.add("r", 6 * BLOCK + 5)
    slots = stage(engine, "r", 6)
    assert engine.match(request) == (6 * BLOCK, True)
    order = allocated(engine, request, 6 * BLOCK, (DECOYS[0], WINDOWS, DECOYS[1], FULL))
    assert (list(order.block_ids), list(order.slots)) == ([14, 15, *FULL[:6]], slots)
    engine.side.finished(request, (DECOYS[0], WINDOWS, DECOYS[1], FULL))
    other = engine.admitted("s", 6 * BLOCK + 5)
    meta = engine.step([(other, 6 * BLOCK + 5)], tables=(DECOYS[0], ALL, DECOYS[1], FULL))
    assert [block for save in meta.saves for block in save.block_ids] == [15, 16, *FULL[:6]]
    assert engine.side.events is not None
    events = [event for of_slot in engine.side.events.saving.values() for _, _, event in of_slot]
    assert [event and event.group_idx for event in events] == [1, 1, 3, 3, 3, 3, 3, 3]
    last = engine.admitted("t", 3 * BLOCK + 5)
    engine.step([(last, 3 * BLOCK + 5)], tables=(DECOYS[0], ALL, DECOYS[1], FULL))
    engine.side.finished(last, (DECOYS[0], ALL, DECOYS[1], FULL))
    assert {block.block_id for block in engine.side.saves.left.values()} <= {*ALL, *FULL}
    assert engine.side.saves.left


@pytest.mark.parametrize("staged", [1, 2, 3])
def test_a_hit_of_which_vllm_computes_all_again_is_neither_awaited_nor_claimed(staged: int) -> None:
    """vLLM computes two blocks again, and takes no hit that is not longer; what a longer one spares is less by that."""
    engine = measured(max_running=64, numbers=(1,), replayed_tokens=2 * BLOCK)
    request = engine.add("r", 40 * BLOCK + 1)
    engine.daemon.stage("r", staged)
    assert engine.match(request) == ((3 * BLOCK, True) if staged == 3 else NOTHING)
    if staged == 3:
        handle = engine.side.requests["r"].handle
        assert handle is not None
        assert handle.spared_ns == pytest.approx(BLOCK * TOKEN_MS * 1e6, rel=0.05)
        return
    engine.daemon.drain()
    assert engine.daemon.dones[-1].outcome == Outcome.RECOMPUTED
    assert engine.side.counters["loads"] == 0


def test_a_prompt_of_which_vllm_computes_all_again_is_not_hinted_at() -> None:
    """Nor when the scheduler asks, nor where the request allows no longer hit."""
    engine = make_engine(groups=Groups(GROUPS.groups[1:], BLOCK), numbers=(1,), replayed_tokens=2 * BLOCK)
    for name, tokens in (("short", 3 * BLOCK), ("capped", 9 * BLOCK)):
        capped = {"max_load_tokens": 2 * BLOCK} if name == "capped" else None
        request = engine.add(name, tokens, kv_transfer_params=capped)
        engine.daemon.drain()
        assert [hint.request_id for hint in engine.daemon.hints] == [], name
        assert [engine.match(request) for _ in range(3)][-1] == NOTHING, name
    engine.daemon.drain()
    assert engine.daemon.hints == []
    engine.add("long", 4 * BLOCK)
    assert engine.daemon.hint("long").blocks == 3


def test_part_of_an_answer_cannot_be_loaded() -> None:
    engine = make_engine()
    request = engine.add("r", 6 * BLOCK + 5)
    stage(engine, "r", 6)
    assert engine.match(request) == (6 * BLOCK, True)
    order = allocated(engine, request, 4 * BLOCK)
    assert list(order.block_ids) == []


def test_a_windows_blocks_are_saved_before_those_of_full_attention() -> None:
    """vLLM gives them up some tokens later; the others stay until the request ends."""
    engine = make_engine(credits=range(3), retention=0)
    request = engine.admitted("r", 6 * BLOCK + 5)
    meta = engine.step([(request, 6 * BLOCK + 5)], tables=(ALL, FULL))
    assert [block for save in meta.saves for block in save.block_ids] == [15, 16, 21]


def test_a_fetch_of_several_groups_is_given_up_where_one_group_s_is_stopped() -> None:
    """A part of its blocks is no prefix: to wait for what is under way would be in vain."""
    engine = measured(max_running=64, groups=GROUPS)
    request = engine.add("r", 40 * BLOCK + 1)
    engine.daemon.look_up("r", 40)
    assert engine.match(request) == PENDING
    engine.clock.advance_ms(55)
    engine.daemon.beat()
    assert engine.match(request) == NOTHING
    engine.daemon.drain()
    assert [ask.stop for ask in engine.daemon.asks] == [False]
    assert engine.side.counters["stopped"] == 0
    assert engine.daemon.dones[-1].outcome == Outcome.RECOMPUTED
