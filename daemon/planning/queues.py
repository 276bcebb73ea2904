"""Whose blocks are ordered next: the requests that want some, by lane and urgency, and why a lane gives none. Pure.

What an event costs does not depend on how many requests wait: the queues are heaps whose outdated entries are dropped
when they come up, and a lane that found no room is not tried again before something changed.
"""

from __future__ import annotations

import enum
import heapq

from .blocks import Lane
from .requests import Request, Urgency, push


class Stop(enum.Enum):
    """Why no more of a request's blocks were issued."""

    FULL = "the order is full, or the request has no more blocks"
    LANE = "its next block belongs to the other lane"
    NO_ROOM = "no slot"
    NO_BUDGET = "its lane holds as many slots as it may"


class Queues:
    """The requests of `numbers` that want work, each in the lane of its next block."""

    def __init__(self, numbers: dict[int, Request]) -> None:
        self._numbers = numbers
        self._heaps: tuple[list[Urgency], list[Urgency]] = ([], [])
        self._stopped: list[Stop | None] = [None, None]

    def enter(self, request: Request) -> None:
        """Put it where its next block belongs; a lane that found no room looks again when it is the new head."""
        request.lane = request.lane_of(request.issued)
        heap, entry = self._heaps[request.lane], request.urgency
        push(heap, entry, self._numbers)
        if heap[0] == entry:
            self._stopped[request.lane] = None

    def head(self, lane: Lane) -> Request | None:
        """The most urgent request that wants work of this lane; entries of requests that moved or ended are dropped."""
        heap = self._heaps[lane]
        while heap:
            request = self._numbers.get(heap[0][2])
            if request is not None and request.lane is lane and request.wants_work and request.urgency == heap[0]:
                return request
            heapq.heappop(heap)
        return None

    def wants(self, lane: Lane) -> bool:
        """Whether an order of this lane is worth a try."""
        return self._stopped[lane] is None and bool(self._heaps[lane])

    def stop(self, lane: Lane, why: Stop) -> None:
        """Its head found no room: nobody less urgent may take some before it, so it waits until something changes."""
        self._stopped[lane] = why

    def changed(self) -> None:
        """There may be room now."""
        self._stopped = [None, None]

    def must_yield(self, lane: Lane, urgency: Urgency) -> bool:
        """Whether a more urgent request of the other lane waits for the next slot that comes back."""
        other = Lane(1 - lane)
        if self._stopped[other] is not Stop.NO_ROOM:
            return False
        head = self.head(other)
        return head is not None and head.urgency < urgency
