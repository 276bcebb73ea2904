"""Remembers the blocks that were stored through this daemon: which are stored again, and why one is nowhere.

A block that was stored and is not there was evicted since, or purged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

ENTRIES = 1 << 21  # 8 MiB, touched as they are used
NAMESPACES = 16  # the last used


class StoredBefore:
    """Remembers a digest until another one takes its entry, so its counts are a lower bound."""

    def __init__(self, entries: int = ENTRIES) -> None:
        """`entries`: a power of two."""
        self._mask = entries - 1
        self._tags = np.zeros(entries, np.uint32).data

    def count(self, digests: Iterable[bytes]) -> int:
        """Enter digests that were stored just now; return how many had been entered before."""
        before = 0
        for digest in digests:
            number = hash(digest)
            entry, tag = number & self._mask, number >> 32 & 0xFFFFFFFF
            before += self._tags[entry] == tag
            self._tags[entry] = tag
        return before

    def __contains__(self, digest: bytes) -> bool:
        number = hash(digest)
        return bool(self._tags[number & self._mask] == number >> 32 & 0xFFFFFFFF)


class Histories:
    """What each user stored in each namespace since the daemon started. No user learns what another one stored.

    The namespaces of an engine are one text, its names one after the other.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, str], StoredBefore] = OrderedDict()

    def of(self, uid: int, namespaces: Sequence[str]) -> StoredBefore:
        """Return the history of these namespaces of a user, from the user's first engine with them on."""
        namespace = ", ".join(namespaces)
        if (history := self._known.pop((uid, namespace), None)) is None:
            history = StoredBefore()
        self._known[uid, namespace] = history
        if len(self._known) > NAMESPACES:
            self._known.popitem(last=False)
        return history

    def holder(self, digest: bytes, uid: int, besides: StoredBefore) -> str:
        """Return another namespace in which this user stored the block; empty if there is none."""
        mine = ((name, each) for (user, name), each in self._known.items() if user == uid and each is not besides)
        return next((name for name, each in mine if digest in each), "")
