"""The circuit breaker around the store: after a failure calls fail at once for a while, then one tries it again.

The clock is handed in; any thread may call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0


class Attempt(NamedTuple):
    """A call that may be made: how many had worked before it, and whether it is the one that tries an open breaker."""

    worked: int
    probe: bool


class Breaker:
    """Opens for MIN_PAUSE_S, for twice as long after each further failure in a row; closes with a call that worked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds, monotonic."""
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._pause_s = 0.0  # 0 while closed
        self._worked = 0  # calls so far that did
        self._probing = False

    @property
    def closed(self) -> bool:
        return self._pause_s == 0

    @property
    def due(self) -> bool:
        """Whether it is open, and time to try the store."""
        return not self.closed and not self._probing and self._clock() >= self._retry_at

    @property
    def wait_s(self) -> float:
        """Until it is time."""
        return max(0.0, self._retry_at - self._clock())

    def begin(self) -> Attempt | None:
        """A call may be made; end() follows. None while it may not."""
        with self._lock:
            if self.closed:
                return Attempt(self._worked, probe=False)
            if not self.due:
                return None
            self._probing = True
            return Attempt(self._worked, probe=True)

    def end(self, attempt: Attempt) -> None:
        """The call is over, whatever became of it."""
        if attempt.probe:
            self._probing = False

    def worked(self) -> bool:
        """A call worked; whether the breaker was open."""
        with self._lock:
            was_open = not self.closed
            self._worked += 1
            self._pause_s = 0.0
        return was_open

    def failed(self, attempt: Attempt | None = None) -> float:
        """A call failed as a whole, or hangs; for how many seconds the breaker is open now.

        A call that hung for long says nothing of now where others worked since it began: that leaves it as it is.
        """
        with self._lock:
            if attempt is None or attempt.worked == self._worked:
                self._pause_s = min(max(MIN_PAUSE_S, self._pause_s * 2), MAX_PAUSE_S)
                self._retry_at = self._clock() + self._pause_s
            return self._pause_s
