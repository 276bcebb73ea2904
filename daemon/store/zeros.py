"""Finds pages of zeros in values: a page that a disk lost reads back so, and no KV has one.

Where an engine's layers do not write all bytes of a value, it says which they write (`WorkerInfo.written`), and only
these are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_HALF_PAGE = 2048  # bytes
_EDGE = 512  # bytes
_LEAST = 64  # bytes: fewer may well be zeros

# Begin and end of each stretch that is written, one after the other; None: all bytes are.
Borders = tuple[int, ...] | None


class _Cells(NamedTuple):
    """Parts of a value of which none is all zeros, in words of 8 bytes."""

    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


def holed(addresses: Sequence[int], sizes: Sequence[int], written: Sequence[Borders] = ()) -> set[int]:
    """Return the indices of the values with a page of zeros among what is `written` of them; by default all is.

    A page may begin anywhere in a value, so this looks for half of one; it misses a smaller part at the end.  It
    costs 3 % of the copy.  At the ends of a written stretch 512 bytes of zeros count as part of a page; a stretch of
    less than 64 bytes is not looked at (docs/adr/0171).
    """
    found = set[int]()
    kinds = list(zip(sizes, written or [None] * len(sizes), strict=True))
    for kind in set(kinds):
        cells = _cells(*kind)
        if not len(cells.begins):
            continue
        theirs = [i for i, each in enumerate(kinds) if each == kind]
        at = np.array([addresses[i] for i in theirs])
        base = int(at.min()) & -8  # so no word lies across two pages, of which one may be unmapped
        starts = (at - base) // 8
        words = _memory(base, int(starts.max()) + kind[0] // 8)
        firsts = words[starts[:, None] + cells.begins]
        if np.count_nonzero(firsts) < firsts.size:
            for value, cell in np.argwhere(firsts == 0).tolist():
                start = int(starts[value])
                if not words[start + cells.begins[cell] : start + cells.ends[cell]].any():
                    found.add(theirs[value])
    return found


@lru_cache(32)
def _cells(size: int, written: Borders) -> _Cells:
    """Return the half pages of a value of this size, or those of each stretch that is written, and its two ends."""
    borders = (0, size) if written is None else written
    cells = []
    for begin, end in zip(borders[::2], borders[1::2], strict=True):
        cells += [(at, at + _HALF_PAGE) for at in range(begin, end - _HALF_PAGE + 1, _HALF_PAGE)]
        if written is not None and (edge := min(_EDGE, end - begin)) >= _LEAST:
            cells += [(begin, begin + edge), (end - edge, end)]
    array = np.array(cells, np.int64).reshape(-1, 2)
    return _Cells(-(-array[:, 0] // 8), array[:, 1] // 8)


def _memory(address: int, words: int) -> npt.NDArray[np.uint64]:
    """Return a view of `words` words of memory from `address` on; between values it may be unmapped."""
    interface = {"shape": (words,), "typestr": "<u8", "data": (address, True), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))
