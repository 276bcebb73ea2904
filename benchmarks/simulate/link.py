"""A storage medium behind a link: calls wait for admission, take a latency, then share the bandwidth equally."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulate.events import NS, Event, Loop, ns


@dataclass(frozen=True, slots=True)
class MediumModel:
    """A medium: `bytes_per_s` of all calls together, `latency_s` of each call, and how many run at a time."""

    bytes_per_s: float
    latency_s: float
    concurrency: int = 64
    call_bytes_per_s: float = float("inf")
    """The limit of one call alone."""


class Link:
    """Calls in flight on one medium. They share equally, so one clock counts the bytes that each of them received."""

    def __init__(self, loop: Loop, model: MediumModel) -> None:
        self._loop, self._model = loop, model
        self._latency_ns = ns(model.latency_s)
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._admitted = 0
        self._active: list[tuple[float, int, Callable[[], None]]] = []  # by the byte clock at which a call is complete
        self._received = 0.0  # the byte clock: bytes of each active call since the link was last idle
        self._since_ns = 0
        self._calls = 0
        self._frozen = False
        self._completion: Event | None = None

    def transfer(self, size: int, done: Callable[[], None]) -> None:
        """Move `size` bytes, then call `done`."""
        self._waiting.append((size, done))
        self._admit()

    def freeze(self, frozen: bool) -> None:
        """While frozen, no bytes move; a call in its latency goes on to wait for bytes."""
        self._update()
        self._frozen = frozen
        self._reschedule()

    def _admit(self) -> None:
        while self._waiting and self._admitted < self._model.concurrency:
            size, done = self._waiting.popleft()
            self._admitted += 1
            self._loop.after(self._latency_ns, lambda size=size, done=done: self._begin(size, done))  # type: ignore[misc]

    def _begin(self, size: int, done: Callable[[], None]) -> None:
        self._update()
        self._calls += 1
        heapq.heappush(self._active, (self._received + size, self._calls, done))
        self._reschedule()

    def _rate(self) -> float:
        if self._frozen or not self._active:
            return 0.0
        return min(self._model.bytes_per_s / len(self._active), self._model.call_bytes_per_s)

    def _update(self) -> None:
        self._received += self._rate() * (self._loop.now_ns - self._since_ns) / NS
        self._since_ns = self._loop.now_ns
        if not self._active:
            self._received = 0.0  # a small sum keeps its precision over a long run

    def _reschedule(self) -> None:
        if self._completion is not None:
            self._completion.cancel()
            self._completion = None
        rate = self._rate()
        if rate > 0.0:
            left = max(0.0, self._active[0][0] - self._received)
            self._completion = self._loop.after(round(left / rate * NS), self._complete)

    def _complete(self) -> None:
        """End the first call, even if rounding to whole nanoseconds left a byte of it."""
        self._completion = None
        self._update()
        target, _, done = heapq.heappop(self._active)
        self._received = max(self._received, target)
        self._admitted -= 1
        self._reschedule()
        self._admit()
        done()
