"""How many store calls of one lane to have in flight: climbs while the link gives more, goes back when it does not.

Pure.  Calls in flight wait for each other, so that an urgent one comes later, and each may keep a core busy: so a
further one has to earn its place.  The rate with a limit is compared with that of a neighbour, tried for a while now
and then.
"""

from __future__ import annotations

WINDOW_NS = 200_000_000
WINDOW_CALLS = 8
HOLD_WINDOWS = 10  # between two tries
BETTER = 1.05  # what one call more must bring
AS_GOOD = 0.97  # what one call less may cost


class ConcurrencyLimit:
    """`calls` is between 1 and `most`. Time counts only while work is waiting: a link that idles says nothing."""

    def __init__(self, most: int, start: int = 1) -> None:
        self.most = most
        self.calls = min(start, most)
        self._base = self.calls  # what `calls` goes back to when a try fails
        self._base_rate = 0.0  # bytes per ns, over the windows held since the last move
        self._held = 0
        self._hold = 1  # windows until the next try
        self._step = 1
        self._start_ns = -1
        self._bytes = 0
        self._completed = 0

    def completed(self, count: int, now_ns: int, *, waiting: bool) -> None:
        """Enter a call that brought `count` bytes; `waiting`: there is work for another one at once."""
        if not waiting:
            self._start_ns = -1
            return
        if self._start_ns < 0:
            self._begin(now_ns)
            return
        self._bytes += count
        self._completed += 1
        elapsed = now_ns - self._start_ns
        if elapsed >= WINDOW_NS and self._completed >= WINDOW_CALLS:
            self._window(self._bytes / elapsed)
            self._begin(now_ns)

    def _begin(self, now_ns: int) -> None:
        self._start_ns, self._bytes, self._completed = now_ns, 0, 0

    def _window(self, rate: float) -> None:
        if self.calls == self._base:
            self._held += 1
            self._base_rate += (rate - self._base_rate) / self._held
            if self._held >= self._hold:
                self._try()
            return
        kept = rate >= self._base_rate * (BETTER if self.calls > self._base else AS_GOOD)
        if kept:  # it may go on in this direction
            self._base, self._base_rate, self._hold = self.calls, rate, 1
        else:
            self._step, self._hold = -self._step, HOLD_WINDOWS
        self._held = 1 if kept else 0
        self.calls = self._base

    def _try(self) -> None:
        if not 1 <= self._base + self._step <= self.most:
            self._step = -self._step
        self.calls = max(1, min(self.most, self._base + self._step))
        if self.calls == self._base:  # a limit of 1
            self._held = 0
