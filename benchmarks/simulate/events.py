"""The simulation's clock: callbacks at whole nanoseconds, in order of time, then in the order of their scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable

NS = 1_000_000_000


def ns(seconds: float) -> int:
    """Seconds as whole nanoseconds."""
    return round(seconds * NS)


class Event:
    """A scheduled callback."""

    __slots__ = ("action", "at_ns")

    def __init__(self, at_ns: int, action: Callable[[], None]) -> None:
        self.at_ns = at_ns
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Loop:
    """Runs events; `now_ns` is the time of the one that runs."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.count = 0
        """Events run so far."""
        self._heap: list[tuple[int, int, Event]] = []
        self._scheduled = 0

    def at(self, at_ns: int, action: Callable[[], None]) -> Event:
        """Call `action` at `at_ns`. Raises ValueError for a time in the past."""
        if at_ns < self.now_ns:
            raise ValueError(f"event in the past: at_ns={at_ns} now_ns={self.now_ns}")
        self._scheduled += 1
        event = Event(at_ns, action)
        heapq.heappush(self._heap, (at_ns, self._scheduled, event))
        return event

    def after(self, delay_ns: int, action: Callable[[], None]) -> Event:
        return self.at(self.now_ns + delay_ns, action)

    def run(self, until_ns: int | None = None) -> None:
        """Run all events, and the events that they schedule; with `until_ns` none after that time."""
        heap = self._heap
        while heap and (until_ns is None or heap[0][0] <= until_ns):
            at_ns, _, event = heapq.heappop(heap)
            if (action := event.action) is not None:
                self.now_ns = at_ns
                self.count += 1
                action()
