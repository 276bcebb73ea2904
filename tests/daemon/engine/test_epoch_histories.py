"""Random records, flags and store answers: whatever an engine does, its epoch raises nothing and can be closed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.daemon.control.refusals import Refusals
from kvprefetch.daemon.control.report import status
from kvprefetch.daemon.engine.epoch import Epoch
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.daemon.telemetry.snapshot import Snapshot
from kvprefetch.daemon.work.calls import EngineCalls
from kvprefetch.shmring.flags import MAX_COUNT, MAX_GENERATION, pack
from kvprefetch.shmring.wire.records import (
    Ask,
    Done,
    Hint,
    Outcome,
    RecordKind,
    Saved,
    encode_ask,
    encode_done,
    encode_saved,
)
from tests.daemon.engine.epochs import Pools, later_weights, make_epoch
from tests.support.encoded import encode_hint
from tests.support.engine_side import EngineSide

U32, U64 = (1 << 32) - 1, (1 << 64) - 1


class Store:
    """Answers at random, until it does not."""

    answering = is_open = True
    aside: frozenset[str] = frozenset()

    def __init__(self, chance: Random) -> None:
        self.chance = chance

    def suspect(self, _: str) -> None:
        self.answering = False

    def unregister(self, _: int) -> None: ...

    def exist(self, keys: Sequence[str]) -> list[bool]:
        return [self.chance.random() < 0.7 for _ in keys]

    def media(self, keys: Sequence[str], _: int = 0) -> list[str | None]:
        return [self.chance.choice([None, "memory", "memory", "disk"]) for _ in keys]

    def get_into(self, keys: Sequence[str], *_: Any, sums: Sequence[int]) -> list[ErrorClass]:
        classes = [each for each in ErrorClass if each not in (ErrorClass.RETRY, ErrorClass.LOOKUP_AGAIN)]  # they wait
        return self.chance.choices(classes, [30] + [1] * (len(classes) - 1), k=len(keys))

    def put_from(self, keys: Sequence[str], *_: Any) -> list[ErrorClass]:
        return self.chance.choices([ErrorClass.OK, ErrorClass.NO_SPACE, ErrorClass.WRITE], [3, 1, 1], k=len(keys))


class RandomPools(Pools):
    """Calls come back in any order, some past their deadline first, some with an exception."""

    def __init__(self, chance: Random) -> None:
        super().__init__()
        self.chance = chance

    def exhausted(self, lane: Lane, engine: EngineCalls) -> bool:
        return self.chance.random() < 0.01

    def running(self) -> dict[str, int]:
        return {"fetch": 1}

    def fetch_room(self, lane: Lane, engine: EngineCalls) -> bool:
        return self.chance.random() < 0.7

    def step(self) -> None:
        """One of them goes on."""
        if not self.calls:
            return
        at = self.chance.randrange(len(self.calls))
        call = self.calls[at]
        if call.on_overdue is not None and self.chance.random() < 0.1:
            self.calls[at] = replace(call, on_overdue=None)
            call.give_up()
            return
        del self.calls[at]
        call.finish(RuntimeError("the call broke") if self.chance.random() < 0.05 else call.run())


def records(epoch: Epoch, chance: Random) -> Iterator[tuple[int, bytes]]:
    """What an engine pushes that obeys little; it sets the flags to match, or not."""
    flags, names = epoch.memory.layout.flag_count, [bytes([i]) * 32 for i in range(12)]
    pick = chance.choice
    while True:
        flag, generation = chance.randrange(2), chance.randint(1, 2)
        if chance.random() < 0.1:
            flag, generation = pick([flags - 1, flags, U32]), pick([0, MAX_GENERATION, U64])
        kind = pick([1, 1, 1, 2, 3, 3, 3, 4, 5])
        if kind in (1, 3) and flag < flags and generation <= MAX_GENERATION and chance.random() < 0.9:
            state = pick([1, 1, 1, 1, 2, 3, 6, 0, 9]) if kind == 1 else pick([4, 5, 3])
            word = pack(generation, state, pick([0, 3, MAX_COUNT]))
            epoch.channel.table.exchange(flag, epoch.channel.table.load(flag), word)
        if kind == 1:
            blocks, size = chance.randint(1, 9), pick([32, 32, 32, 1, 64])
            hashes = b"".join(pick(names)[:size].ljust(size) for _ in range(blocks))
            local, priority, tokens = chance.randint(0, blocks), chance.randint(-9, 9), pick([0, U32])
            hint = Hint(
                flag,
                generation,
                "r" * pick([0, 256]),
                blocks,
                local,
                priority,
                tokens,
                pick([0, U64]),
                size,
                hashes,
                [pick([0, 1, flags - 1, flags, U32])],
            )
            yield RecordKind.HINT, encode_hint(hint)
        elif kind == 2:
            yield RecordKind.ASK, encode_ask(Ask(flag, generation, pick([0, 1, U64]), stop=chance.random() < 0.3))
        elif kind == 3:
            counts = pick([0, 1, U32]), pick([0, 1, 8, U32])
            times = pick([0, 1, U64]), pick([0, 1, U64]), pick([0, U64]), pick([0, U64])
            yield RecordKind.DONE, encode_done(Done(flag, generation, pick(list(Outcome)), *counts, *times))
        elif kind == 4:
            count = chance.randint(0, 4)
            slots = [pick([*range(epoch.memory.layout.slot_count), U32]) for _ in range(count)]
            saved = Saved(
                1,
                pick([0, 1, U64]),
                chance.random() < 0.2,
                slots,
                [pick(names) + bytes([pick([0, 0, 0, 1])]) for _ in range(count)],
            )
            yield RecordKind.SAVED, encode_saved(saved)
        else:
            yield chance.randint(0, 9), chance.randbytes(chance.randint(0, 99))


@pytest.mark.parametrize("seed", range(8))
def test_nothing_that_an_engine_pushes_raises(seed: int) -> None:
    for round_ in range(8):
        chance = Random(100 * seed + round_)
        clock, store, pools = [1], Store(chance), RandomPools(chance)
        epoch = make_epoch(store, pools=pools, clock_ns=lambda clock=clock: clock[0])  # type: ignore[misc]
        shared: Any = SimpleNamespace(
            mode="on", store=store, snapshot=Snapshot(), master_http="", pools=pools, refusals=Refusals(), waiting=[]
        )
        engine = EngineSide()
        engine.open(epoch.memory.control.buffer)
        pushed = records(epoch, chance)
        for _ in range(300):
            clock[0] += chance.choice([1, 100, 1_000_000, 100_000_000])
            what = chance.random()
            if what < 0.6:
                engine.producer.push(*next(pushed))
            elif what < 0.66:
                epoch.tick(clock[0])
            elif what < 0.68:
                epoch.reset(later_weights(chance.randint(1, 5)))
            elif what < 0.70:
                epoch.switch(chance.choice(["on", "off", "shadow"]))
            elif what < 0.72:
                store.answering = True
            elif what < 0.74:
                status(shared, [epoch], 1, None, clock[0])
            else:
                pools.step()
            epoch.drain(chance.choice([0, 1 << 62]))
            for lane in Lane:
                epoch.start_fetch(lane)
                epoch.start_fetch(lane, ahead=True)
            pools.link_share.compete(clock[0], both=chance.random() < 0.3)
            epoch.start_save()
        assert epoch.corrupt is None
        assert epoch.counters["loaded_blocks"] < 300 * epoch.memory.layout.table_entries
        engine.release()
        epoch.end(Ending.ENGINE_GONE)
        while pools.calls:
            pools.step()
        assert epoch.idle
        epoch.close()
        epoch.memory.close()
