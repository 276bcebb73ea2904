"""Finds pages of zeros in values: a page that a disk lost reads back so, and no KV has one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

_HALF_PAGE = 2048  # bytes
_WORDS = _HALF_PAGE // 8


def holed(addresses: Sequence[int], sizes: Sequence[int]) -> set[int]:
    """Return the indices of the values with a page of zeros.

    A page may begin anywhere in a value, so this looks for half of one; it misses a smaller part at the end.  It
    costs 3 % of the copy (docs/adr/0065).
    """
    found = set[int]()
    for size in {size for size in sizes if size >= _HALF_PAGE}:
        theirs = [i for i, each in enumerate(sizes) if each == size]
        at = np.array([addresses[i] for i in theirs])
        base = int(at.min()) & -8  # so no word lies across two pages, of which one may be unmapped
        starts = (at - base) // 8
        words = _memory(base, int(starts.max()) + size // 8)
        firsts = words[starts[:, None] + _halves(size)]
        if np.count_nonzero(firsts) < firsts.size:
            for value, half in np.argwhere(firsts == 0).tolist():
                start = int(starts[value]) + half * _WORDS
                if not words[start : start + _WORDS].any():
                    found.add(theirs[value])
    return found


@lru_cache(16)
def _halves(size: int) -> npt.NDArray[np.int64]:
    """Return where the half pages of a value of this size begin, in words."""
    return np.arange(0, size // _HALF_PAGE * _WORDS, _WORDS)


def _memory(address: int, words: int) -> npt.NDArray[np.uint64]:
    """Return a view of `words` words of memory from `address` on; between values it may be unmapped."""
    interface = {"shape": (words,), "typestr": "<u8", "data": (address, True), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))
