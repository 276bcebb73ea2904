"""How fast the store's memory, its disks and puts moved bytes: now, in the last five minutes, hour and day.

Pure.  A rate is bytes by the time in which at least one call was in flight, so an idle link changes nothing.  It is
taken every SLICE_NS; what a window had is the median of its slices, which a slow quarter of an hour does not move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from ..telemetry.causes import SLOW_SHARE

SLICE_NS = 5_000_000_000
HOUR_NS, DAY_HOURS = 3_600_000_000_000, 24
PATHS = ("memory", "disk", "save")  # fetches by medium, in the order of Lane, and puts
_FIVE_MINUTES_NS = 300_000_000_000
_NOW_NS = 2 * SLICE_NS
_BUSY_NS = 50_000_000  # a slice with less says nothing
_SLOW_BUSY_NS = 1_000_000_000  # a slice that is called slow
_KNOWN = 2  # slices of the hour before one is called slow
_REPEAT_NS = 60_000_000_000


class Slow(NamedTuple):
    """A slice far below the hour before it. Bytes per second."""

    path: str
    rate: float
    hour: float


class Meter:
    """One path. At most 720 slices and 24 hours are kept."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._in_flight, self._since_ns = 0, 0
        self._bytes = self._busy_ns = 0  # in all
        self._slice = (0, 0, 0)  # when it began; bytes and busy time until then
        self._slices: deque[tuple[int, float]] = deque()  # (end, bytes per second) of the last hour
        self._hours: deque[float] = deque(maxlen=DAY_HOURS)
        self._hour_ns = self._said_ns = 0
        self.known: dict[
            str, float
        ] = {}  # bytes per second, by window (`now`: the last slice, of the last ten seconds)

    def began(self, now_ns: int) -> None:
        """Enter a call."""
        if not self._in_flight:
            self._since_ns = now_ns
        self._in_flight += 1

    def add(self, count: int) -> None:
        """Enter the bytes that a call moved."""
        self._bytes += count

    def ended(self, now_ns: int) -> None:
        """Enter that a call ended, or was given up."""
        self._in_flight -= 1
        if not self._in_flight:
            self._busy_ns += now_ns - self._since_ns

    def total(self, now_ns: int) -> tuple[int, int]:
        """Return the bytes that calls moved since the start, and the time (ns) in which one was in flight."""
        return self._bytes, self._busy_ns + (now_ns - self._since_ns if self._in_flight else 0)

    def tick(self, now_ns: int) -> Slow | None:
        """End a slice that is over; return it where it is well below the hour before it, once a minute."""
        (began_ns, count, busy), (count_now, busy_now) = self._slice, self.total(now_ns)
        count, busy = count_now - count, busy_now - busy
        if now_ns - began_ns < SLICE_NS or (self._in_flight and not count):
            return None  # the bytes of a call are known at its end
        self._slice = (now_ns, count_now, busy_now)
        hour, known, rate = self.known.get("hour"), len(self._slices), count / busy * 1e9 if busy else 0.0
        if telling := count > 0 and busy >= _BUSY_NS:
            self._slices.append((now_ns, rate))
        self._learn(now_ns)
        due = not self._said_ns or now_ns - self._said_ns >= _REPEAT_NS
        far_below = hour is not None and known >= _KNOWN and rate < SLOW_SHARE * hour
        if hour is None or not (telling and far_below and busy >= _SLOW_BUSY_NS and due):
            return None
        self._said_ns = now_ns
        return Slow(self._path, rate, hour)

    def _learn(self, now_ns: int) -> None:
        while self._slices and now_ns - self._slices[0][0] > HOUR_NS:
            self._slices.popleft()
        hour = [rate for _, rate in self._slices]
        self._hour_ns = self._hour_ns or now_ns
        if hour and now_ns - self._hour_ns >= HOUR_NS:
            self._hour_ns = now_ns
            self._hours.append(median(hour))
        found = {
            "now": [rate for at_ns, rate in self._slices if now_ns - at_ns <= _NOW_NS][-1:],
            "5m": [rate for at_ns, rate in self._slices if now_ns - at_ns <= _FIVE_MINUTES_NS],
            "hour": hour,
            "day": [*self._hours, *([median(hour)] if hour else [])],
        }
        self.known = {window: median(rates) for window, rates in found.items() if rates}


class Rates:
    """The meters of all paths: those of fetches by number of their lane, and the one of puts."""

    def __init__(self) -> None:
        self.fetches = (Meter(PATHS[0]), Meter(PATHS[1]))
        self.saves = Meter(PATHS[2])
        self._all = dict(zip(PATHS, (*self.fetches, self.saves), strict=True))

    def tick(self, now_ns: int) -> Iterator[Slow]:
        """Call it several times a second; yields what became slow."""
        for meter in self._all.values():
            if (slow := meter.tick(now_ns)) is not None:
                yield slow

    def known(self) -> dict[str, dict[str, float]]:
        """Return the bytes per second of each path that had traffic, by window."""
        return {path: meter.known for path, meter in self._all.items() if meter.known}
