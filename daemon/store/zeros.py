"""Finds a page of zeros in a value: a page that a disk lost reads back so, and no KV has one."""

from __future__ import annotations

import ctypes

import numpy as np

_HALF_PAGE = 2048  # bytes


def holed(address: int, size: int) -> bool:
    """Whether the value has a page of zeros.

    A page may begin anywhere in the value, so this looks for half of one; it misses a smaller part at the end.  It
    costs 3 % of the copy (docs/adr/0065).
    """
    if size < _HALF_PAGE:
        return False
    value = memoryview((ctypes.c_char * (size // _HALF_PAGE * _HALF_PAGE)).from_address(address))
    words = np.frombuffer(value, dtype=np.uint64)
    halves = words.reshape(-1, _HALF_PAGE // 8)
    return any(not halves[i].any() for i in np.flatnonzero(halves[:, 0] == 0))
