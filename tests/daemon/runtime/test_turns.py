"""Whose turn it is, and how often the loop looks, on a loop whose calls end when the test says so."""

from __future__ import annotations

import os
import select
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvprefetch.daemon.engine.epoch_calls import REPLIES
from kvprefetch.daemon.engine.transfers import Found, SaveResult
from kvprefetch.daemon.planning.requests import Key
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.runtime import loop
from kvprefetch.daemon.runtime.loop import TICK_NS, Loop
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.work.calls import FETCHES, CallKind
from kvprefetch.shmring.wire.records import FlagState, RecordKind, Saved, encode_saved
from tests.daemon.engine.announcing import announced, joined
from tests.daemon.engine.epochs import Engine, Pools, block, digest, make_epoch


class LoopPools(Pools):
    """With what a loop asks for; no call ends by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rung = False
        self.fd = os.eventfd(1)  # readable, so that no turn sleeps

    def run_finished(self) -> int:
        return 0


class Turns:
    """A loop over the epochs of `count` engines, each with four save slots."""

    def __init__(self, count: int) -> None:
        self.pools = LoopPools()
        self.engines = [Engine(make_epoch(pools=self.pools)) for _ in range(count)]
        epochs = SimpleNamespace(all=[each.epoch for each in self.engines])
        shared, signals = SimpleNamespace(pools=self.pools), SimpleNamespace(fd=-1)
        control = SimpleNamespace(epochs=epochs, ready=lambda *_: None, reserving={}, asking=[])
        self.epoll = select.epoll()
        self.loop = Loop(cast(Any, shared), cast(Any, control), self.epoll, cast(Any, signals))

    def save(self, engine: int) -> None:
        saved = Saved(1, 0, False, [12, 13, 14, 15], [block(f"{engine}-{i}") for i in range(4)])
        self.engines[engine].push(RecordKind.SAVED, encode_saved(saved))

    def turn(self) -> int | None:
        """One turn of the loop; return the engine that has a put in flight then, which ends now."""
        self.loop.turn(now_ns := time.monotonic_ns(), now_ns + TICK_NS)
        puts = [call for call in self.pools.calls if call.kind is CallKind.SAVE]
        assert len(puts) < 2, "one put at a time"
        if not puts:
            return None
        self.pools.calls.remove(puts[0])
        puts[0].finish(SaveResult(1, 0, 0, []))
        return next(at for at, each in enumerate(self.engines) if each.epoch is puts[0].engine)

    def settle(self) -> None:
        """Turns, in which parts are asked that say that they have work, until nothing more is started."""
        started = -1
        while started < len(self.pools.calls) or any(each.epoch.owes for each in self.engines):
            started = len(self.pools.calls)
            self.loop.turn(now_ns := time.monotonic_ns(), now_ns + TICK_NS)

    def poll(self) -> list[str]:
        """Ask every part, whatever it says; return the kinds of the calls that this starts."""
        before = len(self.pools.calls)
        for epoch in (each.epoch for each in self.engines):
            epoch.planner.tick()
            for lane, ahead in product(Lane, (False, True)):
                epoch.start_fetch(lane, ahead=ahead)
            epoch.start_save()
            epoch.carry_on()
            assert not epoch.owes
        return [call.kind.value for call in self.pools.calls[before:]]

    def close(self) -> None:
        for engine in self.engines:
            engine.leave()
        self.epoll.close()
        os.close(self.pools.fd)


@pytest.fixture
def turns() -> Iterator[Turns]:
    turns = Turns(3)
    yield turns
    turns.close()


def test_the_puts_of_engines_take_turns(turns: Turns) -> None:
    """Also where one came first with all that it has to save."""
    turns.save(0)
    assert turns.turn() == 0
    turns.save(1)
    turns.save(2)
    assert [turns.turn() for _ in range(12)] == [1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, None]


@pytest.mark.parametrize("seed", range(6))
def test_whoever_has_work_says_so(turns: Turns, seed: int) -> None:
    """After any history of several engines a poll of all their parts finds nothing that the turns have left."""
    chance, live, used, kinds = Random(seed), dict[tuple[int, Key], int](), Counter[tuple[int, int]](), set[str]()
    for _ in range(120):
        number, what = chance.randrange(3), chance.random()
        engine = turns.engines[number]
        if what < 0.4 and (flag := chance.randrange(4)) not in [key[0] for at, key in live if at == number]:
            used[number, flag] += 1
            key, start = (flag, used[number, flag]), chance.randrange(20)
            engine.hint([digest(f"{number}-{at}") for at in range(start, start + chance.randint(1, 8))], key=key)
            live[number, key] = start
        elif what < 0.5 and live:
            at, key = chance.choice(sorted(live))
            turns.engines[at].ask(key, stop=chance.random() < 0.3)
        elif what < 0.65 and live:
            at, key = chance.choice(sorted(live))
            turns.engines[at].cancel(key)
            del live[at, key]
        elif what < 0.7:
            names = chance.choice(["abcd", "efgh", "ijkl"])
            engine.epoch.announce(announced(1, names), joined(names), lambda _: None)
        elif turns.pools.calls and what < 0.95:
            call = turns.pools.calls.pop(chance.randrange(len(turns.pools.calls)))
            kinds.add(call.kind.value)
            of = cast(Any, call.on_result).args[0]
            if call.kind is CallKind.LOOK_UP:
                disks = (bytes(chance.choices([0, 1], [3, 1], k=len(digests))) for digests in of.digests)
                call.finish([Found(b"\1" * len(disk), disk) for disk in disks])
            elif call.kind is CallKind.SAVE:
                call.finish(SaveResult(1, 0, 0, []))
            else:
                call.finish(chance.choices([ErrorClass.OK, ErrorClass.MISS], [9, 1], k=len(of.slots)))
        elif engine.credits.available() == 4:
            engine.credits.take(4)
            turns.save(number)
        turns.settle()
        assert turns.poll() == []
    assert kinds == {CallKind.LOOK_UP.value, CallKind.SAVE.value, *(each.value for each in FETCHES)}


def test_a_loop_with_nothing_to_do_for_a_while_wakes_up_less_often(turns: Turns) -> None:
    turns.turn()  # of the daemon's own results
    assert turns.loop.tick_ns == loop.IDLE_TICK_NS
    os.eventfd_read(turns.pools.fd)
    turns.epoll.register(peer := os.eventfd(1))
    turns.turn()  # a peer's message
    assert turns.loop.tick_ns == TICK_NS
    os.close(peer)
    now_ns = time.monotonic_ns()
    turns.loop.turn(now_ns + loop.IDLE_AFTER_NS - 1_000_000_000, 0)
    assert turns.loop.tick_ns == TICK_NS
    turns.loop.turn(now_ns + loop.IDLE_AFTER_NS, 0)  # a turn that finds nothing
    assert turns.loop.tick_ns == loop.IDLE_TICK_NS
    turns.engines[0].stage((1, 1), "a")
    turns.loop.turn(now_ns + loop.IDLE_AFTER_NS, 0)
    assert turns.loop.tick_ns == TICK_NS, "a request waits"


def test_the_loop_sleeps_soon_after_the_last_record_of_an_engine_without_requests(turns: Turns) -> None:
    """And not only at the next tick, looking until then."""
    turns.turn()
    os.eventfd_read(turns.pools.fd)
    now_ns = turns.engines[0].epoch.heard_ns = time.monotonic_ns()
    turns.loop.turn(now_ns, now_ns + 10_000_000_000)
    assert loop.QUIET_NS < time.monotonic_ns() - now_ns < 5_000_000_000
    os.eventfd_write(turns.pools.fd, 1)


def test_what_becomes_of_many_announcements_is_told_a_few_in_a_turn(turns: Turns) -> None:
    """Each costs a message and a line: hundreds end at the same time, and hints wait for none but these few."""
    epoch, told = turns.engines[0].epoch, list[str]()
    for number in range(5 * REPLIES):
        epoch.announce(announced(number, "ab"), joined("ab"), lambda outcome: told.append(outcome.outcome))
    os.eventfd_read(turns.pools.fd)  # nothing else happens
    said = [len(told)]
    epoch.switch("off")
    while epoch.owes:
        said.append(len(told))
        turns.loop.turn(now_ns := time.monotonic_ns(), now_ns + TICK_NS)
    assert told == ["rejected"] * 5 * REPLIES
    assert said == [0, *(REPLIES * turn for turn in range(5))]
    os.eventfd_write(turns.pools.fd, 1)


def test_puts_wait_while_fetches_of_any_engine_are_in_flight(turns: Turns) -> None:
    turns.pools.fetches_in_flight = 1
    turns.save(0)
    assert turns.turn() is None
    turns.pools.link_share.loaded(8 << 20)
    assert turns.turn() == 0, "a fifth of what was moved"
    turns.pools.fetches_in_flight = 0
    assert turns.turn() == 0


def test_behind_a_long_queue_looks_are_rarer_unless_a_request_wants_room(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def select(_read: Any, _write: Any, _error: Any, timeout: float) -> tuple[list[int], list[int], list[int]]:
        waits.append(timeout)
        return [1], [], []

    monkeypatch.setattr(loop, "LOOK_NS", SimpleNamespace(start=1_000_000, stop=1_000_000))
    monkeypatch.setattr("select.select", select)
    first, second, _ = turns.engines
    for number in range(20):
        first.stage((number, 1), "a", "b")
        turns.turn()
    assert waits == [0.001] * 4 + [each / 4000 for each in range(5, 17)] + [0.004] * 4
    second.stage((0, 1), "a")
    turns.turn()
    assert waits[-1] == 0.001, "its next request may be the first in its queue"
    second.put((0, 1), FlagState.RELEASED, 1)
    second.done((0, 1), loaded=1, start=0)
    turns.turn()
    assert waits[-1] == 0.004
    first.stage((20, 1), *"cdefgh")
    turns.turn()
    assert waits[-1] == 0.004
    first.want((21, 1), *"ijklmnop")
    turns.turn()
    assert waits[-1] == 0.001, "it waits for room"
