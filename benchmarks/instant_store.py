"""Runs kvprefetchd on a store that takes no time: `python -m benchmarks.instant_store KIND VALUE_BYTES serve …`.

Everything is the daemon's own but Mooncake's client: it has every value, of VALUE_BYTES, and answers at once.  A get
leaves the memory as it is, so the engine must have filled its staging: a page of zeros counts as lost on a disk.
KIND: `private`, as the embedded store without a disk, or `cluster`, in which values may move and lie on disks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.store import connection
from kvprefetch.daemon.store.joining import Joined
from kvprefetch.daemon.store.settings import MooncakeSettings


class Replica:
    """A value in the memory of a storage node, as Mooncake describes it."""

    transport_endpoint, buffer_address = "192.0.2.1:1", 4096

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffer_descriptor = self

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> Replica:
        return self


class InstantClient:
    """The calls of MooncakeDistributedStore that the daemon makes. It joined by itself, and no read of it sleeps."""

    engine, why, sleeping = None, "", False

    def __init__(self, value_bytes: int) -> None:
        self._replicas = [Replica(value_bytes)]
        self.client = self

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [1] * len(keys)

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[Replica]]:
        return dict.fromkeys(keys, self._replicas)

    def batch_get_into(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[int]:
        return sizes

    def register_buffer(self, address: int, length: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0

    def close(self) -> int:
        return 0


def run(arguments: list[str]) -> Any:
    private, client = arguments[0] == "private", InstantClient(int(arguments[1]))
    from_file = MooncakeSettings.from_file

    def settings(path: Path) -> MooncakeSettings:
        return replace(from_file(path), private=private)

    MooncakeSettings.from_file = settings  # type: ignore[method-assign,assignment]
    connection.join = lambda *_: Joined(client)  # type: ignore[attr-defined]
    sys.argv[1:] = arguments[2:]
    return main()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
