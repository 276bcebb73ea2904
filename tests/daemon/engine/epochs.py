"""What tests of an epoch share: an epoch on shared memory, calls that end as a test says, and the engine's side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import structlog

from kvprefetch.daemon.config.model import load
from kvprefetch.daemon.engine.epoch import Epoch
from kvprefetch.daemon.engine.epoch_calls import Services
from kvprefetch.daemon.engine.memory import EngineInfo, EngineMemory
from kvprefetch.daemon.planning.planner import Lane
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.daemon.work.calls import Call, Caller
from kvprefetch.daemon.work.concurrency import ConcurrencyLimit
from kvprefetch.shmring.flags import pack
from kvprefetch.shmring.ring import Producer
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.attach import SchedulerInfo, WorkerInfo
from kvprefetch.shmring.wire.records import FlagState, RecordKind

SECOND_NS = 1_000_000_000


class Pools:
    """Takes calls and runs none of them."""

    timeout_ns, fetches_in_flight = SECOND_NS, 0

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.limits = (ConcurrencyLimit(4), ConcurrencyLimit(4))
        self.room = True

    def start(self, call: Call) -> None:
        call.start()
        self.calls.append(call)

    def exhausted(self, lane: Lane, caller: Caller) -> bool:
        return False

    def fetch_room(self, lane: Lane, caller: Caller) -> bool:
        return self.room

    def end(self, result: Any) -> Call:
        """End the call that was started last."""
        call = self.calls.pop()
        call.finish(result)
        return call


class Answering:
    """A store that would answer."""

    answering = True
    removal_ms = 0


def make_epoch(
    store: Any = None,
    ranks: int = 1,
    pools: Any = None,
    clock_ns: Callable[[], int] = lambda: 1,
    chunk_blocks: int = 1,
    events: bool = False,
) -> Epoch:
    """An epoch with twelve slots to fetch into and four for saves, of 4 KiB for one rank."""
    workers = [WorkerInfo(block_bytes=4096, key_prefix=f"k{rank}@", put_factor=1, put_turn=0) for rank in range(ranks)]
    scheduler = SchedulerInfo(max_blocks=8, max_hint_bytes=512, loads=True, saves=True, events=events)
    engine = EngineInfo("e", 32, scheduler, workers)
    memory = EngineMemory.create(load({"staging": "64KiB"}), 7, engine)
    services = Services(
        store or cast(Any, Answering()),
        pools or cast(Any, Pools()),
        structlog.get_logger(),
        clock_ns,
        chunk_bytes=4096 * chunk_blocks,
        disk_call_bytes=1 << 20,
        lease_ns=10 * SECOND_NS,
        media=False,
    )
    return Epoch(services, memory, engine)


class Engine:
    """The engine's side of an epoch's control segment: one block of 4 KiB per digest, all in the store."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.producer = Producer(epoch.memory.control.buffer, epoch.channel.words, epoch.memory.layout, lambda: None)

    def want(self, flag: int, generation: int, *names: str, on_disk: bool = False, asked: bool = False) -> None:
        """Push a hint; the store has all its blocks."""
        hashes = memoryview(b"".join(digest(name) for name in names))
        self.move(flag, generation, FlagState.HINTED, 0)
        hint = records.Hint(flag, generation, "r", len(names), 0, 0, 1, 0, 32, hashes)
        self.push(RecordKind.HINT, *records.encode_hint(hint))
        if asked:
            self.ask(flag, generation)
        self.epoch.planner.looked_up((flag, generation), len(names), bytes([on_disk]) * len(names))
        self.epoch.switch("on")  # it carries on

    def hint(self, flag: int, generation: int, *names: str, on_disk: bool = False, asked: bool = False) -> None:
        """Push a hint; its blocks are staged when this returns."""
        self.want(flag, generation, *names, on_disk=on_disk, asked=asked)
        self.fetch()

    def fetch(self) -> None:
        """All that can be fetched arrives."""
        planner = self.epoch.planner
        for lane in Lane:
            while (order := planner.next_order(lane)) is not None:
                planner.fetched(order.number, [True] * len(order.slots), 1)
                self.epoch.switch("on")  # it carries on

    def ask(self, flag: int, generation: int) -> None:
        self.push(RecordKind.ASK, records.encode_ask(records.Ask(flag, generation, 1)))

    def done(self, flag: int, generation: int, loaded: range) -> None:
        """Give a claimed flag back."""
        self.move(flag, generation, FlagState.RELEASED, 3)
        done = records.Done(flag, generation, records.Outcome.LOADED, loaded.start, len(loaded), 0, 0, 0, 0)
        self.push(RecordKind.DONE, records.encode_done(done))

    def move(self, flag: int, generation: int, state: FlagState, count: int) -> None:
        table = self.epoch.channel.table
        assert table.exchange(flag, table.load(flag), pack(generation, state, count))

    def push(self, kind: RecordKind, *parts: bytes | memoryview) -> None:
        assert self.producer.push(kind, *parts)
        assert self.epoch.drain(10) == 1

    def leave(self) -> None:
        del self.producer
        self.epoch.end(Ending.ENGINE_GONE)
        give_back(self.epoch)


def digest(name: str) -> bytes:
    return name.ljust(32).encode()


def give_back(epoch: Epoch) -> None:
    """Close the epoch, then free its memory, as the daemon does; no view keeps any of it mapped."""
    maps = Path("/proc/self/maps")
    before = maps.read_text().count("kvprefetch")
    epoch.close()
    assert maps.read_text().count("kvprefetch") == before, "nothing is unmapped on the main loop"
    epoch.memory.close()
    assert maps.read_text().count("kvprefetch") == before - 1 - len(epoch.memory.staging.block_bytes)
