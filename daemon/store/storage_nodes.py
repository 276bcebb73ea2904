"""Puts storage nodes aside that do not deliver, so that one get waits for each of them, and not every get.

A node is put aside when its values fail, and nobody asks for them.  After a pause one call at a time asks the node for
one value; when that arrives the node is back, otherwise the next pause is twice as long.
A get past its deadline (`Get.late`) waits for a node that delivered nothing to anybody since the get began.  If there
is one such node, that one hangs, and nobody asks for its values until the get returns.  If there are several, gets read
their values apart, to find out which one hangs.
All this costs nothing but a set of names until a node fails or a get is late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ErrorClass
from .replicas import Replicas

PAUSE_S = (1.0, 10.0)  # the first, and the longest
FORGET_S = 300.0  # after its pause, while nobody asks for the node's values
_ANY_DISK = ""  # stands for the node of a value on disk alone, which Mooncake does not name
_FAILED = (ErrorClass.TRANSFER, ErrorClass.UNDER_WAY)


@dataclass(eq=False)
class Get:
    """A get in flight. `waits_for`: nodes that delivered nothing since it began; `late`: its caller gave it up.

    `begun`: its bytes may come from now on.  `dropped`: nobody wants it any more, so what has not begun never does.  A
    caller that sets it as the get begins is too late, and the bytes come.
    """

    waits_for: frozenset[str] = field(default_factory=frozenset)
    late: bool = False  # the caller sets it, on any thread
    begun: bool = False
    dropped: bool = False  # as `late`

    @property
    def nodes(self) -> str:
        return " ".join(sorted(self.waits_for - {_ANY_DISK}))


@dataclass(eq=False)
class _Aside:
    """A node that is put aside until the clock shows `until`, and then as long as `tried_by` asks it for a value."""

    since: float
    until: float
    pause_s: float = PAUSE_S[0]
    tried_by: Get | None = None


class StorageNodes:
    """The gets in flight, and the nodes that they read from. Any thread may call. `clock`: seconds, monotonic."""

    def __init__(self, log: Any, clock: Callable[[], float]) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._gets: set[Get] = set()
        self._aside: dict[str, _Aside] = {}

    def read(
        self, keys: Sequence[str], where: Replicas, get: Get, call: Callable[[Sequence[int]], list[ErrorClass]]
    ) -> list[ErrorClass]:
        """Return each key's result: that of `call`, which reads the keys at some indices, or TRANSFER untried."""
        results = [ErrorClass.TRANSFER] * len(keys)
        left: Sequence[int] = range(len(keys))
        while not get.late and (part := self._next(keys, where, left, get)):
            get.waits_for = _nodes_of(where, [keys[i] for i in part])
            with self._lock:
                self._gets.add(get)
            came: list[ErrorClass] = []
            try:
                came = call(part)
            finally:
                with self._lock:
                    self._gets.remove(get)
                if self._gets or self._aside or not all(result is ErrorClass.OK for result in came):
                    self._learn(get, [_nodes_of(where, keys[i : i + 1]) for i in part], came)
            for i, result in zip(part, came, strict=True):
                results[i] = result
            left = [i for i in left if i not in part] if len(part) < len(left) else ()
        return results

    def aside(self) -> frozenset[str]:
        """Return the nodes that nobody should ask now."""
        with self._lock:
            return self._refused()

    def _refused(self) -> frozenset[str]:
        now = self._clock()
        for node in [node for node, each in self._aside.items() if now > each.until + FORGET_S]:
            del self._aside[node]  # nobody asks for its values any more; it may be gone for good
        failed = {node for node, each in self._aside.items() if each.tried_by is not None or now < each.until}
        hang = (get.waits_for for get in self._gets if get.late and len(get.waits_for) == 1)
        return frozenset(failed).union(*hang) - {_ANY_DISK}

    def _next(self, keys: Sequence[str], where: Replicas, left: Sequence[int], get: Get) -> Sequence[int]:
        """Return the indices to read next: first those of undoubted nodes, then those of each doubtful node apart.

        Of a node that is put aside: none, or one key to try it with.
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
                nodes = _nodes_of(where, keys[i : i + 1])
                if not nodes & refused:
                    parts.setdefault(nodes & doubtful, []).append(i)
            if not parts:
                return ()
            apart = min(parts, key=len)
            for node in apart & tried:
                self._aside[node].tried_by = get
            return parts[apart][:1] if apart & tried else parts[apart]

    def _learn(self, get: Get, nodes: Sequence[frozenset[str]], results: Sequence[ErrorClass]) -> None:
        """Learn from a call's results. A value on several nodes blames none: Mooncake may have read any of them."""
        with self._lock:
            now = self._clock()
            tried = {node for node, each in self._aside.items() if each.tried_by is get}
            good, bad = set[str](), set[str]()
            for theirs, result in zip(nodes, results, strict=False):  # no results: the call raised
                if result is ErrorClass.OK:
                    for other in self._gets:
                        other.waits_for -= theirs - {_ANY_DISK}  # one disk says nothing of another
                if len(theirs) > 1:
                    theirs &= tried
                if result is ErrorClass.OK:
                    good |= theirs
                elif result in _FAILED:
                    bad |= theirs
            back = {node: self._aside.pop(node) for node in good & self._aside.keys()}
            for node in tried - good:
                each = self._aside[node]
                each.tried_by = None
                if node in bad:
                    each.pause_s = min(2 * each.pause_s, PAUSE_S[1])
                    each.until = now + each.pause_s
            new = bad - good - self._aside.keys() - {_ANY_DISK}
            for node in new:
                self._aside[node] = _Aside(now, now + PAUSE_S[0])
        for node in new:
            self._log.warning("owner.aside", owners=node)
        for node, each in back.items():
            self._log.info("owner.back", owners=node, waited_s=round(now - each.since, 1))


def _nodes_of(where: Replicas, keys: Sequence[str]) -> frozenset[str]:
    """Return the nodes with replicas of these keys; a get may choose any of them."""
    return frozenset(node for key in keys for node, *_ in where.get(key) or ((_ANY_DISK,),))
