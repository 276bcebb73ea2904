"""The keys that a store's client used lately, up to a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

MAX_KEYS = 65_536


class RecentKeys:
    """The last MAX_KEYS keys that were added. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, None] = OrderedDict()

    def add(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)

    def discard(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def all(self) -> list[str]:
        with self._lock:
            return list(self._keys)
