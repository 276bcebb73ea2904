"""Whatever fails for one engine, of ours or in its memory, ends its epoch and raises nothing out of the loop.

Each part of an epoch fails in each of its methods, one at a time, in a life that calls most of them.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvprefetch.daemon.control import report
from kvprefetch.daemon.engine.channel import Channel
from kvprefetch.daemon.engine.epoch import Epoch
from kvprefetch.daemon.engine.epoch_calls import EpochCalls
from kvprefetch.daemon.engine.epoch_fetches import Fetches
from kvprefetch.daemon.engine.transfers import Found, SaveResult
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.daemon.work.calls import CallKind, EngineCalls
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.records import FlagState, RecordKind
from tests.daemon.engine.epochs import SECOND_NS, Pools, announced, block, digest, later_weights, make_epoch
from tests.support.engine_side import EngineSide, Key

KEY, LATER = (0, 1), (1, 1)
RESULTS = {
    CallKind.LOOK_UP: lambda count: [Found(b"\1" * count, bytes(count))],
    CallKind.FETCH_MEMORY: lambda count: [ErrorClass.OK] * count,
    CallKind.SAVE: lambda _: SaveResult(1, 0, 0, []),
}


class Life:
    """One engine's life, as the loop and the control socket let it happen; `said` are answers to announcements."""

    def __init__(self) -> None:
        self.pools, self.now, self.said = Pools(), 1, list[Any]()
        self.epoch = make_epoch(pools=self.pools, clock_ns=lambda: self.now, chunk_blocks=4, events=True)
        self.engine = EngineSide()
        self.engine.open(self.epoch.memory.control.buffer)

    def turn(self, count: int = 2) -> None:
        """One turn of the loop; each call that began has its result, for so many blocks."""
        epoch, pools = self.epoch, self.pools
        self.now += SECOND_NS // 20
        epoch.drain(self.now + 1)
        for lane in Lane:
            epoch.start_fetch(lane)
            epoch.start_fetch(lane, ahead=True)
        epoch.start_save()
        while pools.calls:
            call = pools.calls.pop()
            call.finish(RESULTS[call.kind](count))
        epoch.tick(self.now)
        epoch.contain(report.numbers, dict[str, int | str](), epoch, self.now)

    def done(self, key: Key, loaded: int = 0) -> None:
        self.engine.push(
            RecordKind.DONE, records.encode_done(records.Done(*key, records.Outcome.LOADED, 0, loaded, 0, 0, 0, 0))
        )

    def run(self) -> None:
        epoch, engine = self.epoch, self.engine
        epoch.activate([])
        engine.hint([digest("a"), digest("b")], key=KEY, session=b"s" * 16)
        engine.ask(KEY)
        self.turn()
        self.turn()
        slots = engine.credits.take(2)
        saved = records.Saved(1, 0, False, list(slots), [block("c"), block("d")][: len(slots)])
        engine.push(RecordKind.SAVED, records.encode_saved(saved))
        engine.put(KEY, FlagState.RELEASED, 2)
        self.done(KEY, 2)
        self.turn()
        epoch.announce(announced("ef"), digest("e") + digest("f"), self.said.append)
        self.turn()
        engine.hint([digest("g"), digest("h")], key=LATER, session=b"s" * 16)
        engine.ask(LATER, stop=True)
        self.turn()
        epoch.switch("shadow")
        epoch.switch("on")
        epoch.reset(later_weights())
        engine.push(99, b"no such record")
        engine.hint([digest("i")], key=(2, 1))
        self.turn(1)
        engine.hint([digest("j")], key=(3, 1))

    def end(self) -> None:
        self.engine.release()
        self.epoch.end(Ending.ENGINE_GONE)
        for call in self.pools.calls:
            call.finish(None)
        self.epoch.tick(self.now)
        assert self.epoch.idle
        self.epoch.close()
        self.epoch.memory.close()


def parts(epoch: Epoch) -> Iterator[object]:
    """Yield what the epoch calls: its own parts, and theirs."""
    lent = ("services", "memory", "engine", "log", "send")
    yield from (each for name, each in vars(epoch.parts).items() if name not in lent)
    yield from (each for each in vars(epoch).values() if isinstance(each, Fetches))
    yield from (epoch.channel.credits, epoch.channel.ring, epoch.planner.blocks)


def kinds() -> list[type]:
    life = Life()
    found: set[type] = {EpochCalls, *(type(part) for part in parts(life.epoch))}
    life.end()
    return sorted(found, key=lambda each: each.__name__)


@pytest.mark.plants_fault
@pytest.mark.parametrize("kind", kinds(), ids=lambda each: str(each.__name__))
def test_a_part_that_fails_ends_the_epoch_and_nothing_else(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Channel.close` aside: it lets go of names, and calls nothing."""
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name.startswith("_") or (kind, name) == (Channel, "close") or method is getattr(EngineCalls, name, 0):
            continue
        life, called = Life(), list[str]()

        def failing(*_: Any, name: str = name, called: list[str] = called, **__: Any) -> None:
            called.append(name)
            raise ValueError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(kind, name, failing)
            life.run()
            assert life.epoch.corrupt is None
            assert life.epoch.broken is bool(called), method
            life.end()


EXTREMES = (0, 1, 7, 1 << 20, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1)


@pytest.mark.plants_fault
def test_without_any_check_a_wrong_record_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record has a field with a value that nothing has looked at."""
    source, broken = random.Random(1), 0

    def wrong(decode: Callable[[memoryview], Any]) -> Callable[[memoryview], Any]:
        def decoded(payload: memoryview) -> Any:
            record = decode(payload)
            fields = {name: value for name, value in record._asdict().items() if isinstance(value, (int, list, tuple))}
            name, number = source.choice(list(fields)), source.choice(EXTREMES)
            value = number if isinstance(fields[name], int) else [number] * source.randrange(4)
            return record._replace(**{name: value})

        return decoded

    for name in ("decode_hint", "decode_ask", "decode_done", "decode_saved"):
        monkeypatch.setattr(records, name, wrong(getattr(records, name)))
    for name in ("check_hint", "lend", "check_saved", "check_done"):
        monkeypatch.setattr(Channel, name, lambda *_: None)
    for _ in range(40):
        life = Life()
        life.run()
        broken += life.epoch.broken
        life.end()
    assert broken > 10
