"""Counts blocks that an engine stores again, because the store had evicted them in between."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ENTRIES = 1 << 21  # 8 MiB, touched as they are used


class StoredBefore:
    """Remembers a digest until another one takes its entry, so its counts are a lower bound."""

    def __init__(self, entries: int = ENTRIES) -> None:
        """`entries`: a power of two."""
        self._mask = entries - 1
        self.forget()

    def count(self, digests: Iterable[bytes]) -> int:
        """Enter digests that were stored just now; return how many had been entered before."""
        before = 0
        for digest in digests:
            number = hash(digest)
            entry, tag = number & self._mask, number >> 32 & 0xFFFFFFFF
            before += self._tags[entry] == tag
            self._tags[entry] = tag
        return before

    def forget(self) -> None:
        """Empty it: a removal is no eviction."""
        self._tags = np.zeros(self._mask + 1, np.uint32).data
