"""How fast the store's memory, its disks and puts moved bytes: now, in the last five minutes and hour.

Pure.  A rate is bytes by the time in which at least one call was in flight, so an idle link changes nothing.  It is
taken every SLICE_NS; what a window had is the median of its slices, which a slow quarter of an hour does not move.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SLICE_NS = 5_000_000_000
HOUR_NS = 3_600_000_000_000
PATHS = ("memory", "disk", "save")  # fetches by medium, in the order of Lane, and puts
_FIVE_MINUTES_NS = 300_000_000_000
_NOW_NS = 2 * SLICE_NS
_BUSY_NS = 50_000_000  # a slice with less says nothing


class Meter:
    """One path. At most 720 slices are kept."""

    def __init__(self) -> None:
        self._in_flight, self._since_ns = 0, 0
        self._bytes = self._busy_ns = 0  # in all
        self.began_ns, self._slice = 0, (0, 0)  # when the slice began; bytes and busy time until then
        self.rests = True  # nothing was in flight since then, and no slice is kept
        self._slices: deque[tuple[int, float]] = deque()  # (end, bytes per second) of the last hour
        # Bytes per second, by window. `now`: the last slice, of the last ten seconds.
        self.known: dict[str, float] = {}

    def began(self, now_ns: int) -> None:
        if not self._in_flight:
            self._since_ns = now_ns
        self._in_flight += 1
        self.rests = False

    def add(self, count: int) -> None:
        self._bytes += count

    def ended(self, now_ns: int) -> None:
        """Enter that a call ended, or was given up."""
        self._in_flight -= 1
        if not self._in_flight:
            self._busy_ns += now_ns - self._since_ns

    def total(self, now_ns: int) -> tuple[int, int]:
        """Return the bytes that calls moved since the start, and the time (ns) in which one was in flight."""
        return self._bytes, self._busy_ns + (now_ns - self._since_ns if self._in_flight else 0)

    def tick(self, now_ns: int) -> None:
        """End a slice that is over."""
        (count, busy), (count_now, busy_now) = self._slice, self.total(now_ns)
        count, busy = count_now - count, busy_now - busy
        if now_ns - self.began_ns < SLICE_NS or (self._in_flight and not count):
            return  # the bytes of a call are known at its end
        self.began_ns, self._slice = now_ns, (count_now, busy_now)
        if count > 0 and busy >= _BUSY_NS:
            self._slices.append((now_ns, count / busy * 1e9))
        while self._slices and now_ns - self._slices[0][0] > HOUR_NS:
            self._slices.popleft()
        found = {
            "now": [rate for at_ns, rate in self._slices if now_ns - at_ns <= _NOW_NS][-1:],
            "5m": [rate for at_ns, rate in self._slices if now_ns - at_ns <= _FIVE_MINUTES_NS],
            "hour": [rate for _, rate in self._slices],
        }
        self.known = {window: median(rates) for window, rates in found.items() if rates}
        self.rests = not self._slices and not self._in_flight


class Rates:
    """The meters of all paths: those of fetches by number of their lane, and the one of puts."""

    def __init__(self) -> None:
        self.fetches, self.saves = (Meter(), Meter()), Meter()
        self._all = dict(zip(PATHS, (*self.fetches, self.saves), strict=True))

    def tick(self, now_ns: int) -> None:
        """Call it several times a second."""
        for meter in self._all.values():
            if not meter.rests and now_ns - meter.began_ns >= SLICE_NS:
                meter.tick(now_ns)

    def known(self) -> dict[str, dict[str, float]]:
        """Return the bytes per second of each path that had traffic, by window."""
        return {path: meter.known for path, meter in self._all.items() if meter.known}
