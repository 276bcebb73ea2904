"""Sixty-four engines with more hints than the daemon carries: each is served alike, and nothing is left of them."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable

import pytest

from kvprefetch.daemon.telemetry import board
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.runtime.test_soak import SLACK, held
from tests.daemon.stores import blocks, stored
from tests.lab.daemon import Daemon
from tests.support.auditor import Auditor
from tests.support.engine_side import Key
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

LENGTH, PROMPTS = 4, 4
HIT_EVERY = 4  # a hint of so many is for a stored prompt
OPEN = 64  # requests of an engine at a time
SILENT_S = 2.0  # the daemon shows a picture each second


class Paced:
    """An engine that hints at its pace, whatever the daemon does, and loads what is there."""

    def __init__(self, daemon: Daemon, number: int, rate: float) -> None:
        name = f"paced{number}"
        self._engine = FakeEngine(daemon.socket, engine_id=name, prefix=name)
        self._prompts = [blocks(f"{name} {each}", LENGTH) for each in range(PROMPTS)]
        for save_id, prompt in enumerate(self._prompts):
            self._engine.save(prompt, save_id=save_id + 1)
        self._pause_s, self._next_s = 1 / rate, 0.0
        self._numbers = itertools.count()
        self._open: deque[tuple[Key, dict[bytes, bytes] | None, float]] = deque()
        self.waits_s: list[float] = []
        self.hits = self.held_back = 0

    def begin(self, now_s: float, share: float) -> None:
        """Begin to count; `share`: of a pause, so that engines do not hint together."""
        self.waits_s.clear()
        self.hits = self.held_back = 0
        self._next_s = now_s + share * self._pause_s

    def turn(self, now_s: float) -> None:
        """Take what was answered, and send what is due."""
        while self._open and self._engine.flag(self._open[0][0]).state != FlagState.HINTED:
            self._take(*self._open.popleft(), now_s)
        while self._next_s <= now_s:
            self._next_s += self._pause_s
            if len(self._open) >= OPEN:
                self.held_back += 1
                continue
            number = next(self._numbers)
            known = self._prompts[number // HIT_EVERY % PROMPTS] if number % HIT_EVERY == 0 else None
            digests = list(known) if known is not None else [os.urandom(32) for _ in range(LENGTH)]
            self._open.append((self._engine.hint(digests, name=f"{number}"), known, now_s))

    def _take(self, key: Key, known: dict[bytes, bytes] | None, since_s: float, now_s: float) -> None:
        self.waits_s.append(now_s - since_s)
        values = self._engine.take(key) if self._engine.flag(key).count else None
        if values is None:
            self._engine.cancel(key, records.Outcome.MISS)
            return
        assert known is not None, "a hit that nobody stored"
        assert values == list(known.values())[: len(values)]
        self.hits += 1

    def end(self) -> None:
        while self._open:
            self._take(*self._open.popleft(), time.monotonic())

    def close(self) -> None:
        self._engine.close()

    def answered(self) -> bool:
        return all(self._engine.flag(key).state != FlagState.HINTED for key, _, _ in self._open)


def drive(engines: list[Paced], daemon: Daemon, seconds: float) -> float:
    """Let all of them hint for so long; return the longest time for which the daemon showed no new picture."""
    now_s = begun_s = looked_s = time.monotonic()
    silent_s = 0.0
    for number, engine in enumerate(engines):
        engine.begin(begun_s, number / len(engines))
    while now_s < begun_s + seconds:
        for engine in engines:
            engine.turn(time.monotonic())
        now_s = time.monotonic()
        if now_s > looked_s + 0.2:
            looked_s = now_s
            daemon.forget()  # a thousand bytes for each request
            picture = board.read(daemon.socket)
            assert picture is not None
            silent_s = max(silent_s, now_s - picture.beat_ns / 1e9)
        time.sleep(0.0005)
    eventually(lambda: all(engine.answered() for engine in engines), 30, "all answers")
    for engine in engines:
        engine.end()
    return silent_s


@pytest.mark.parametrize(
    ("count", "rate", "seconds", "carried"),
    [
        (8, 400, 2.0, True),
        pytest.param(64, 1_500, 600.0, True, marks=pytest.mark.stress),
        pytest.param(64, 5_000, 60.0, False, marks=pytest.mark.stress),  # one core serves about 2,000
    ],
)
@pytest.mark.timeout(1200)
def test_many_engines_are_served_alike(
    serve: Callable[..., Daemon], auditor: Auditor, count: int, rate: int, seconds: float, carried: bool
) -> None:
    limits = ("--max-engines", str(count), "--max-engines-per-uid", str(count))
    daemon = serve(memory="64MiB", staging="2MiB", extra=limits)
    before = held(daemon.pid)
    engines = [Paced(daemon, number, rate / count) for number in range(count)]
    stored(daemon, count * PROMPTS * LENGTH)
    drive(engines, daemon, min(30.0, seconds / 4))  # until all that grows once has grown
    warm, cpu = held(daemon.pid), time.process_time()
    silent_s = drive(engines, daemon, seconds)
    own_cores = (time.process_time() - cpu) / seconds
    kib, descriptors, threads = held(daemon.pid)
    medians = sorted(statistics.median(engine.waits_s) for engine in engines)
    every = sorted(wait for engine in engines for wait in engine.waits_s)
    sent, late = len(every), sum(engine.held_back for engine in engines)
    print(
        f"{sent / seconds:.0f} hints a second of {rate}, {late} held back; this process took {own_cores:.2f} cores; "
        f"answers, ms: median of engines {1e3 * medians[0]:.1f} to {1e3 * medians[-1]:.1f}, p99 "
        f"{1e3 * every[int(0.99 * sent)]:.1f}, last {1e3 * every[-1]:.1f}; silent {silent_s:.2f} s; "
        f"{warm} then, {(kib, descriptors, threads)} at the end"
    )
    assert not carried or late < 0.05 * sent
    assert sum(engine.hits for engine in engines) > 0.9 * sent / HIT_EVERY
    assert medians[-1] < (3 if carried else 1.5) * medians[0] + 0.1
    assert silent_s < 1.0 + SILENT_S
    assert kib < 1.05 * warm[0] + (8 << 10)
    assert descriptors <= warm[1] + SLACK
    assert threads <= warm[2] + SLACK
    for engine in engines:
        engine.close()
    eventually(lambda: held(daemon.pid)[1] <= before[1] + SLACK, 30, "the engines' descriptors closed")
    auditor.assert_idle(daemon.pid, daemon.socket)
