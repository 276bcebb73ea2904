"""Requests by urgency: which one gets the next blocks of a lane. Pure.

The cost of an event does not grow with the requests that wait for room: the heaps drop outdated entries when these come
up, and a lane that found no room is not tried again before something changed.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Mapping, Sequence

from .requests import Request, Urgency
from .runs import Lane

OVERTAKEN = 10  # of its own lengths: what a fetch may wait for those that come later


class Stop(enum.Enum):
    """Why an order takes no more of a request's blocks."""

    FULL = "the order is full, or the request has no more blocks"
    LANE = "its next block belongs to the other lane"
    NO_ROOM = "no slot"
    LATER = "this event did its share of work"


class Queues:
    """The requests of `numbers` that want work, each in the lane of its next block.

    `ready`: whether an order of each lane is worth a try.  `starving`: whether its head found no room.
    """

    def __init__(self, numbers: Mapping[int, Request]) -> None:
        self._numbers = numbers
        self._heaps: tuple[list[Urgency], list[Urgency]] = ([], [])
        self.ready, self.starving = [False, False], [False, False]
        self._free_ns = 0  # when the fetches of all ranked requests would have ended

    def rank(self, request: Request, block_ns: Sequence[float]) -> None:
        """Its blocks are known: put it in its place, by what it has to fetch. Once, so that nothing moves it later.

        `block_ns`: what a block takes in each lane.
        """
        waits = any(heap and self.head(lane) is not None for lane, heap in zip(Lane, self._heaps, strict=True))
        request.ranked = True
        disk = sum(request.on_disk[request.issued :])
        memory = request.limit - request.issued - disk
        fetch_ns = int(memory * block_ns[Lane.MEMORY] + disk * block_ns[Lane.DISK])
        begin_ns = max(request.due_ns, self._free_ns if waits else 0)
        self._free_ns = begin_ns + fetch_ns
        request.due_ns = begin_ns + OVERTAKEN * fetch_ns
        request.place()

    def enter(self, request: Request) -> None:
        """Enter a request, also after a change of its lane or urgency; a new head starts a stopped lane again."""
        request.lane = request.lane_of(request.issued)
        heap, entry = self._heaps[request.lane], request.urgency
        heapq.heappush(heap, entry)
        if len(heap) > 4 * len(self._numbers) + 64:  # entries of requests that ended may fill most of it
            heap[:] = sorted({each for each in heap if each[-1] in self._numbers})
        if heap[0] == entry:
            self.starving[request.lane] = False
        self.ready[request.lane] = not self.starving[request.lane]

    def head(self, lane: Lane) -> Request | None:
        """Return the most urgent request that wants work of this lane."""
        heap = self._heaps[lane]
        while heap:
            request = self._numbers.get(heap[0][-1])
            if (
                request is not None
                and (request.lane is lane and request.urgency == heap[0])
                and (not request.final and request.issued < request.limit)
            ):
                return request
            heapq.heappop(heap)
        self.ready[lane] = False
        return None

    def starve(self, lane: Lane) -> None:
        """Stop the lane until something changes: less urgent requests must not take room before its head."""
        self.ready[lane], self.starving[lane] = False, True

    def changed(self) -> None:
        """There may be room now."""
        self.ready[:], self.starving[:] = map(bool, self._heaps), (False, False)

    def starved(self, lane: Lane) -> bool:
        return self.starving[lane] and self.head(lane) is not None

    def must_yield(self, lane: Lane, urgency: Urgency) -> bool:
        """Whether a more urgent request of the other lane waits for the next slot that comes back."""
        other = Lane(1 - lane)
        if not self.starving[other]:
            return False
        head = self.head(other)
        return head is not None and head.urgency < urgency
