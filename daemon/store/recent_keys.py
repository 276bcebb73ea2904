"""The keys that a store's client used lately, up to a bound."""

from __future__ import annotations

import threading
from collections.abc import Iterable

MAX_KEYS = 65_536


class RecentKeys:
    """The last MAX_KEYS keys that were added, and at most about as many from before. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: dict[str, None] = {}
        self._old: dict[str, None] = {}

    def add(self, keys: Iterable[str]) -> None:
        with self._lock:
            if len(self._new) >= MAX_KEYS:
                self._new, self._old = {}, self._new
            self._new.update(dict.fromkeys(keys))

    def discard(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._new.pop(key, None)
                self._old.pop(key, None)

    def all(self) -> list[str]:
        with self._lock:
            return list(self._old | self._new)
