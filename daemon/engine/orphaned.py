"""Requests whose engine gave their flag up while its ring was full: no record says that they ended. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from ..planning.requests import Key

LOOKS_PER_TICK = 256


class Orphaned:
    """Chooses the flags to check.

    A request is orphaned when two checks in a row find its flag given up: its record would have arrived in between.
    """

    def __init__(self) -> None:
        self._to_look_at: deque[Key] = deque()
        self._given_up: set[Key] = set()

    def __len__(self) -> int:
        return len(self._given_up)

    def next_keys(self, requests: Mapping[Key, object]) -> list[Key]:
        """Return some of these requests, all of them in turn."""
        if not self._to_look_at:
            self._to_look_at.extend(requests)
        keys = [self._to_look_at.popleft() for _ in range(min(LOOKS_PER_TICK, len(self._to_look_at)))]
        return [key for key in keys if key in requests]

    def seen(self, key: Key, *, given_up: bool) -> bool:
        """Take what a look found; return whether the request is orphaned."""
        if given_up and key in self._given_up:
            return True
        if given_up:
            self._given_up.add(key)
        else:
            self._given_up.discard(key)
        return False

    def ended(self, key: Key) -> None:
        """Forget a request."""
        self._given_up.discard(key)
