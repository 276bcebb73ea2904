"""The owners of memory that do not deliver: they are put aside, so that each is waited for once and not by every get.

An owner whose values fail is put aside: they are not asked for. After a pause one call at a time asks it for one value;
when that arrives the owner is back, otherwise the next pause is twice as long.
A get that is past its deadline (`Get.late`) waits for an owner that delivered nothing to anybody since it began. If
there is one such owner, it is the one that hangs: until that get returns its values are not asked for. If there are
several, their values are read apart, so that those that deliver are told from the one that does not.
Costs nothing but a set of names until an owner fails or a get is late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ErrorClass
from .replicas import Places

PAUSE_S = (1.0, 10.0)  # the first, and the longest
FORGET_S = 300.0  # after its pause, when nobody asks for values of this owner
_ANY_DISK = ""  # stands for the owner of a value on a disk alone, who is not told
_FAILED = (ErrorClass.TRANSFER, ErrorClass.UNDER_WAY)


@dataclass(eq=False)
class Get:
    """Values that are being read. `waits_for`: owners that delivered nothing since it began; `late`: given up."""

    waits_for: frozenset[str] = field(default_factory=frozenset)
    late: bool = False  # set by who waits for it, on any thread

    @property
    def owners(self) -> str:
        return " ".join(sorted(self.waits_for - {_ANY_DISK}))


@dataclass(eq=False)
class _Aside:
    """An owner that is put aside until a clock shows `until`, and then as long as `tried_by` asks it for a value."""

    since: float
    until: float
    pause_s: float = PAUSE_S[0]
    tried_by: Get | None = None


class Owners:
    """The gets in flight, and what they say of the owners that they read from. Any thread may call.

    `clock`: seconds. `log` hears of each owner that is put aside, and that is back.
    """

    def __init__(self, log: Any, clock: Callable[[], float]) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._gets: set[Get] = set()
        self._aside: dict[str, _Aside] = {}

    def read(
        self, keys: Sequence[str], where: Places, get: Get, call: Callable[[Sequence[int]], list[ErrorClass]]
    ) -> list[ErrorClass]:
        """What became of each key: as `call` says, which reads those with these numbers, or TRANSFER without a try."""
        results = [ErrorClass.TRANSFER] * len(keys)
        left: Sequence[int] = range(len(keys))
        while not get.late and (part := self._next(keys, where, left, get)):
            get.waits_for = _owners(where, [keys[i] for i in part])
            with self._lock:
                self._gets.add(get)
            came: list[ErrorClass] = []
            try:
                came = call(part)
            finally:
                with self._lock:
                    self._gets.remove(get)
                if self._gets or self._aside or not all(result is ErrorClass.OK for result in came):
                    self._learn(get, [_owners(where, keys[i : i + 1]) for i in part], came)
            for i, result in zip(part, came, strict=True):
                results[i] = result
            left = [i for i in left if i not in part] if len(part) < len(left) else ()
        return results

    def aside(self) -> frozenset[str]:
        """Those whose values are not to be asked for now."""
        with self._lock:
            return self._refused()

    def _refused(self) -> frozenset[str]:
        now = self._clock()
        for owner in [owner for owner, each in self._aside.items() if now > each.until + FORGET_S]:
            del self._aside[owner]  # nothing of it was asked for any more; it may be gone for good
        failed = {owner for owner, each in self._aside.items() if each.tried_by is not None or now < each.until}
        hang = (get.waits_for for get in self._gets if get.late and len(get.waits_for) == 1)
        return frozenset(failed).union(*hang) - {_ANY_DISK}

    def _next(self, keys: Sequence[str], where: Places, left: Sequence[int], get: Get) -> Sequence[int]:
        """Those that nobody doubts, then those of each doubtful owner; of one that is put aside none, or one key to try
        it with.
        """
        with self._lock:
            late = [each.waits_for for each in self._gets if each.late]
            if not late and not self._aside:
                return left
            refused = self._refused()
            tried = self._aside.keys() - refused
            doubtful = frozenset().union(*late, tried) - refused - {_ANY_DISK}
            parts: dict[frozenset[str], list[int]] = {}
            for i in left:
                owners = _owners(where, keys[i : i + 1])
                if not owners & refused:
                    parts.setdefault(owners & doubtful, []).append(i)
            if not parts:
                return ()
            apart = min(parts, key=len)
            for owner in apart & tried:
                self._aside[owner].tried_by = get
            return parts[apart][:1] if apart & tried else parts[apart]

    def _learn(self, get: Get, owners: Sequence[frozenset[str]], results: Sequence[ErrorClass]) -> None:
        """What a call says of the owners of its values. Of several owners of one value any may have been read."""
        with self._lock:
            now = self._clock()
            tried = {owner for owner, each in self._aside.items() if each.tried_by is get}
            good, bad = set[str](), set[str]()
            for theirs, result in zip(owners, results, strict=False):  # no results: the call raised
                if result is ErrorClass.OK:
                    for other in self._gets:
                        other.waits_for -= theirs - {_ANY_DISK}  # one disk says nothing of another
                if len(theirs) > 1:
                    theirs &= tried
                if result is ErrorClass.OK:
                    good |= theirs
                elif result in _FAILED:
                    bad |= theirs
            back = {owner: self._aside.pop(owner) for owner in good & self._aside.keys()}
            for owner in tried - good:
                each = self._aside[owner]
                each.tried_by = None
                if owner in bad:
                    each.pause_s = min(2 * each.pause_s, PAUSE_S[1])
                    each.until = now + each.pause_s
            new = bad - good - self._aside.keys() - {_ANY_DISK}
            for owner in new:
                self._aside[owner] = _Aside(now, now + PAUSE_S[0])
        for owner in new:
            self._log.warning("owner.aside", owners=owner)
        for owner, each in back.items():
            self._log.info("owner.back", owners=owner, waited_s=round(now - each.since, 1))


def _owners(where: Places, keys: Sequence[str]) -> frozenset[str]:
    """Of the memory that these lie in, any of which a get may choose."""
    return frozenset(owner for key in keys for owner, _ in where.get(key) or ((_ANY_DISK, 0),))
