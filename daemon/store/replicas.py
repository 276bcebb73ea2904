"""Checks that a value stayed in the same memory while it was read.

A get reads the memory that the master named, where a lease keeps the value.  But a restarted master knows of no lease
and gives all memory away again, and a forced removal heeds none: then as many bytes of another value arrive, without an
error.  So a get counts only when the value lay in the same memory before and after it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .errors import ErrorClass


class Place(NamedTuple):
    """Memory of a storage node in which a value lies."""

    node: str
    address: int
    size: int


# For each key that exists the memory of its replicas; nothing for a value on disk alone.
Replicas = Mapping[str, frozenset[Place]]


class ReplicaReader:
    """Reads where replicas lie now; any thread may ask.

    In a `private` store only this process removes values.  There a count of removals stands for the memory, and saves
    the call: a value stays where it is unless a removal begins or ends in between.
    """

    def __init__(self, private: bool) -> None:
        self._private = private
        self._lock = threading.Lock()
        self._begun = self._ended = 0  # removals

    @contextlib.contextmanager
    def removal(self) -> Iterator[None]:
        """Enclose a call that removes values although they are leased."""
        with self._lock:
            self._begun += 1
        try:
            yield
        finally:
            with self._lock:
                self._ended += 1

    def read(self, client: Any, keys: Sequence[str]) -> Replicas:
        """Return the replicas of these keys. During a removal from a private store no key has any."""
        if not self._private:
            described = client.batch_get_replica_desc(list(keys))
            return {key: frozenset(_memory(replicas)) for key, replicas in described.items() if replicas}
        with self._lock:
            there = frozenset([Place("", self._begun, 0)])
            return dict.fromkeys(keys, there) if self._begun == self._ended else {}


def _memory(replicas: Sequence[Any]) -> Iterator[Place]:
    """Convert Mooncake's replica descriptors."""
    for each in replicas:
        if each.is_memory_replica():
            part = each.get_memory_descriptor().buffer_descriptor
            yield Place(part.transport_endpoint, part.buffer_address, part.size)


def void_what_moved(results: list[ErrorClass], keys: Sequence[str], before: Replicas, after: Replicas) -> None:
    """Turn OK into MISS for a key that is gone, into LOOKUP_AGAIN for one that lay elsewhere when the get began."""
    if len(before) == len(keys) and before == after:  # what follows takes time for each key
        return
    for index, key in enumerate(keys):
        if results[index] is ErrorClass.OK and not (key in before and key in after and before[key] <= after[key]):
            results[index] = ErrorClass.LOOKUP_AGAIN if key in after else ErrorClass.MISS
