"""Remembers which digests are in the store, a whole prompt at a time: a long one costs no Python per block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PLACES = 1 << 20  # a power of two, of 8 bytes each; a page of them is memory only once it is used
NOTED_BYTES = 1 << 17  # of digests that wait to be applied

Keys = npt.NDArray[np.uint64]


def keys_of(hashes: bytes | memoryview, hash_bytes: int) -> Keys:
    """Return the first 63 bits of each digest in `hashes`, without 0. A digest has at least 8 bytes."""
    keys: Keys = np.ndarray(len(hashes) // hash_bytes, "<u8", hashes, strides=(hash_bytes,))
    return keys | np.uint64(1)


def joined(digests: Sequence[bytes]) -> Keys:
    """Return the keys of these digests."""
    return keys_of(b"".join(digests), len(digests[0])) if digests else np.empty(0, np.uint64)


def joined_names(names: Sequence[bytes]) -> Keys:
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
        self._noted: list[tuple[memoryview, int]] = []
        self._noted_bytes = 0

    def note(self, hashes: memoryview, hash_bytes: int, found: int) -> None:
        """A look-up found the first `found` of these digests in the store, and not the others. All have one size.

        Applied when somebody asks, many at once: a NumPy call with cold caches takes 10 us.
        """
        self._noted.append((hashes, found * hash_bytes))
        self._noted_bytes += memoryview(hashes.obj).nbytes  # kept whole
        self._hash_bytes = hash_bytes
        if self._noted_bytes > NOTED_BYTES:
            self._apply()

    def _apply(self) -> None:
        noted, self._noted, self._noted_bytes = self._noted, [], 0
        found, missed = [hashes[:end] for hashes, end in noted], [hashes[end:] for hashes, end in noted]
        self.add(keys_of(found[0] if len(noted) == 1 else b"".join(found), self._hash_bytes))
        # Last: a block that one look-up missed may be saved once more, and is never left out.
        self.remove(keys_of(missed[0] if len(noted) == 1 else b"".join(missed), self._hash_bytes))

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
