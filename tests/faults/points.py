"""Crash points: steps of the protocol that another process can observe, at which a signal goes to a victim.

    python -m tests.faults.points serve …          a daemon with crash points, armed by the file in $KVPREFETCH_FAULTS

In an engine the lab calls `install` before it builds one (`EngineSpec.prepare`); workers are forked of that process.
The campaign arms one point for one signal.  Whichever process comes there sends it, so each victim can be hit at each
point: also the storage node while a worker copies.  Products have no such code: the points wrap its methods.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvprefetch.shmring._atomics import Words

VARIABLE = "KVPREFETCH_FAULTS"
# The words of the file; behind the last one, how often each point was passed.
_ARMED, _PID, _SIGNAL, _LEFT, _FIRED, _NOTICED, _PASSED = range(7)
_BYTES = 4096


def _any(_: Any) -> bool:
    return True


def _loads(given: Sequence[Any]) -> bool:
    return bool(given[1].loads)


def _saves(given: Sequence[Any]) -> bool:
    return bool(given[1].saves)


@dataclass(frozen=True)
class Point:
    """A step: the method (under `kvprefetch`), and whether the point is before or after it.

    `given` looks at the arguments before, `gave` at the result.  `attach`: the step is part of an engine's attachment,
    otherwise of serving requests.
    """

    name: str
    method: str
    before: bool = False
    given: Callable[[Sequence[Any]], bool] = _any
    gave: Callable[[Any], bool] = _any
    attach: bool = False


POINTS = (
    Point("segments reserved", "daemon.control.handshake:Handshake._reserved", before=True, attach=True),
    Point("segments handed over", "daemon.control.handshake:Handshake._hand_over", attach=True),
    Point("epoch mapped", "connector.attach.link:Link._attached", attach=True),
    Point("hint written", "connector.request.claims:Claims.push", gave=bool),
    Point("hint read", "daemon.engine.epoch:Epoch._hint"),
    Point("store asked", "daemon.store.client:Store.exist", before=True),
    Point("store answered", "daemon.engine.epoch_calls:EpochCalls._looked_up", before=True),
    Point("fetch begun", "daemon.store.client:Store.get_into", before=True),
    Point("fetch ended", "daemon.engine.epoch_fetches:Fetches._ended", before=True),
    Point("blocks shown", "daemon.engine.channel:Channel.publish"),
    Point("blocks claimed", "connector.request.claims:Claims._take", gave=lambda reply: bool(reply[0])),
    Point("load ordered", "connector.scheduler.scheduler:SchedulerSide.take_loads", gave=lambda meta: bool(meta.loads)),
    Point("load begun", "connector.worker.worker:WorkerSide.load", before=True, given=_loads),
    Point("load ended", "connector.worker.worker:WorkerSide.load", given=_loads),
    Point("slots given back", "connector.request.hints:finish"),
    Point("end read", "daemon.engine.epoch:Epoch._done", before=True),
    Point("saves ordered", "connector.request.saves:Saves._order"),
    Point("save copied", "connector.worker.worker:WorkerSide.save", given=_saves),
    Point("save reported", "connector.request.saves:Saves.flush"),
    Point("put begun", "daemon.store.client:Store.put_from", before=True),
    Point("put ended", "daemon.engine.epoch_calls:EpochCalls._stored", before=True),
)
# Where one side learns of the other's end.
_NOTICES = ("connector.attach.link:Link._lost", "daemon.control.handshake:Handshake._dissolve")


class Trigger:
    """The file that arms a point; the campaign and all processes with points map it."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self._words = Words(self._memory)

    def arm(self, point: Point | None, pid: int, signal_: int, nth: int = 1) -> None:
        """Send `pid` the signal when a process comes to the point for the n-th time from now on; None: at `fire`."""
        self.disarm()
        for word, value in ((_PID, pid), (_SIGNAL, signal_), (_LEFT, nth)):
            self._words.store_release(word, value)
        self._words.store_release(_ARMED, 1 + POINTS.index(point) if point is not None else 0)

    def disarm(self) -> None:
        """Let no point fire, and forget what did."""
        for word in (_ARMED, _FIRED, _NOTICED):
            self._words.store_release(word, 0)

    def hit(self, number: int) -> None:
        """This process is at the point of this number."""
        self._words.store_release(_PASSED + number, 1 + self._words.load_acquire(_PASSED + number))
        if self._words.load_acquire(_ARMED) != number:
            return
        if (left := self._words.load_acquire(_LEFT)) > 1:
            self._words.store_release(_LEFT, left - 1)
            return
        self.fire()

    def fire(self) -> None:
        """Send the signal now."""
        self._words.store_release(_ARMED, 0)
        self._words.store_release(_FIRED, time.monotonic_ns())
        os.kill(self._words.load_acquire(_PID), self._words.load_acquire(_SIGNAL))

    def notice(self) -> None:
        """A process learnt of another one's end."""
        if self._words.load_acquire(_FIRED) and not self._words.load_acquire(_NOTICED):
            self._words.store_release(_NOTICED, time.monotonic_ns())

    def passed(self) -> dict[Point, int]:
        """Count how often each point was passed until now; about, as no process waits for another one here."""
        return {point: self._words.load_acquire(_PASSED + number) for number, point in enumerate(POINTS, start=1)}

    @property
    def pid(self) -> int:
        """Whom the signal is for."""
        return self._words.load_acquire(_PID)

    @property
    def fired(self) -> bool:
        return self._words.load_acquire(_FIRED) > 0

    @property
    def noticed_ns(self) -> int:
        """When a process learnt of the end, CLOCK_MONOTONIC; 0: not yet."""
        return self._words.load_acquire(_NOTICED)


def _wrap(method: str, around: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]) -> None:
    """Let a method, or a function, of the product be called by `around`."""
    module, _, path = method.partition(":")
    owner: Any = importlib.import_module(f"kvprefetch.{module}")
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def wrapped(*given: Any, **named: Any) -> Any:
        return around(whole, given, named)

    setattr(owner, name, wrapped)


def _put(trigger: Trigger, number: int, point: Point) -> None:
    def around(whole: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        here = point.given(given)
        if here and point.before:
            trigger.hit(number)
        result = whole(*given, **named)
        if here and not point.before and point.gave(result):
            trigger.hit(number)
        return result

    _wrap(point.method, around)


def install(side: str = "connector") -> None:
    """Put the points of one side of the product into this process, before its objects are made."""
    trigger = Trigger(Path(os.environ[VARIABLE]))

    def told(whole: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        trigger.notice()
        return whole(*given, **named)

    for number, point in enumerate(POINTS, start=1):
        if point.method.startswith(side):
            _put(trigger, number, point)
    for method in _NOTICES:
        if method.startswith(side):
            _wrap(method, told)


if __name__ == "__main__":
    install("daemon")
    sys.argv[0] = "kvprefetchd"
    runpy.run_module("kvprefetch.daemon", run_name="__main__")
