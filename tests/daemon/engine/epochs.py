"""What tests of an epoch share: an epoch on shared memory, calls that end as a test says, and the engine's side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import structlog

from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.engine.epoch import Epoch
from kvprefetch.daemon.engine.epoch_parts import Services
from kvprefetch.daemon.engine.memory import EngineInfo, EngineMemory
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.daemon.telemetry.metrics import Metrics
from kvprefetch.daemon.work.call_size import CallSize
from kvprefetch.daemon.work.calls import Call, CallKind, EngineCalls
from kvprefetch.daemon.work.link_share import LinkShare
from kvprefetch.daemon.work.rates import Rates
from kvprefetch.kv.groups import Groups
from kvprefetch.shmring.wire import admin
from kvprefetch.shmring.wire.attach import Reset
from kvprefetch.shmring.wire.records import FlagState
from tests.support.engine_side import ONE_GROUP, EngineSide, EngineSpec, Key

SECOND_NS = 1_000_000_000


def announced(names: str) -> admin.Announce:
    """Return the announcement of a prompt with a block for each letter."""
    caller, size = admin.Caller(uid=0, groups=[]), len(digest("a"))
    return admin.Announce(caller=caller, number=1, name="m", engine="e", epoch=1, hashes=len(names), hash_bytes=size)


class Pools:
    """Takes calls and runs none of them."""

    timeout_ns, fetches_in_flight = SECOND_NS, 0

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.sizes = CallSize(), CallSize()
        self.link_share, self.rates = LinkShare(), Rates()
        self.room = True

    def start(self, call: Call) -> None:
        if call.engine is not None:
            call.engine.running += 1
        self.calls.append(call)

    @property
    def saves(self) -> list[Call]:
        return [call for call in self.calls if call.kind is CallKind.SAVE]

    def exhausted(self, lane: Lane, engine: EngineCalls) -> bool:
        return False

    def save_room(self, engine: EngineCalls | None = None) -> bool:
        return not self.saves

    def fetch_room(self, lane: Lane, engine: EngineCalls) -> bool:
        return self.room

    def end(self, result: Any) -> Call:
        """End the call that was started last."""
        call = self.calls.pop()
        call.finish(result)
        return call


class Answering(SimpleNamespace):
    """A store that would answer, with these methods."""

    answering = True
    aside: frozenset[str] = frozenset()


def make_epoch(
    store: Any = None,
    pools: Any = None,
    clock_ns: Callable[[], int] = lambda: 1,
    chunk_blocks: int = 1,
    events: bool = False,
    max_blocks: int = 8,
    groups: Groups = ONE_GROUP,
    sessions: bool = True,
) -> Epoch:
    """An epoch with twelve slots to fetch into and four for saves, of 4 KiB for one rank."""
    spec = EngineSpec(max_blocks=max_blocks, events=events, groups=groups)
    engine = EngineInfo("e", groups, spec.scheduler(), [spec.worker()])
    options = {"staging": "64KiB", "chunk": 4096 * chunk_blocks, "sessions": "on" if sessions else "off"}
    config = DaemonConfig.model_validate(options)
    memory = EngineMemory.create(config, 7, engine)
    store, pools = store or cast(Any, Answering()), pools or cast(Any, Pools())
    services = Services(config, store, pools, structlog.get_logger(), Metrics(), clock_ns)
    return Epoch(services, memory, engine)


class Engine(EngineSide):
    """The engine of an epoch in this process: one block of 4 KiB per digest, all in the store."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.open(epoch.memory.control.buffer)

    def want(self, key: Key, *names: str, on_disk: bool = False, asked: bool = False) -> None:
        """Push a hint; the store has all its blocks."""
        self.hint([digest(name) for name in names], key=key)
        if asked:
            self.ask(key)
        self.looked_up(key, on_disk=on_disk)

    def looked_up(self, key: Key, *, on_disk: bool = False) -> None:
        """The store has all blocks of a hinted request."""
        request = self.epoch.planner.requests[key]
        while asked := request.prompt.next(100):
            request.prompt.found(b"\1" * len(asked), bytes([on_disk]) * len(asked))
        self.epoch.planner.choose(request)
        self.epoch.carry_on()

    def stage(self, key: Key, *names: str, on_disk: bool = False, asked: bool = False) -> None:
        """Push a hint; its blocks are staged when this returns."""
        self.want(key, *names, on_disk=on_disk, asked=asked)
        self.fetch()

    def fetch(self) -> None:
        """All that can be fetched arrives."""
        planner = self.epoch.planner
        for lane in Lane:
            while (order := planner.next_order(lane)) is not None:
                planner.fetched(order.number, [True] * len(order.slots), 1)
                self.epoch.carry_on()

    def loaded(self, key: Key, blocks: range) -> None:
        """Give a claimed flag back."""
        self.put(key, FlagState.RELEASED, blocks.stop)
        self.done(key, loaded=len(blocks), start=blocks.start)

    def push(self, kind: int, payload: bytes) -> None:
        """Push a record, which the epoch takes at once."""
        super().push(kind, payload)
        assert self.epoch.drain(0) == 1

    def leave(self) -> None:
        self.release()
        self.epoch.end(Ending.ENGINE_GONE)
        give_back(self.epoch)


def later_weights(generation: int = 1) -> Reset:
    return Reset(reset_generation=generation, weights=f"{generation:032x}")


def digest(name: str) -> bytes:
    return name.ljust(32).encode()


def block(name: str) -> bytes:
    """Return the daemon's name of the block."""
    return digest(name) + b"\0"


def give_back(epoch: Epoch) -> None:
    """Close the epoch, then free its memory, as the daemon does; no view keeps any of it mapped."""
    maps = Path("/proc/self/maps")
    before = maps.read_text().count("kvprefetch")
    epoch.close()
    assert maps.read_text().count("kvprefetch") == before, "nothing is unmapped on the main loop"
    epoch.memory.close()
    assert maps.read_text().count("kvprefetch") == before - 1 - len(epoch.memory.staging.block_bytes)
