"""The ledger of memory promised to engines and not yet taken: no byte of the machine is promised twice.

Pure: bytes in, verdicts out.  Linux overcommits: a reservation too many would succeed, and the OOM killer would end a
process later.  What is available says nothing of reservations that are still being filled, so these count in full until
the memory is taken.  Reservations wait for releases under way, in the order of their wishes.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class Verdict(NamedTuple):
    """The end of one reservation's wait: it may begin, or too little is available: `available_bytes`."""

    number: int
    granted: bool
    available_bytes: int


class Ledger:
    """Reservations and releases by number, each of so many bytes."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        self._filling: dict[int, int] = {}  # bytes that are promised and not yet taken
        self._releasing: set[int] = set()

    @property
    def waiting(self) -> bool:
        """Whether `next_verdict` is worth a call."""
        return bool(self._waiting)

    def want(self, number: int, size: int) -> None:
        self._sizes[number] = size
        self._waiting.append(number)

    def filled(self, number: int, size: int) -> None:
        """So many more bytes of a granted reservation are taken, and no longer available."""
        self._filling[number] -= size

    def withdraw(self, number: int) -> bool:
        """Drop a reservation that waits; another one's bytes are on their way back. Return whether it waited."""
        if number in self._filling:
            self._releasing.add(number)
        if waits := number in self._waiting:
            self._waiting.remove(number)
        return waits

    def release(self, number: int, size: int) -> None:
        """So many bytes are on their way back."""
        self._sizes[number] = size
        self._releasing.add(number)

    def ended(self, number: int) -> None:
        """The reservation or the release is over: what it holds, or gave back, shows in what is available."""
        self._sizes.pop(number, None)
        self._filling.pop(number, None)
        self._releasing.discard(number)

    def next_verdict(self, available: int) -> Verdict | None:
        """Return what becomes of the first that waits, with so many bytes available; None while it has to wait.

        Enter all that is filled before `available` is looked up: bytes taken in between then count twice, not never.
        """
        if not self._waiting:
            return None
        size, left = self._sizes[self._waiting[0]], available - sum(self._filling.values())
        if left <= size and left + sum(self._sizes[each] for each in self._releasing) > size:
            return None
        number = self._waiting.popleft()
        if left > size:
            self._filling[number] = size
        return Verdict(number, left > size, max(0, left))
