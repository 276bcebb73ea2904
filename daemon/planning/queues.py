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
    """The requests of `numbers` that want work, each in the lane of its next block."""

    def __init__(self, numbers: Mapping[int, Request]) -> None:
        self._numbers = numbers
        self._heaps: tuple[list[Urgency], list[Urgency]] = ([], [])
        self._stopped: list[Stop | None] = [None, None]
        self._free_ns = 0  # when the fetches of all ranked requests would have ended

    def rank(self, request: Request, block_ns: Sequence[float], *, waits: bool) -> None:
        """Its blocks are known: put it in its place, by what it has to fetch. Once, so that nothing moves it later.

        `block_ns`: what a block takes in each lane.  `waits`: others wait for a fetch.
        """
        request.ranked = True
        disk = sum(request.on_disk[request.issued :])
        memory = request.limit - request.issued - disk
        fetch_ns = int(memory * block_ns[Lane.MEMORY] + disk * block_ns[Lane.DISK])
        begin_ns = max(request.due_ns, self._free_ns if waits else 0)
        self._free_ns = begin_ns + fetch_ns
        request.due_ns = begin_ns + OVERTAKEN * fetch_ns

    def enter(self, request: Request) -> None:
        """Enter a request, also after a change of its lane or urgency; a new head starts a stopped lane again."""
        request.lane = request.lane_of(request.issued)
        heap, entry = self._heaps[request.lane], request.urgency
        heapq.heappush(heap, entry)
        if len(heap) > 4 * len(self._numbers) + 64:  # entries of requests that ended may fill most of it
            heap[:] = sorted({each for each in heap if each[-1] in self._numbers})
        if heap[0] == entry:
            self._stopped[request.lane] = None

    def head(self, lane: Lane) -> Request | None:
        """Return the most urgent request that wants work of this lane."""
        heap = self._heaps[lane]
        while heap:
            request = self._numbers.get(heap[0][-1])
            if request is not None and request.lane is lane and request.wants_work and request.urgency == heap[0]:
                return request
            heapq.heappop(heap)
        return None

    def wants(self, lane: Lane) -> bool:
        """Whether an order of this lane is worth a try."""
        return self._stopped[lane] is None and bool(self._heaps[lane])

    def stop(self, lane: Lane, why: Stop) -> None:
        """Stop the lane until something changes: less urgent requests must not take room before its head."""
        self._stopped[lane] = why

    def changed(self) -> None:
        """There may be room now."""
        self._stopped = [None, None]

    def starved(self, lane: Lane) -> bool:
        """Whether this lane waits for room."""
        return self._stopped[lane] is Stop.NO_ROOM and self.head(lane) is not None

    def must_yield(self, lane: Lane, urgency: Urgency) -> bool:
        """Whether a more urgent request of the other lane waits for the next slot that comes back."""
        other = Lane(1 - lane)
        if self._stopped[other] is not Stop.NO_ROOM:
            return False
        head = self.head(other)
        return head is not None and head.urgency < urgency
