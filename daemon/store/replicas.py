"""Where values lie, and whether one that was read stayed there while it was read.

A get reads the memory that the master named, where a lease keeps the value. But a master that was restarted knows of no
lease and gives all memory away again, and a removal by force heeds none: then bytes of another value arrive, as many as
wanted and without an error.  So a get counts only when the value lay in the same memory before and after it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .errors import ErrorClass

# Of each key that exists: the memory it lies in. On a disk alone it lies in none, and is read by its key.
Replicas = Mapping[str, frozenset[tuple[str, int]]]


class ReplicaReader:
    """Tells where values lie now; any thread may ask.

    In a `private` store only this process removes values. There a count of removals takes the place of the memory, and
    costs no call: a value that was there before and after stayed where it was unless a removal began or ended between.
    """

    def __init__(self, private: bool) -> None:
        self._private = private
        self._lock = threading.Lock()
        self._running = self._count = 0

    @contextlib.contextmanager
    def removal(self) -> Iterator[None]:
        """Enclose a call that removes values although they are leased."""
        with self._lock:
            self._running, self._count = self._running + 1, self._count + 1
        try:
            yield
        finally:
            with self._lock:
                self._running, self._count = self._running - 1, self._count + 1

    def read(self, client: Any, keys: Sequence[str]) -> Replicas:
        """Return the places of these keys. During a removal from a private store no key has any."""
        if self._private:
            with self._lock:
                return {} if self._running else dict.fromkeys(keys, frozenset([("", self._count)]))
        return memory_replicas(client.batch_get_replica_desc(list(keys)))


def memory_replicas(described: Mapping[str, Sequence[Any]]) -> Replicas:
    """From Mooncake's replica descriptors."""
    return {key: frozenset(_memory(replicas)) for key, replicas in described.items() if replicas}


def _memory(replicas: Sequence[Any]) -> list[tuple[str, int]]:
    descriptors = [each.get_memory_descriptor().buffer_descriptor for each in replicas if each.is_memory_replica()]
    return [(each.transport_endpoint, each.buffer_address) for each in descriptors]


def void_what_moved(results: list[ErrorClass], keys: Sequence[str], before: Replicas, after: Replicas) -> None:
    """No OK stays of a key that is gone, which is a MISS then, or that lay elsewhere when the get began."""
    for index, key in enumerate(keys):
        if results[index] is ErrorClass.OK and not (key in before and key in after and before[key] <= after[key]):
            results[index] = ErrorClass.LOOKUP_AGAIN if key in after else ErrorClass.MISS
