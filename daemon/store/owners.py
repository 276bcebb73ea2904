"""The owners of memory that do not deliver: of a get that hangs, and so that no other one waits for them again.

A get that is past its deadline (`Get.late`) waits for an owner that delivered nothing to anybody since it began. If
there is one such owner, it is the one that hangs: until that get returns its values are not asked for. If there are
several, their values are read apart, so that those that deliver are told from the one that does not.
Costs nothing but a set of names until a get is late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .errors import ErrorClass
from .places import Places

_ANY_DISK = ""  # stands for the owner of a value on a disk alone, who is not told


@dataclass(eq=False)
class Get:
    """Values that are being read. `waits_for`: owners that delivered nothing since it began; `late`: given up."""

    waits_for: frozenset[str] = field(default_factory=frozenset)
    late: bool = False  # set by who waits for it, on any thread

    @property
    def owners(self) -> str:
        return " ".join(sorted(self.waits_for - {_ANY_DISK}))


class Owners:
    """The gets in flight, and what they say of the owners that they read from. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gets: set[Get] = set()

    def read(
        self, keys: Sequence[str], where: Places, get: Get, call: Callable[[Sequence[int]], list[ErrorClass]]
    ) -> list[ErrorClass]:
        """What became of each key: as `call` says, which reads those with these numbers, or TRANSFER without a try."""
        results = [ErrorClass.TRANSFER] * len(keys)
        left: Sequence[int] = range(len(keys))
        while not get.late and (part := self._next(keys, where, left)):
            get.waits_for = _owners(where, [keys[i] for i in part])
            with self._lock:
                self._gets.add(get)
            try:
                for i, result in zip(part, call(part), strict=True):
                    results[i] = result
            finally:
                with self._lock:
                    self._gets.remove(get)
            if self._gets:
                self._delivered(_owners(where, [keys[i] for i in part if results[i] is ErrorClass.OK]))
            left = [i for i in left if i not in part] if len(part) < len(left) else ()
        return results

    def _next(self, keys: Sequence[str], where: Places, left: Sequence[int]) -> Sequence[int]:
        """Those that nobody doubts, then of each of the doubtful owners; of those that hang none."""
        with self._lock:
            late = [get.waits_for for get in self._gets if get.late]
        if not late:
            return left
        hang = frozenset().union(*(each for each in late if len(each) == 1)) - {_ANY_DISK}
        doubtful = frozenset().union(*late) - hang - {_ANY_DISK}
        parts: dict[frozenset[str], list[int]] = {}
        for i in left:
            owners = _owners(where, keys[i : i + 1])
            if not owners & hang:
                parts.setdefault(owners & doubtful, []).append(i)
        return parts[min(parts, key=len)] if parts else ()

    def _delivered(self, owners: frozenset[str]) -> None:
        with self._lock:
            for get in self._gets:
                get.waits_for -= owners - {_ANY_DISK}  # one disk says nothing of another


def _owners(where: Places, keys: Sequence[str]) -> frozenset[str]:
    """Of the memory that these lie in, any of which a get may choose."""
    return frozenset(owner for key in keys for owner, _ in where.get(key) or ((_ANY_DISK, 0),))
