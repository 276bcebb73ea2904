"""How fast a lane's fetches are, and how large one from memory is: what the link carries in CALL_NS.

Pure.  Blocks are published when their call has returned.  An engine decides by them whether it waits, and an urgent
request waits for the calls in flight.  The rate is bytes by the time in which such a fetch was in flight.  Most of a
short call is its own delay, so it may show that the link is faster, but not that it is slower.  Disks have no size of
calls: where a call has a delay of more than CALL_NS, small calls make it slow, and a slow one makes them smaller.
"""

from __future__ import annotations

CALL_NS = 15_000_000
QUICK_BYTES = 4 << 20
_SHORT_NS = 25_000_000
_RATE_NS = 10 * CALL_NS  # of fetches; older ones count half, or less
_PACE_NS = 1_000_000_000


class CallSize:
    """The size of calls; unbounded until one brought something.

    `ns_per_byte`: the lane's pace with all delays, 0 until then.  Requests are put in order by it, and equal ones keep
    theirs, so it moves only once the pace is half or twice as much.
    """

    def __init__(self) -> None:
        self.ns_per_byte = 0.0
        self._total = (0, 0)
        self._bytes = self._ns = 0.0
        self._moved = self._busy_ns = 0.0  # of all calls, also those that say nothing of the link

    def fetched(self, count: int, duration_ns: int, total: tuple[int, int]) -> None:
        """Enter a call's good bytes and time, and all bytes and their time (ns) since the start, which include it."""
        moved, busy_ns = total[0] - self._total[0], total[1] - self._total[1]
        busy_ns = min(busy_ns, duration_ns)  # the rest is of a call that hangs
        self._total = total
        if not count:
            return  # it failed, or hung: that is no rate
        self._moved, self._busy_ns = self._moved + moved, self._busy_ns + busy_ns
        while self._busy_ns > _PACE_NS:
            self._moved, self._busy_ns = self._moved / 2, self._busy_ns / 2
        pace = self._busy_ns / self._moved
        if not self.ns_per_byte / 2 < pace < 2 * self.ns_per_byte:
            self.ns_per_byte = pace
        if busy_ns < _SHORT_NS and moved * self._ns <= self._bytes * busy_ns:
            return
        self._bytes, self._ns = self._bytes + moved, self._ns + busy_ns
        while self._ns > _RATE_NS:
            self._bytes, self._ns = self._bytes / 2, self._ns / 2

    @property
    def quick(self) -> bool:
        """Whether a call may have QUICK_BYTES: then the time between calls counts. False until one came."""
        return self.ns_per_byte > 0 and self._bytes * CALL_NS >= QUICK_BYTES * self._ns

    def blocks(self, block_bytes: int) -> int | None:
        """Return how many blocks of this size a call has, at least one; None: as many as it may."""
        return max(1, int(self._bytes * CALL_NS / self._ns) // block_bytes) if self._ns else None
