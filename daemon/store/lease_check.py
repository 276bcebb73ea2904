"""Finds out whether the master keeps values as long as `lease_ms` says, by a get session of Mooncake's.

A session asks the master once. Its reads fail with -707 when that lease is over, whoever else asks for the value
meanwhile.  So the check begins a session on a value that was just read, and reads one byte of it when nine tenths of
`lease_ms` are over.  A read after all of it proves nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from .give_up import Move
from .sleeping_reads import boot_ns, trusted_ns

AGAIN_NS = 600_000_000_000  # a master may start anew with another lease
LEASE_EXPIRED = -707


class LeaseCheck:
    """The check of one store. `key`: a value that was read lately, set by any thread. One thread calls `go_on`."""

    def __init__(self, lease_ns: int, clock_ns: Callable[[], int] = boot_ns) -> None:
        self.key = ""
        self.short = False  # for good: the master's lease ended before that of `lease_ms`
        self._lease_ns, self._clock_ns = lease_ns, clock_ns
        self._byte = ctypes.create_string_buffer(1)
        self._registered = False
        self._session = ("", 0)  # its key, and when it began
        self._next_ns = 0

    @property
    def due(self) -> bool:
        return self.key != "" and not self.short and self._clock_ns() >= self._next_ns

    def go_on(self, client: Any, move: Callable[[Move, list[str], list[int], list[int]], list[int]]) -> None:
        """Begin a session, or end it with a verdict; may wait for a storage node. `move`: makes the read."""
        (key, began), now, address = self._session, self._clock_ns(), ctypes.addressof(self._byte)
        if not key:
            key = self.key
            self._registered = self._registered or client.register_buffer(address, 1) == 0
            there = self._registered and client.batch_get_session_start([key]) == [0]
            self._session = (key if there else "", now)
            self._next_ns = now + (trusted_ns(self._lease_ns) if there else self._lease_ns)
            return

        def read(keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
            codes: list[int] = client.batch_get_into_multi_buffer_ranges(keys, [addresses], [sizes], [[0]])
            return codes

        [code] = move(read, [key], [address], [1])
        ended = self._clock_ns()
        client.batch_get_session_end([key])
        self._session = ("", 0)
        self.short = code == LEASE_EXPIRED and ended - began < self._lease_ns
        self._next_ns = ended + (AGAIN_NS if code == 1 else self._lease_ns)
