"""Remembers which digests are in the store, a whole prompt at a time: a long one costs no Python per block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..shmring import _atomics

PLACES = 1 << 20  # a power of two, of 8 bytes each; a page of them is memory only once it is used
NOTED_DIGESTS = 1 << 12  # that wait to be applied

Keys = npt.NDArray[np.uint64]


def joined(digests: list[bytes], start: int = 0, stop: int | None = None) -> Keys:
    """Return the keys of these digests. Their other bytes are not touched."""
    heads = _atomics.heads(digests, start, len(digests) if stop is None else stop)
    keys: Keys = np.frombuffer(heads, "<u8") | np.uint64(1)
    return keys


def joined_names(names: list[bytes]) -> Keys:
    """Return the keys of names with the number of a group in the last byte: equal digests of two groups differ."""
    groups = np.fromiter((name[-1] for name in names), np.uint64, len(names))
    keys: Keys = joined(names) ^ (groups * np.uint64(0x9E3779B97F4A7C16))
    return keys


class Known:
    """A bounded set of keys: each has one place, and a newer key there replaces it. What it forgot is saved once more.

    Two digests that differ in other bits only would pass for each other: a block would not be saved, and no load errs.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._places: Keys = np.zeros(PLACES, np.uint64)
        self._mask = np.uint64(PLACES - 1)
        self._noted: list[tuple[list[bytes], int, int, int]] = []
        self._noted_digests = 0

    def note(self, digests: list[bytes], start: int, found: int, stop: int) -> None:
        """A look-up found digests [start, found) in the store, and not [found, stop). All have one size.

        Applied when somebody asks, many at once: each digest is an object to touch. The list may grow until then.
        """
        self._noted.append((digests, start, found, stop))
        self._noted_digests += len(digests)  # the list is kept whole
        if self._noted_digests > NOTED_DIGESTS:
            self._apply()

    def _apply(self) -> None:
        noted, self._noted, self._noted_digests = self._noted, [], 0
        for digests, start, found, _ in noted:
            _atomics.mark(digests, start, found, True, self._places.data)
        for digests, _, found, stop in noted:
            # Last: a block that one look-up missed may be saved once more, and is never left out.
            _atomics.mark(digests, found, stop, False, self._places.data)

    def add(self, keys: Keys) -> None:
        if self._noted:
            self._apply()
        self._places[self._at(keys)] = keys

    def remove(self, keys: Keys) -> None:
        self._places[self._at(keys)[self.holds(keys)]] = 0

    def holds(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return for each key whether it is in the set."""
        if self._noted:
            self._apply()
        found: npt.NDArray[np.bool_] = self._places[self._at(keys)] == keys
        return found

    def _at(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the place of each key; of another type NumPy would convert the indices first."""
        return (keys & self._mask).view(np.int64)

    def __contains__(self, digest: bytes) -> bool:
        if self._noted:
            self._apply()
        key = int.from_bytes(digest[:8], "little") | 1
        return int(self._places[key & PLACES - 1]) == key
