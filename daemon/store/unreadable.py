"""Reads values apart where a disk cannot read a file: Mooncake gives all values of the call the code of that one.

A value that fails alone, too, is unreadable where the disk delivers others, or works otherwise.  Then the fault is in
that value's file, and the next read meets it again.  Without such a sign the fault may be one of the disk, such as no
descriptors left, which passes.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence

from .errors import of_a_disk


def read_apart(
    codes: MutableSequence[int],
    read: Callable[[int], int],
    works: Callable[[], bool] | None,
    unwanted: Callable[[], bool],
) -> list[int]:
    """Read each value that failed alone; enter its code, and return the indices of unreadable values.

    `read` returns the code of the value at an index.  `works`: whether the disk works otherwise; None where only its
    other values tell.  `unwanted`: nobody waits for the values any more.
    """
    bad: list[int] = []
    for index in [i for i, code in enumerate(codes) if of_a_disk(code)]:
        if unwanted():
            return []
        if len(codes) > 1:
            codes[index] = read(index)
        if not of_a_disk(codes[index]):
            continue
        bad.append(index)
        if len(bad) == 1 and works is not None:
            if not works():
                return []
            codes[index] = read(index)  # a fault that was over when the disk was tried is none of the value
            if not of_a_disk(codes[index]):
                bad.clear()
    return bad if works is not None or any(code >= 0 for code in codes) else []


def shortened(key: str) -> str:
    """Return a key as the log may have it, with 16 digits of its hash: `store ls` finds the value by them."""
    namespace, at, digest = key.rpartition("@")
    return f"{namespace}{at}{digest[:16]}"
