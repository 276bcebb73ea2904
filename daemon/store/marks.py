"""Tells whether what says whose a namespace is still lies there, without reading it: beside calls that are made anyway.

In a store that others use as well the size of that value tells it from another's, so it is padded to one that follows
from what it says.  In a store from which only this process removes, counts of removals and of what was put tell.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .places import Places, places

_SIZES = 2048, 8192  # the least, which no fingerprint exceeds, and how many there are
_NOTHING = 0, 0


class Mark(NamedTuple):
    """What lay under a key, or that nothing did."""

    key: str
    sign: tuple[int, int]


class Found(NamedTuple):
    """The value of a key; b"" is none, or where it is `there` one that cannot be read now."""

    value: bytes
    there: bool
    mark: Mark


def padded(value: bytes) -> bytes:
    """With spaces behind, which mean nothing in JSON. Two values have one size by chance in one of 8,192 cases."""
    number = int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "big")
    return value.ljust(_SIZES[0] + number % _SIZES[1])


class Marks:
    """Any thread may ask. `private`: only this process removes from the store, and puts what is marked."""

    def __init__(self, private: bool) -> None:
        self._private = private
        self._lock = threading.Lock()
        self._removing = self._removals = 0  # by force: now, and ever begun or ended
        self._removed: dict[str, int] = {}  # of each key that was looked at: how many of these could be of it
        self._puts: Counter[str] = Counter()

    @contextlib.contextmanager
    def removal(self, of: Callable[[str], object]) -> Iterator[None]:
        """Around what removes by force; `of` tells of a key whether it is among what goes."""
        self._count(1, of)
        try:
            yield
        finally:
            self._count(-1, of)

    def _count(self, more: int, of: Callable[[str], object]) -> None:
        with self._lock:
            self._removing, self._removals = self._removing + more, self._removals + 1
            for key in self._removed:
                self._removed[key] += bool(of(key))

    def before(self, key: str) -> Mark:
        """To begin a look with."""
        with self._lock:
            return Mark(key, (self._removed.setdefault(key, 0), self._puts[key]))

    def put(self, mark: Mark) -> Mark:
        """One was put there, by us or just before us."""
        with self._lock:
            self._puts[mark.key] += 1
            return mark._replace(sign=(mark.sign[0], self._puts[mark.key]))

    def after(self, mark: Mark, value: bytes) -> Mark:
        """To end it with: what it found."""
        return mark if self._private else mark._replace(sign=(len(value), 0))

    def look(self, client: Any, keys: Sequence[str], mark: Mark | None = None) -> tuple[Places, bool]:
        """Where these lie, and whether what is marked lies there still; in one call, where that lies in memory."""
        if self._private:
            where = {} if self._removing else dict.fromkeys(keys, frozenset([("", self._removals)]))
            return where, mark is None or mark.sign == self.before(mark.key).sign
        if mark is not None and mark.sign == _NOTHING:  # of what is not there Mooncake logs an error
            return self.look(client, keys)[0] if keys else {}, client.batch_is_exist([mark.key]) == [0]
        described = client.batch_get_replica_desc([*keys, *([mark.key] if mark is not None else [])])
        return places(described), mark is None or mark.sign == (_size(client, mark.key, described), 0)


def _size(client: Any, key: str, described: Mapping[str, Sequence[Any]]) -> int:
    """Of what lies there; 0 for nothing, or for an answer that failed."""
    replicas = described.get(key, ())
    for each in replicas:
        if each.is_memory_replica():
            return int(each.get_memory_descriptor().buffer_descriptor.size)
    return max(0, client.get_size(key)) if replicas else 0
