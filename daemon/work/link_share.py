"""How much of the link saves get while loads go on, and how large a put is.

Pure.  While loads and saves compete, a put may start as long as saves had at most SHARE of what the link could move in
this time: what it moved, or what puts alone would have moved at their measured rate, whichever is more.  So loads that
fill the link leave saves a fifth of its bytes, and loads that wait for something else leave them a fifth of its time.
"""

from __future__ import annotations

SHARE = 0.2
PUT_NS = 8_000_000  # of one put: a load that comes meanwhile shares the link with it
FIRST_RATE = 0.125  # bytes per ns, until puts were measured: 1 Gbit/s
MEMORY = 8  # puts; older ones count half, or less

_RATE_NS = 10 * PUT_NS
_LONGEST_NS = 1_000_000_000  # a put that took longer waited for something else than the link


class LinkShare:
    """Shares the daemon's link between the loads and the saves of all engines. It never queues anything."""

    def __init__(self) -> None:
        self._put_bytes, self._put_ns = FIRST_RATE * PUT_NS, float(PUT_NS)  # of the last puts
        self._since_ns = -1.0  # since when both compete; -1: they do not
        self.competing = False
        self._saved = self._loaded = 0.0  # bytes in this time

    @property
    def rate(self) -> float:
        """Bytes per ns of the last puts."""
        return self._put_bytes / self._put_ns

    @property
    def put_bytes(self) -> int:
        """Bytes of a put that lasts PUT_NS."""
        return int(self.rate * PUT_NS)

    def compete(self, now_ns: int, *, both: bool) -> None:
        """Say whether loads and saves `both` have work now. Saves begin as if a put had just ended."""
        self.competing = both
        if not both:
            self._since_ns = -1.0
        elif self._since_ns < 0:
            self._since_ns, self._saved, self._loaded = now_ns, self.put_bytes, 0.0

    def open(self, now_ns: int) -> bool:
        """Whether a put may start now."""
        if self._since_ns < 0:
            return True
        could_move = max(self._saved + self._loaded, self.rate * (now_ns - self._since_ns))
        return self._saved <= SHARE * could_move

    def loaded(self, count: int) -> None:
        self._loaded += count

    def started(self, count: int, now_ns: int) -> None:
        """Enter a put of `count` bytes."""
        self._saved += count
        if self._saved > MEMORY * max(count, self.put_bytes):
            self._saved, self._loaded = self._saved / 2, self._loaded / 2
            self._since_ns = (self._since_ns + now_ns) / 2

    def ended(self, count: int, stored: int, duration_ns: int) -> None:
        """Enter the end of a put of `count` bytes: the link carried `stored` of them, the others were there already."""
        self._saved = max(0.0, self._saved - (count - stored))
        if stored:
            self._put_bytes, self._put_ns = self._put_bytes + stored, self._put_ns + min(duration_ns, _LONGEST_NS)
            while self._put_ns > _RATE_NS:
                self._put_bytes, self._put_ns = self._put_bytes / 2, self._put_ns / 2
