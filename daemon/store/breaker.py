"""The circuit breaker around the store: after a failure calls fail at once for a while, then one call tries again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0


class Attempt(NamedTuple):
    """A call that may be made: how many calls had worked before it, and whether it tries an open breaker."""

    worked: int
    probe: bool


class Breaker:
    """Opens for MIN_PAUSE_S, twice as long after each further failure in a row; closes when a call works.

    `clock`: seconds, monotonic. Any thread may call.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._pause_s = 0.0  # 0 while closed
        self.closed = True
        self._worked = 0  # calls so far
        self._known_at = clock()  # when a call worked or failed last
        self._probing = False

    @property
    def due(self) -> bool:
        """Whether the breaker is open, and time to try the store."""
        return not self.closed and not self._probing and self._clock() >= self._retry_at

    @property
    def quiet_s(self) -> float:
        """Seconds since a call worked or failed."""
        return self._clock() - self._known_at

    def begin(self) -> Attempt | None:
        """Admit a call, which end() follows; None while the breaker admits none."""
        with self._lock:
            if self.closed:
                return Attempt(self._worked, probe=False)
            if not self.due:
                return None
            self._probing = True
            return Attempt(self._worked, probe=True)

    def end(self, attempt: Attempt) -> None:
        """Note that the call is over, whether it worked or not."""
        if attempt.probe:
            self._probing = False

    def worked(self) -> bool:
        """Close the breaker after a call that worked; return whether it was open."""
        with self._lock:
            was_open = not self.closed
            self._worked += 1
            self._pause_s, self.closed, self._known_at = 0.0, True, self._clock()
        return was_open

    def failed(self, attempt: Attempt | None = None) -> float:
        """Open the breaker after a call that failed as a whole, or hangs; return for how many seconds.

        A call that hung while others worked says nothing of now and changes nothing, and so does one that began before
        the breaker opened: many that fail together are one failure.
        """
        with self._lock:
            self._known_at = self._clock()
            counts = attempt is None or attempt.worked == self._worked
            if counts and (self.closed or (attempt is not None and attempt.probe)):
                self._pause_s = min(max(MIN_PAUSE_S, self._pause_s * 2), MAX_PAUSE_S)
                self._retry_at, self.closed = self._clock() + self._pause_s, False
            return self._pause_s
