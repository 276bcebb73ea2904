"""Predicts when the bytes that were asked of a storage node will be there, from how fast its bytes came before.

Pure.  A node sends what is asked of it in order, so a read ends when the bytes asked before it and its own have come.
A reader looks at half of the predicted time, shortly before its end, and often from then on.  The read ended between
its last two looks.
"""

from __future__ import annotations

from dataclasses import dataclass

SOONEST_NS, LATEST_NS = 200_000, 50_000_000  # to the next look, which costs some 10 us
HALF, EARLY = 0.5, 0.97  # of the predicted time: the first two looks
_FURTHER = 1 / 32  # of the time since the read began: to each further look
_HEAVY_BYTES = 4 << 20  # a read of so many counts as much as all before it


@dataclass
class _Node:
    """`ns_per_byte`: 0 while nothing is known. `asked`: bytes that are not there yet."""

    ns_per_byte: float = 0.0
    asked: int = 0


@dataclass(eq=False)
class Asked:
    """Bytes asked of a node in one read. `ahead`: they, and those asked before that were not there when it began.

    `looked_ns`: the last look that did not find its end, or its begin.  `look_ns`: when to look next.
    """

    node: str
    size: int
    ahead: int
    predicted_ns: float
    began_ns: int
    looked_ns: int
    look_ns: int = 0


class Pace:
    """How fast each node sends, and what is asked of it. Times in ns, of one clock."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def waiting(self, node: str) -> int:
        """Return the bytes asked of this node that are not there yet."""
        return self._nodes[node].asked if node in self._nodes else 0

    def ask(self, node: str, size: int, now_ns: int) -> Asked:
        """Enter a read of `size` bytes, at least one, that begins now."""
        each = self._nodes.setdefault(node, _Node())
        each.asked += size
        asked = Asked(node, size, each.asked, each.asked * each.ns_per_byte, now_ns, now_ns)
        self.looked(asked, now_ns)
        return asked

    def looked(self, asked: Asked, now_ns: int) -> None:
        """Enter that the read has not ended."""
        asked.looked_ns, elapsed = now_ns, now_ns - asked.began_ns
        left = (part * asked.predicted_ns - elapsed for part in (HALF, EARLY))
        wait_ns = next((each for each in left if each > SOONEST_NS), elapsed * _FURTHER)
        asked.look_ns = now_ns + min(LATEST_NS, max(SOONEST_NS, int(wait_ns)))

    def ended(self, asked: Asked, now_ns: int, *, came: bool) -> None:
        """Enter that the read has ended; `came`: all its bytes are there."""
        each = self._nodes[asked.node]
        each.asked -= asked.size
        if came:
            measured = ((asked.looked_ns + now_ns) / 2 - asked.began_ns) / asked.ahead
            weight = min(1.0, asked.ahead / _HEAVY_BYTES) / 2 if each.ns_per_byte else 1.0
            each.ns_per_byte += (measured - each.ns_per_byte) * weight
