"""Says when a read from a storage node may begin, and predicts its end, from how fast the node's bytes came before.

Pure.  Reads that run together share the way to their node, so that the first one ends as late as the last.  So they
take turns, in the order in which they asked: a read begins when the bytes asked before it should be there within
TURN_NS.  By the measured pace that is just enough for the way to stay full.  Nodes do not wait for each other.  A read
that is late holds up nobody: what should be there counts as there.

Where reads overlap, the time between two ends is that of the second one's bytes.  A reader looks at half of the
predicted time, every sixteenth of it from then on, so that a read that is sooner than predicted is seen soon, shortly
before its end, and often from then on.  The read ended between its last two looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Before the end of the reads before it a read begins: for the first of its bytes to come, on a busy machine.
TURN_NS = 2_000_000
SOONEST_NS, LATEST_NS = 200_000, 50_000_000  # to the next look, which costs some 10 us
HALF, STEP, EARLY = 1 / 2, 1 / 16, 0.97  # of the predicted time: the first look, then every STEP up to EARLY
_FURTHER = 1 / 32  # of the time since the read began: to each further look
_HEAVY_BYTES = 4 << 20  # after a read of so many all before it count half
_RECENT_NS = 500_000_000  # of reads: what took longer counts half, or less
_MOST_NS = 1_000_000_000  # that a read is predicted to take: others wait no longer for one that hangs


@dataclass(eq=False)
class Read:
    """Bytes asked of a node in one read, which begins when `turn` says so.

    `due_ns`: when they should be there.  `looked_ns`: the last look that did not find its end, or its begin.
    `look_ns`: when to look next.
    """

    node: str
    size: int
    due_ns: float
    look_ns: int
    began_ns: int = -1
    looked_ns: int = 0

    @property
    def begun(self) -> bool:
        return self.began_ns >= 0


@dataclass
class _Node:
    """`reads`: those that have not ended, the first one first.

    `sent` and `ns`: bytes that came and the time they took; older ones count less.  `ended_ns`: the last end of a read.
    """

    reads: list[Read] = field(default_factory=list)
    sent: float = 0.0
    ns: float = 0.0
    ended_ns: float = 0.0

    @property
    def ns_per_byte(self) -> float:
        """0 while nothing is known."""
        return self.ns / self.sent if self.sent else 0.0

    def takes_ns(self, size: int) -> float:
        return min(size * self.ns_per_byte, _MOST_NS)


class Pace:
    """How fast each node sends, and what is asked of it. Times in ns, of one clock."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def waiting(self, node: str) -> int:
        """Return the bytes asked of this node that are not there yet."""
        return sum(each.size for each in self._nodes[node].reads) if node in self._nodes else 0

    def ask(self, node: str, size: int, now_ns: int) -> Read:
        """Enter a read of `size` bytes, at least one. It begins when `turn` says so."""
        each = self._nodes.setdefault(node, _Node())
        read = Read(node, size, _free_ns(each.reads, now_ns) + each.takes_ns(size), now_ns)
        each.reads.append(read)
        return read

    def turn(self, read: Read, now_ns: int) -> bool:
        """Whether the read begins now, as it is its turn; False: look again at `look_ns`."""
        node = self._nodes[read.node]
        left_ns = _free_ns(node.reads[: node.reads.index(read)], now_ns) - now_ns
        if (wait_ns := left_ns - TURN_NS) > 0:
            soon_ns = max(wait_ns / 2, min(wait_ns, TURN_NS))  # the reads before it may end sooner
            read.look_ns = now_ns + min(LATEST_NS, max(SOONEST_NS, int(soon_ns)))
            return False
        read.began_ns, read.due_ns = now_ns, now_ns + left_ns + node.takes_ns(read.size)
        self.looked(read, now_ns)
        return True

    def looked(self, read: Read, now_ns: int) -> None:
        """Enter that the read, which began, has not ended."""
        read.looked_ns, elapsed = now_ns, now_ns - read.began_ns
        predicted = read.due_ns - read.began_ns
        if (wait_ns := HALF * predicted - elapsed) <= SOONEST_NS:
            left_ns = EARLY * predicted - elapsed
            wait_ns = min(left_ns, STEP * predicted) if left_ns > SOONEST_NS else elapsed * _FURTHER
        read.look_ns = now_ns + min(LATEST_NS, max(SOONEST_NS, int(wait_ns)))

    def ended(self, read: Read, now_ns: int, *, came: bool) -> None:
        """Enter that the read has ended, or will never begin; `came`: all its bytes are there."""
        node = self._nodes[read.node]
        node.reads.remove(read)
        if read.begun:
            since_ns, ended_ns = max(node.ended_ns, read.began_ns), (read.looked_ns + now_ns) / 2
            node.ended_ns = max(since_ns, ended_ns)
            if came:
                older = 1.0 - min(1.0, read.size / _HEAVY_BYTES) / 2
                node.sent, node.ns = older * node.sent + read.size, older * node.ns + node.ended_ns - since_ns
                while node.ns > _RECENT_NS:  # after a stall
                    node.sent, node.ns = node.sent / 2, node.ns / 2
        free_ns = float(now_ns)
        for each in node.reads:
            each.due_ns = min(each.due_ns, free_ns + node.takes_ns(each.size))
            free_ns = max(free_ns, each.due_ns)  # one that is late holds up nobody, and hurries nobody


def _free_ns(reads: Sequence[Read], now_ns: int) -> float:
    """Return when all of these bytes should be there, `now_ns` at the earliest."""
    return max([now_ns, *(each.due_ns for each in reads)])
