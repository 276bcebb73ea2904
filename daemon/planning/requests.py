"""A hinted request, an order and its outcome, as the planner and those around it know them."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple, Protocol

from .blocks import Lane, Run

Key = tuple[int, int]  # (flag, generation)
Urgency = tuple[int, int, int]  # (asked for or not, priority, number of the request): the smallest goes first


class FlagPort(Protocol):
    """How the planner reaches completion flags. Each call is a compare-and-swap and may lose to the engine."""

    def publish(self, key: Key, start: int, slots: Sequence[int], count: int, final: bool) -> bool:
        """Enter slots from block `start` on and publish `count`; False when the flag is the engine's already."""
        ...

    def take_back(self, key: Key) -> bool:
        """Nothing of an unclaimed flag is published any more, for now; False when the engine had it first."""
        ...

    def expire(self, key: Key) -> bool:
        """End an unclaimed flag; False when the engine claimed or dropped it first."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One hinted request. Blocks [local, ready) are published, [local, issued) pinned, [local, limit) in the store."""

    key: Key
    hashes: bytes
    hash_bytes: int
    blocks: int
    local: int
    priority: int
    sequence: int
    limit: int = -1  # -1 until looked up
    ready: int = 0
    issued: int = 0
    asked: bool = False
    final: bool = False
    lane: Lane = Lane.MEMORY  # of the next block to order
    on_disk: bytes = b""  # 1 for each block from `local` on that lies only on disk; what is beyond lies in memory
    held: array[int] = field(default_factory=lambda: array("I"))  # slots of [local, issued)
    waits: Run | None = None  # what `ready` stands before, while it loads
    taken_back: int = 0  # how often
    fetched_blocks: int = 0
    disk_blocks: int = 0
    first_byte_ns: int = 0
    last_byte_ns: int = 0

    def digest(self, block: int) -> bytes:
        start = block * self.hash_bytes
        return self.hashes[start : start + self.hash_bytes]

    def digests(self, start: int, stop: int) -> tuple[bytes, ...]:
        size = self.hash_bytes
        return Struct(f"{size}s" * (stop - start)).unpack(self.hashes[start * size : stop * size])

    def lane_of(self, block: int) -> Lane:
        at = block - self.local
        return Lane.DISK if at < len(self.on_disk) and self.on_disk[at] else Lane.MEMORY

    def lane_ends(self, block: int) -> int:
        """The block before which those in the same lane as this one end."""
        at, lane = block - self.local, self.lane_of(block)
        end = self.on_disk.find(1 - lane, at)
        if end < 0:
            end = len(self.on_disk) if lane is Lane.DISK else self.limit - self.local
        return min(self.local + end, self.limit)

    @property
    def urgency(self) -> Urgency:
        return (0 if self.asked else 1, self.priority, self.sequence)

    @property
    def wants_work(self) -> bool:
        return not self.final and self.issued < self.limit


class Order(NamedTuple):
    """Blocks to fetch in one store call, and where to."""

    number: int
    lane: Lane
    digests: Sequence[bytes]
    slots: Sequence[int]


def push(heap: list[Urgency], entry: Urgency, live: Mapping[int, object]) -> None:
    """Enter it; entries of requests that ended or moved stay until they come up, or until they are most of the heap.

    `live`: the requests by number.
    """
    heapq.heappush(heap, entry)
    if len(heap) > 4 * len(live) + 64:
        heap[:] = sorted({each for each in heap if abs(each[2]) in live})


def negated(urgency: Urgency) -> Urgency:
    """The smallest of these is of the least urgent."""
    asked, priority, sequence = urgency
    return -asked, -priority, -sequence
