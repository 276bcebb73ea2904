"""What the engine's own cache answers: the daemon hears of it, and blocks that the store lost are saved again."""

from __future__ import annotations

from typing import Any

import pytest

from kvprefetch.connector.attach.link import MAX_ABSENTS
from kvprefetch.connector.scheduler.uses import MAX_LOST
from kvprefetch.shmring.wire.attach import Absent

from .fakes import BLOCK, Engine, Request
from .test_scheduler_saves import saved_digests

AGAIN_MS = 5_500
SLOTS = range(30, 46)


def held(**options: Any) -> tuple[Engine, Request]:
    """An engine that computed, saved and kept a prompt of four blocks."""
    engine = Engine(credits=SLOTS, **options)
    request = engine.admitted("first", 4 * BLOCK + 1, salt="same")
    engine.acknowledge(engine.step([(request, 4 * BLOCK + 1)]))
    engine.cache.names.update(zip(range(100, 104), request.names(0, 4), strict=True))
    engine.side.finished(request, [list(range(100, 105))])
    assert saved_digests(engine) == request.digests(0, 4)
    engine.daemon.saved.clear()
    return engine, request


def use(engine: Engine, name: str, blocks: int = 4) -> Request:
    """A request comes of which all is local, and ends."""
    request = engine.admitted(name, blocks * BLOCK + 1, salt="same", local=blocks * BLOCK)
    engine.acknowledge(engine.step([(request, 1)]))
    engine.side.finished(request, [list(range(100, 101 + blocks))])
    engine.daemon.drain()
    return request


def absent(engine: Engine, names: list[bytes], *, epoch: int = 1, generation: int = 0, records: int = 1) -> None:
    """The daemon says so."""
    told = Absent(
        epoch=epoch, reset_generation=generation, saved_records=records, name_bytes=33, names=b"".join(names).hex()
    )
    engine.link.absent.append(told)


def heal(engine: Engine) -> list[bytes]:
    """The engine steps as long as it wants to; return what it saved."""
    for _ in range(20):
        if not engine.side.has_pending_work():
            break
        engine.acknowledge(engine.step())
    assert not engine.side.has_pending_work()
    found = saved_digests(engine)
    engine.daemon.saved.clear()
    return found


def test_a_prefix_that_is_all_local_is_said_once_in_half_a_lease() -> None:
    engine, request = held()
    for number in range(20):
        use(engine, f"r{number}")
        engine.clock.advance_ms(1)
    [used] = engine.daemon.used
    assert (used.blocks, bytes(used.hashes)) == (4, b"".join(request.digests(0, 4)))
    use(engine, "shorter", blocks=2)
    assert [each.blocks for each in engine.daemon.used] == [4, 2], "another prefix"
    engine.clock.advance_ms(AGAIN_MS)
    engine.daemon.beat()
    use(engine, "later")
    assert [each.blocks for each in engine.daemon.used] == [4, 2, 4]
    assert len(engine.daemon.hints) == 1, "only the first one had something to load"


def test_a_hint_names_the_local_blocks_of_its_own_request() -> None:
    engine, _ = held()
    request = engine.add("r", 6 * BLOCK, salt="same", local=4 * BLOCK)
    engine.admit(request)
    engine.daemon.drain()
    assert engine.daemon.used == []
    assert engine.daemon.hint("r").local_blocks == 4


def test_an_engine_that_loads_nothing_says_what_it_uses() -> None:
    engine, _ = held(loads=False)
    use(engine, "r")
    request = engine.admitted("longer", 6 * BLOCK, salt="same", local=4 * BLOCK)
    engine.step([(request, 2 * BLOCK)])
    engine.daemon.drain()
    assert [each.blocks for each in engine.daemon.used] == [4], "the longer prompt has the same four blocks"


def test_a_full_ring_drops_the_record_and_the_next_use_says_it() -> None:
    engine, _ = held(ring=4096)
    while engine.link.epoch is not None and engine.link.epoch.producer.push(99, bytes(512)):
        pass
    request = engine.admitted("r", 4 * BLOCK + 1, salt="same", local=4 * BLOCK)
    engine.step([(request, 1)])
    while engine.daemon.ring.peek() is not None:
        engine.daemon.ring.advance()
    use(engine, "r2")
    assert [each.blocks for each in engine.daemon.used] == [4]


def test_what_the_store_lost_is_saved_again_though_no_request_holds_it() -> None:
    engine, request = held()
    use(engine, "r")
    absent(engine, request.names(1, 3))
    assert engine.side.has_pending_work()
    assert heal(engine) == request.digests(1, 3)
    assert engine.side.counters["save_blocks_again"] == 2
    use(engine, "r2")
    assert heal(engine) == [], "once"


@pytest.mark.parametrize("planted", ["epoch", "generation", "copying", "copied", "sent", "tainted", "gone"])
def test_nothing_is_saved_again_by_mistake(planted: str) -> None:
    """Told of another epoch or of older weights, or of a block under way, or while the cache may be wrong."""
    engine, request = held()
    names = request.names(0, 4)
    if planted in ("copying", "copied", "sent"):
        absent(engine, names)
        meta = engine.step()
        assert [len(save.slots) for save in meta.saves] == [4]
        absent(engine, names)
        if planted != "copying":
            engine.acknowledge(meta)
        if planted == "sent":
            engine.daemon.drain()
        assert engine.step().saves == []
        if planted == "copying":
            engine.acknowledge(meta)
        heal(engine)
        absent(engine, names, records=2)
        assert heal(engine) == request.digests(0, 4), "this time the daemon knew of that save"
        return
    if planted == "tainted":
        other = engine.admitted("bad", 2 * BLOCK, salt="bad")
        engine.side.requests[other.request_id].taint()
    if planted == "gone":
        engine.cache.names.clear()
    absent(engine, names, epoch=2 if planted == "epoch" else 1, generation=int(planted == "generation"))
    assert heal(engine) == []


def test_a_lost_block_is_saved_once_its_load_has_filled_it() -> None:
    """The store lost it, and staging still had it: vLLM's cache has it after the load."""
    engine, first = held()
    engine.cache.names.clear()
    request = engine.add("r", 4 * BLOCK + 1, salt="same", staged=4)
    absent(engine, request.names(0, 4))
    engine.take(request, 4 * BLOCK)
    meta = engine.step([(request, 1)])
    assert meta.saves == []
    engine.cache.names.update(zip(range(100, 104), request.names(0, 4), strict=True))
    engine.acknowledge(meta)
    assert engine.step([(request, 1)]).saves[0].block_ids == [100, 101, 102, 103]
    assert first.digests(0, 4) == request.digests(0, 4)


def test_a_reset_forgets_what_was_lost_and_said() -> None:
    engine, request = held()
    use(engine, "r")
    engine.cache.names.clear()
    absent(engine, request.names(0, 4))
    engine.step()
    engine.reset()
    engine.cache.names.update(zip(range(100, 104), request.names(0, 4), strict=True))
    absent(engine, request.names(0, 4))
    assert heal(engine) == []
    use(engine, "r2")
    assert len(engine.daemon.used) == 2, "under other weights it is another prefix"


def test_what_the_store_lost_is_bounded() -> None:
    engine, _ = held()
    for message in range(2 * MAX_ABSENTS):
        absent(engine, [(1000 * message + number).to_bytes(32, "big") + b"\0" for number in range(100)])
        engine.step()
    assert len(engine.side.uses.lost) == MAX_LOST
    assert heal(engine) == []
