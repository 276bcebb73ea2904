"""Which blocks an engine has stored before: one that it computes and stores again was gone from the store."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

PLACES = 1 << 21  # 8 MiB, touched as they are used


class StoredBefore:
    """Remembers a digest until another one takes its place: what it counts is a lower bound, above all where more
    blocks than PLACES are stored between."""

    def __init__(self, places: int = PLACES) -> None:
        """`places`: a power of two."""
        self._mask = places - 1
        self.forget()

    def count(self, digests: Iterable[bytes]) -> int:
        """Enter what was stored just now; how much of it had been entered before."""
        before = 0
        for digest in digests:
            number = hash(digest)
            place, tag = number & self._mask, number >> 32 & 0xFFFFFFFF
            before += self._tags[place] == tag
            self._tags[place] = tag
        return before

    def forget(self) -> None:
        """What was stored is removed: it says nothing of evictions."""
        self._tags = np.zeros(self._mask + 1, np.uint32).data
