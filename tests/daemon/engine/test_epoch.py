"""One engine's epoch on its own: what its records do, corrupt memory, memory that the store refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from kvprefetch.daemon.config.model import load
from kvprefetch.daemon.engine.epoch import Epoch
from kvprefetch.daemon.engine.memory import EngineInfo, EngineMemory
from kvprefetch.daemon.planning.planner import Key, Lane
from kvprefetch.daemon.store.errors import StoreError
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.daemon.work.calls import Call, Kind
from kvprefetch.shmring.flags import FlagTable, pack
from kvprefetch.shmring.ring import Producer
from kvprefetch.shmring.wire.attach import SchedulerInfo, WorkerInfo
from kvprefetch.shmring.wire.records import (
    Ask,
    Done,
    FlagState,
    Hint,
    Outcome,
    RecordKind,
    encode_ask,
    encode_done,
    encode_hint,
)


class NoPools:
    """Takes jobs and never runs them."""

    timeout_ns = 1_000_000_000
    fetches_in_flight = 0

    def exhausted(self, *_: Any) -> bool:
        return False

    def fetch_room(self, *_: Any) -> bool:
        return True

    def start(self, call: Call) -> None:
        call.start()


class Answering:
    """A store that would answer."""

    answering = True
    removal_ms = 0


def make_epoch(store: Any = None, ranks: int = 1, pools: Any = None, clock_ns: Callable[[], int] = lambda: 1) -> Epoch:
    workers = [WorkerInfo(block_bytes=4096, key_prefix=f"k{rank}@", put_factor=1, put_turn=0) for rank in range(ranks)]
    engine = EngineInfo("e", 32, SchedulerInfo(max_blocks=8, max_hint_bytes=512, loads=True, saves=True), workers)
    memory = EngineMemory.create(load({"staging": "64KiB"}), 7, engine)
    return Epoch(
        memory,
        engine,
        store or Answering(),
        pools or NoPools(),
        structlog.get_logger(),
        clock_ns,
        chunk_bytes=4096,
        media=False,
        disk_call_bytes=1 << 20,
        lease_ns=10_000_000_000,
    )


class Engine:
    """The engine's side of an epoch's control segment: one block of 4 KiB per digest, all in the store."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.producer = Producer(epoch.control.buffer, epoch.words, epoch.layout, lambda: None)

    def hint(self, flag: int, generation: int, *names: str, on_disk: bool = False, asked: bool = False) -> None:
        """Push a hint; its blocks are staged when this returns."""
        hashes = memoryview(b"".join(name.ljust(32).encode() for name in names))
        self.move(flag, generation, FlagState.HINTED, 0)
        hint = Hint(flag, generation, "r", len(names), 0, 0, 1, 0, 32, hashes)
        self.push(RecordKind.HINT, *encode_hint(hint))
        if asked:
            self.push(RecordKind.ASK, encode_ask(Ask(flag, generation, 1)))
        self.epoch.planner.looked_up((flag, generation), len(names), bytes([on_disk]) * len(names))
        self.fetch()

    def fetch(self) -> None:
        """All that can be fetched arrives."""
        planner = self.epoch.planner
        for lane in Lane:
            while (order := planner.next_order(lane)) is not None:
                planner.fetched(order.number, [True] * len(order.slots), 1)

    def done(self, flag: int, generation: int, loaded: range) -> None:
        """Give a claimed flag back."""
        self.move(flag, generation, FlagState.RELEASED, 3)
        done = Done(flag, generation, Outcome.LOADED, loaded.start, len(loaded), 0, 0, 0, 0)
        self.push(RecordKind.DONE, encode_done(done))

    def move(self, flag: int, generation: int, state: FlagState, count: int) -> None:
        table = self.epoch.table
        assert table.exchange(flag, table.load(flag), pack(generation, state, count))

    def push(self, kind: RecordKind, *parts: bytes | memoryview) -> None:
        assert self.producer.push(kind, *parts)
        assert self.epoch.drain(10) == 1

    def leave(self) -> None:
        del self.producer
        self.epoch.end(Ending.ENGINE_GONE)
        give_back(self.epoch)


def give_back(epoch: Epoch) -> None:
    """What its owner does at its end: the memory is freed apart from it, and nothing of it stands on the memory."""
    maps = Path("/proc/self/maps")
    before = maps.read_text().count("kvprefetch")
    epoch.close()
    assert maps.read_text().count("kvprefetch") == before, "nothing is unmapped on the main loop"
    epoch.memory.close()
    assert maps.read_text().count("kvprefetch") == before - 1 - len(epoch.staging.block_bytes)


def test_what_is_taken_back_is_pending_in_the_same_use_of_its_flag_and_its_tier_hears_of_it() -> None:
    epoch = make_epoch()
    dropped: list[Key] = []
    epoch._flags.tier = SimpleNamespace(published=lambda key, start, slots: slots, dropped=dropped.append)
    engine = Engine(epoch)
    engine.hint(0, 1, *"abcdefgh")
    engine.hint(1, 1, *"stuvwxyz")
    assert epoch.table.flag(0) == (1, FlagState.READY, 8)
    assert epoch.table.flag(1) == (1, FlagState.HINTED, 4), "there are twelve slots"
    engine.push(RecordKind.ASK, encode_ask(Ask(1, 1, 1)))
    assert epoch.planner.next_order() is not None
    assert epoch.table.flag(0) == (1, FlagState.HINTED, 0)
    assert dropped == [(0, 1)]
    engine.move(0, 1, FlagState.CLAIMED, 0)
    assert not epoch._flags.take_back((0, 1)), "never under a claim"
    assert not epoch._flags.take_back((0, 2)), "nor in another use"
    assert dropped == [(0, 1)]
    engine.leave()


def test_a_block_from_disk_that_is_fetched_again_and_again_counts_once_for_the_engine() -> None:
    """A long prompt that is taken back often would come to more than the word holds, and end the daemon."""
    epoch = make_epoch()
    engine = Engine(epoch)
    for others in range(1, 4):  # each is more urgent than the first, takes its room, and ends
        if others == 1:
            engine.hint(0, 1, *"abcdefgh", on_disk=True)
        assert epoch.table.disk(0) == 8
        engine.hint(1, others, *"stuvwxyz", asked=True)
        assert epoch.table.flag(0).state == FlagState.HINTED
        engine.move(1, others, FlagState.RELEASED, 8)
        engine.push(RecordKind.DONE, encode_done(Done(1, others, Outcome.LOADED, 0, 8, 0, 0, 0, 0)))
        engine.fetch()
    assert epoch.table.flag(0) == (1, FlagState.READY, 8)
    assert epoch.planner.requests[0, 1].disk_blocks > 8, "for the trace every byte counts"
    assert epoch.table.disk(0) == 8
    engine.leave()


def test_asking_again_and_again_for_a_request_is_heard_once() -> None:
    """The queue of look-ups has an entry for each time: an engine that does wrong would fill the daemon's memory."""
    epoch = make_epoch()
    engine = Engine(epoch)
    engine.move(0, 1, FlagState.HINTED, 0)
    engine.move(1, 1, FlagState.HINTED, 0)
    for flag in range(2):  # the first one's question is under way, the second waits
        hashes = memoryview(bytes([flag]) * 32)
        engine.push(RecordKind.HINT, *encode_hint(Hint(flag, 1, "r", 1, 0, 0, 1, 0, 32, hashes)))
    for _ in range(100):
        engine.push(RecordKind.ASK, encode_ask(Ask(1, 1, 1)))
    assert len(epoch.look_ups) == 2
    assert len(epoch.look_ups._queue) == 2
    engine.leave()


def test_only_what_was_loaded_counts_as_loaded_where_a_claim_covers_more() -> None:
    """A drafter's engine claims the block that it drops."""
    epoch = make_epoch()
    engine = Engine(epoch)
    engine.hint(0, 1, "a", "b", "c")
    engine.done(0, 1, range(2))
    engine.hint(1, 1, "a", "b", "c")
    engine.done(1, 1, range(2, 3))
    assert epoch.planner.gauges()["requests"] == 0
    engine.leave()
    assert epoch.totals.wasted_bytes["memory"] == 0


def test_a_flag_given_up_before_its_record_came_is_remembered_no_longer_than_its_request() -> None:
    epoch = make_epoch()
    engine = Engine(epoch)
    engine.hint(0, 1, "a")
    engine.move(0, 1, FlagState.RELEASED, 1)
    epoch.scan()
    engine.push(RecordKind.DONE, encode_done(Done(0, 1, Outcome.LOADED, 0, 1, 0, 0, 0, 0)))
    epoch.scan()
    assert not epoch._untold._given_up
    engine.leave()


def test_an_engine_has_no_more_requests_than_flags() -> None:
    """One that uses a flag again before it was given back would fill the daemon's memory."""
    epoch = make_epoch()
    engine = Engine(epoch)
    flags = epoch.layout.flag_count
    for generation in range(1, flags + 10):
        engine.move(0, generation, FlagState.HINTED, 0)
        hint = Hint(0, generation, "r", 1, 0, 0, 1, 0, 32, memoryview(bytes(32)))
        engine.push(RecordKind.HINT, *encode_hint(hint))
    assert len(epoch.planner.requests) == flags
    assert epoch.totals.bad_records == 9
    engine.leave()


class Restless(FlagTable):
    """A flag that another writer always changes in between."""

    def exchange(self, *_: Any) -> bool:
        return False


def restless_epoch() -> Epoch:
    """With one hint, whose flag never stands still from now on."""
    epoch = make_epoch()
    epoch.planner.hint((0, 1), b"x" * 32, 32, 1, 0, 0)
    word = epoch.table.load(0)
    assert epoch.table.exchange(0, word, pack(1, FlagState.HINTED, 0))
    epoch.table.__class__ = Restless
    return epoch


def test_a_flag_that_does_not_stand_still_ends_the_session_and_raises_nothing() -> None:
    epoch = restless_epoch()
    epoch.scan()
    assert epoch.corrupt is None, "nothing to do yet"

    def answer(_: None) -> None:
        epoch.planner.looked_up((0, 1), 0)

    call = Call(Kind.SAVE, lambda: None, answer, None, epoch.calls)
    call.start()
    call.finish(None)
    assert epoch.corrupt is not None
    assert "does not stand still" in epoch.corrupt
    assert epoch.drain(10) == 0
    assert not epoch.pump(Lane.MEMORY)
    epoch.end(Ending.ENGINE_GONE)
    give_back(epoch)


def test_a_reset_that_meets_such_a_flag_raises_nothing() -> None:
    """It comes over the control socket, whose owner knows nothing of flags."""
    epoch = restless_epoch()
    epoch.reset(1, 1.0, lambda _: None)
    assert epoch.corrupt is not None
    epoch.end(Ending.ENGINE_GONE)
    give_back(epoch)


def test_memory_that_the_store_refuses_is_let_go() -> None:
    """Of two ranks the second cannot be registered: the first is not kept either."""
    registered: set[int] = set()

    class Full:
        removal_ms = 0

        def register(self, address: int, _: int) -> None:
            if registered:
                raise StoreError("registering 4096 bytes failed with code -1")
            registered.add(address)

        def unregister(self, address: int) -> None:
            registered.remove(address)

    epoch = make_epoch(Full(), ranks=2)
    with pytest.raises(StoreError):
        epoch.register_staging()
    assert len(registered) == 1
    epoch.end(Ending.ENGINE_GONE)
    give_back(epoch)
    assert not registered


def test_a_store_that_does_not_let_go_of_the_memory_keeps_no_session_open() -> None:
    """The engine may leave while the store is away: that must not end the loop, nor keep the memory. And a store that
    opens may be told of the memory twice, which Mooncake refuses.
    """
    registered: list[int] = []

    class Stubborn:
        removal_ms = 0

        def register(self, address: int, _: int) -> None:
            registered.append(address)

        def unregister(self, *_: Any) -> None:
            raise StoreError("unregistering failed with code -1")

    epoch = make_epoch(Stubborn())
    epoch.register_staging()
    epoch.register_staging()
    assert len(registered) == 1
    epoch.end(Ending.ENGINE_GONE)
    give_back(epoch)
