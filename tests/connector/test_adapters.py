"""The scheduler side names an adapter's blocks by its content, and shares them only while it knows that content."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest

from kvprefetch.connector.identity.adapters import Adapters
from kvprefetch.connector.words.metadata import KVPrefetchWorkerMeta
from kvprefetch.kv.groups import Group, Groups, Kind

from .fakes import BLOCK, Engine, Request, block_ids
from .reports import reads_of

SQL = LoRARequest("sql", 1, "/adapters/sql")
HASHED = {"salt": "prompt", "lora_request": SQL}  # requests of one adapter have equal hashes where their tokens are


def hinted(engine: Engine, request_id: str) -> list[bytes]:
    """The names in the request's latest hint; none where there was no hint."""
    engine.daemon.drain()
    found = [hint for hint in engine.daemon.hints if hint.request_id == request_id]
    return [bytes(found[-1].hashes[i : i + 32]) for i in range(0, len(found[-1].hashes), 32)] if found else []


def arrived(engine: Engine, request_id: str = "r", **fields: Any) -> list[bytes]:
    engine.add(request_id, 3 * BLOCK + 1, **{**HASHED, **fields})
    return hinted(engine, request_id)


def saved(engine: Engine) -> list[bytes]:
    """The names that the daemon is to put into the store."""
    engine.daemon.drain()
    return [bytes(name[:-1]) for save in engine.daemon.saved for name in save.names]


def computed(engine: Engine, request_id: str, **fields: Any) -> list[bytes]:
    """A request computes two blocks, which are saved; return their names, if they are put."""
    before = len(saved(engine))
    request = engine.admitted(request_id, 2 * BLOCK, **{**HASHED, **fields})
    engine.acknowledge(engine.step([(request, 2 * BLOCK)]))
    return saved(engine)[before:]


def test_two_contents_under_one_hash_never_meet() -> None:
    """In hints, so in staging, sessions and look-ups, and in saves, so in keys; with the adapter and without."""
    names = []
    for content in ("a", "b", "a", ""):
        engine = Engine(credits=range(8))
        if content:
            engine.read(SQL, content)
        fields = {} if content else {"lora_request": None}
        hints, saves = arrived(engine, "hint", **fields), computed(engine, "save", **fields)
        assert saves == hints[:2], "what is saved is what a later hint asks for"
        names.append(hints)
    first, other, again, without = names
    assert first == again, "another engine, and a later start, finds the KV of the same adapter"
    assert len({*first, *other, *without}) == 9
    assert without == Request("any", 3 * BLOCK + 1, salt="prompt").block_hashes, "requests without adapters: as before"


def test_an_adapter_that_is_not_known_is_not_shared() -> None:
    """Neither hinted, loaded nor saved, until all ranks have read it; then requests that are there already are, too."""
    engine = Engine(world_size=2, credits=range(8))
    assert arrived(engine) == []
    waiting = engine.side.requests["r"].request
    assert engine.match(waiting) == (0, False)
    assert hinted(engine, "r") == []
    running = engine.admitted("running", 3 * BLOCK, **HASHED)
    meta = engine.step([(running, 2 * BLOCK)])
    assert not meta.saves
    one = reads_of(SQL, "a", "a")
    engine.side.outputs(KVPrefetchWorkerMeta(adapters={0: one.adapters[0]}))
    assert engine.match(waiting) == (0, False), "one of two ranks has read it"
    engine.side.outputs(KVPrefetchWorkerMeta(adapters={1: one.adapters[1]}))
    assert engine.match(waiting) == (None, False), "hinted at its visit"
    assert len(names := hinted(engine, "r")) == 3
    meta = engine.step([(running, BLOCK)])
    engine.acknowledge(meta)
    assert saved(engine) == names, "with the blocks of earlier steps"


def test_ranks_that_disagree_share_nothing() -> None:
    engine = Engine(world_size=2, credits=range(8))
    engine.read(SQL, "a", "b")
    assert arrived(engine) == []
    assert computed(engine, "save") == []
    engine.read(SQL, "b", "b")  # rank 0 has changed its mind: the engine's own cache has blocks of its old one
    assert arrived(engine, "later") == []


def test_ranks_have_parts_of_their_own() -> None:
    """Stages of a pipeline have other layers; the part that is one rank's is in the name."""
    engines = [Engine(world_size=2), Engine(world_size=2)]
    names = []
    for engine, part in zip(engines, (b"x", b"y"), strict=True):
        meta = reads_of(SQL, "a", "a")
        only = meta.adapters[1][0]
        meta.adapters[1] = [only._replace(content=only.content[:32] + part * 32)]
        engine.side.outputs(meta)
        names.append(arrived(engine))
    assert names[0]
    assert not set(names[0]) & set(names[1])


@pytest.mark.parametrize("how", ["replaced in place", "read again under another number", "not understood"])
def test_another_content_under_the_same_hash_ends_sharing(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The engine's own prefix cache has blocks of the old content under this hash: they are never saved as new ones."""
    engine = Engine(credits=range(16))
    engine.read(SQL, "a")
    assert len(computed(engine, "first")) == 2
    staged = engine.add("staged", 3 * BLOCK + 1, staged=3, **HASHED)
    running = engine.admitted("running", 4 * BLOCK, lora_request=SQL)
    meta = engine.step([(running, 2 * BLOCK)])
    later = LoRARequest("sql", 2 if "number" in how else 1, SQL.path)
    report = reads_of(later, "b")
    if how == "not understood":
        report.adapters[0] = [report.adapters[0][0]._replace(content=b"")]
    report.saves = {order.save_id: 1 for order in meta.saves}  # of the step in which it was read
    before = len(saved(engine))
    engine.side.outputs(report)
    assert len(saved(engine)) == before, "a save of the step that read it again is put under no name"
    assert engine.match(staged) == (0, False), "its blocks in staging are the old content's"
    assert not engine.step([(running, 2 * BLOCK)]).saves
    engine.side.finished(running, (block_ids(running),))
    assert arrived(engine, "new") == []
    assert computed(engine, "newer", lora_request=later) == []
    (line,) = [record.getMessage() for record in caplog.records if "not shared" in record.getMessage()]
    assert "'sql'" in line
    assert SQL.path in line
    other = LoRARequest("sql", 1, "/adapters/sql-2")
    engine.read(other, "c")
    assert arrived(engine, "path", lora_request=other), "loaded from another path, an adapter's KV is shared at once"


def test_a_content_that_comes_back_is_not_shared() -> None:
    """Blocks of the content between may have the same hash."""
    engine = Engine()
    for content in ("a", "b", "a"):
        engine.read(SQL, content)
    assert arrived(engine) == []


def test_a_number_that_another_path_gets_ends_sharing_for_requests_of_the_first() -> None:
    """They compute with what is loaded under their number."""
    engine = Engine(credits=range(8))
    engine.read(SQL, "a")
    running = engine.admitted("running", 3 * BLOCK, **HASHED)
    engine.acknowledge(engine.step([(running, BLOCK)]))
    assert len(saved(engine)) == 1
    engine.read(LoRARequest("sql", 1, "/adapters/sql-2", load_inplace=True), "b")
    assert not engine.step([(running, BLOCK)]).saves
    assert arrived(engine) == []


def test_a_reset_begins_anew() -> None:
    """With what the ranks have loaded then; a request that computed before is not saved."""
    engine = Engine(credits=range(8))
    for content in ("a", "b"):
        engine.read(SQL, content)
    running = engine.admitted("running", 3 * BLOCK, lora_request=SQL)
    engine.step([(running, BLOCK)])
    engine.reset()
    names = arrived(engine)
    other = Engine()
    other.read(SQL, "b")
    assert names == arrived(other)
    assert not engine.step([(running, BLOCK)]).saves


def test_towers_know_an_adapter_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM keeps what became of an image by the adapter's name, also for another path and after a reset."""
    engine = Engine(towers=True)
    engine.read(SQL, "a")
    assert arrived(engine)
    other = LoRARequest("sql", 1, "/adapters/sql-2")
    engine.read(other, "b")
    assert arrived(engine, "path", lora_request=other) == []
    engine.reset()
    assert arrived(engine, "reset", lora_request=other) == []
    assert "until the next start" in caplog.text


def test_left_blocks_are_looked_for_by_the_hash_and_saved_by_the_name() -> None:
    """A request ended before there was a slot: its block is saved if the engine's own cache still has it."""
    engine = Engine()
    engine.read(SQL, "a")
    request = engine.admitted("r", 2 * BLOCK, **HASHED)
    engine.step([(request, 2 * BLOCK)])
    engine.side.finished(request, (block_ids(request),))
    engine.cache.names = dict(zip(block_ids(request), request.names(0, 2), strict=True))
    engine.daemon.credits.grant([4, 5])
    engine.acknowledge(engine.step())
    assert saved(engine) == arrived(engine, "later")[:2]


def test_loads_name_the_adapter_and_are_made_in_the_step_that_computes_with_it() -> None:
    """However the loads of others are made: so vLLM has read the adapter by then, if it had given it up."""
    engine = Engine(load_mode="async")
    engine.read(SQL, "a")
    request = engine.add("r", 3 * BLOCK + 1, staged=3, **HASHED)
    engine.take(request, 3 * BLOCK)
    (order,) = engine.step([(request, 1)]).loads
    assert not order.asynchronous
    assert order.adapter is not None
    assert (order.adapter[0], order.adapter[1][:32]) == (1, b"a".ljust(32))
    plain = engine.add("plain", 3 * BLOCK + 1, staged=3)
    assert engine.match(plain) == (3 * BLOCK, True)


def test_several_groups_load_beside_and_never_where_each_step_reads_the_adapter() -> None:
    groups = Groups((Group(Kind.FULL, BLOCK), Group(Kind.WINDOW, BLOCK, 2 * BLOCK)), BLOCK)
    engine = Engine(groups=groups, spec_kinds=(("full_attention", None), ("sliding_window", 2 * BLOCK)), late=True)
    engine.read(SQL, "a")
    assert arrived(engine)
    assert arrived(engine, "in place", lora_request=LoRARequest("sql", 1, SQL.path, load_inplace=True)) == []


def test_where_steps_overlap_a_load_ends_before_the_step_that_computes_with_the_adapter() -> None:
    """vLLM goes on with what a failed one left unfilled."""
    engine = Engine(load_mode="sync", overlapping=True, late=True)
    engine.read(SQL, "a")
    request = engine.add("r", 3 * BLOCK + 1, staged=3, **HASHED)
    assert engine.match(request) == (3 * BLOCK, True)


def test_nothing_is_shared_where_a_load_that_fails_would_fail_its_request() -> None:
    adapters = Adapters(1, sure=False)
    adapters.read(reads_of(SQL, "a").adapters)
    request = Request("r", 2 * BLOCK)
    request.lora_request = SQL
    assert adapters.names(request) is None


def test_names_grow_with_the_hashes_and_cost_little() -> None:
    """Any length of vLLM's hashes; blocks that a request completes while it decodes are named then."""
    adapters = Adapters(1)
    adapters.read(reads_of(SQL, "a").adapters)

    class Growing:
        lora_request = SQL
        block_hashes: list[bytes]

    for size in (16, 32):
        request = Growing()
        request.block_hashes = [bytes([i]) * size for i in range(3)]
        names = adapters.names(request)
        assert names is not None
        first = [*names.up_to_date()]
        request.block_hashes.append(b"\x09" * size)
        assert names.up_to_date()[:3] == first
        assert [len(name) for name in names.up_to_date()] == [size] * 4
        assert len({*names.up_to_date(), *request.block_hashes}) == 8
    request.block_hashes = []
    names = adapters.names(request)
    assert names is not None
    assert names.up_to_date() == []
