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
        self.open: dict[str, RequestState] = {}  # deferred in this pass or the one before

    def deferred(self, state: RequestState, now_ns: int) -> None:
        """The request is answered None: it waits, since `now_ns`."""
        self._counters["waits"] += state.defer(now_ns, self._pass)
        self.open[state.request.request_id] = state

    def over(self, state: RequestState, now_ns: int) -> None:
        """The request is asked about again, or ended: the cost of its last None is known."""
        self._counters["wait_ns"] += state.resume(now_ns)

    def pass_ended(self, now_ns: int) -> None:
        """Requests deferred in the pass before and not visited in this one no longer wait for us."""
        for state in [state for state in self.open.values() if state.deferred_in != self._pass]:
            del self.open[state.request.request_id]
            self.over(state, now_ns)
        self._pass += 1
