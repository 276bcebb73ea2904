"""Count how long the scheduler waited for us: the cost of each None, in passes over the queue.

vLLM asks about a request when it has a free place and tokens for it; a None costs the request this pass.  A pass that
ends without asking again gave its places or tokens to others: from then on the request queues as it would without us.
So a None counts until the next question or the end of the next pass, whichever comes first.  An answer that is ready
earlier helps nobody: the scheduler does not look in between.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import Protocol

from .request_state import RequestState


class Clock(Protocol):
    """CLOCK_MONOTONIC, and the sleep between two looks of an idle engine."""

    def now_ns(self) -> int: ...
    def pause(self) -> None: ...


class SystemClock:
    now_ns = staticmethod(time.monotonic_ns)
    pause = staticmethod(partial(time.sleep, 50e-6))  # the kernel makes it about twice as long


class Waits:
    """Counts `waits` and `wait_ns`, and for each hint its own `waited_ns`. All times are CLOCK_MONOTONIC ns."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._pass = 0
        self._before: list[RequestState] = []  # deferred in the pass before
        self._now: list[RequestState] = []  # and in this one

    @property
    def open(self) -> bool:
        """Whether the end of a pass may end a wait."""
        return bool(self._now or self._before)

    def deferred(self, state: RequestState, now_ns: int) -> None:
        """The request was answered None: it has to wait."""
        self._counters["waits"] += state.defer(now_ns, self._pass)
        self._now.append(state)

    def go_on(self, state: RequestState) -> None:
        """A deferred request is asked about again and goes on waiting: its wait is charged when it ends."""
        state.defer(state.deferred_ns, self._pass)
        self._now.append(state)

    def over(self, state: RequestState, now_ns: int) -> None:
        """The request is asked about again, or ended: the cost of its last None is known."""
        self._counters["wait_ns"] += state.resume(now_ns)

    def pass_ended(self, now_ns: int) -> None:
        """Requests deferred in the pass before and not visited in this one no longer wait for us."""
        for state in self._before:
            if state.deferred_in != self._pass:
                self.over(state, now_ns)
        self._before, self._now = self._now, []
        self._pass += 1
