"""Reads values apart where a disk cannot read a file: Mooncake gives all values of the call the code of that one.

A value that fails alone, too, is unreadable where the disk delivers others, or works otherwise.  Then the fault is in
that value's file, and the next read meets it again.  Without such a sign the fault may be one of the disk, such as no
descriptors left, which passes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableSequence

from .errors import of_a_disk

# A fault lasts if a read meets it again so much later; the daemon leaves an unreadable value alone for 30 s.
AGAIN_S, FORGET_S = 20.0, 600.0
MAX_KEYS = 4096


def read_apart(
    codes: MutableSequence[int],
    read: Callable[[int], int],
    works: Callable[[], bool] | None,
    unwanted: Callable[[], bool],
    known: Callable[[int], bool] = lambda _: False,
) -> list[int]:
    """Read each value that failed alone; enter its code, and return the indices of unreadable values.

    `read` returns the code of the value at an index.  `works`: whether the disk works otherwise; None where only its
    other values tell.  `unwanted`: nobody waits for the values any more.  `known`: whether the value at an index was
    unreadable before.
    """
    bad: list[int] = []
    for index in [i for i, code in enumerate(codes) if code < 0 and of_a_disk(code)]:
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
    return bad if works is not None or any(code >= 0 for code in codes) else [*filter(known, bad)]


class Lasting:
    """Values that could not be read, and since when."""

    def __init__(self) -> None:
        self._since = OrderedDict[str, float]()

    def __contains__(self, key: str) -> bool:
        return key in self._since

    def failed(self, key: str, now: float) -> bool:
        """A value could not be read at `now` (s). Return whether that was so a while ago, too."""
        since = self._since.pop(key, now)
        self._since[key] = since if now - since < FORGET_S else now
        if len(self._since) > MAX_KEYS:
            self._since.popitem(last=False)
        return AGAIN_S <= now - since < FORGET_S


def shortened(key: str) -> str:
    """Return a key as the log may have it, with 16 digits of its hash: `store ls` finds the value by them."""
    namespace, at, digest = key.rpartition("@")
    return f"{namespace}{at}{digest[:16]}"
