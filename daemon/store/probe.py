"""Tries a store as a process that can be killed: a value's whole life (`doctor`), or a load (`doctor --measure`).

`python -m kvprefetch.daemon.store.probe trip|load PARALLEL SECONDS [MOONCAKE_CONFIG]`: in that cluster, or in a private
store on loopback.  It prints a JSON object for each thing that it tried: what `load.loaded` returns, with the `bytes`
of a value where it moved any, or `{"failed": …}`.  Mooncake's own output goes between.  It leaves nothing in the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import structlog

from ..config.model import ConfigError
from .client import Store
from .embedded import EmbeddedMaster
from .errors import ErrorClass, StoreError, StoreUnavailable
from .load import loaded
from .settings import MooncakeSettings

SIZE = 4096
VALUE_BYTES = 1 << 20
VALUES = 64  # they lie on nodes that the master chooses: with few values a node may get none
_buffers: list[object] = []  # memory that Mooncake got stays until the process ends, see give_up.py
_OUT_OF_REACH = (
    "the storage node cannot be reached; metadata_server and protocol must be its own, and "
    "MC_USE_IPV6=1 is for all or none"
)
_REFUSED = {
    ErrorClass.NO_SPACE: "no storage node is there, or none has room",
    ErrorClass.TRANSFER: _OUT_OF_REACH,
    ErrorClass.UNDER_WAY: _OUT_OF_REACH,
}


def round_trip(store: Store) -> Iterator[dict[str, Any]]:
    """Yield how long it took to put a value, find, read, compare and remove it, or what went wrong."""
    started = time.monotonic()
    problem = _problem(store)
    yield {"failed": problem} if problem else {"what": "round trip", "ms": [(time.monotonic() - started) * 1e3]}


def _problem(store: Store) -> str | None:
    """Say what went wrong, or None."""
    key, value = f"kvprefetch-doctor-{uuid.uuid4().hex}", os.urandom(SIZE)
    source, target = ctypes.create_string_buffer(value, SIZE), ctypes.create_string_buffer(SIZE)
    addresses = [ctypes.addressof(buffer) for buffer in (source, target)]
    _buffers.extend((source, target))
    for address in addresses:
        store.register(address, SIZE)
    [put] = store.put_from([key], addresses[:1], [SIZE])
    if put is not ErrorClass.OK:
        return f"the put was refused: {_REFUSED.get(put, put.value)}"
    if store.exist([key]) != [True]:
        return "what was put is not found"
    if store.get_into([key], addresses[1:], [SIZE]) != [ErrorClass.OK]:
        return "what was put cannot be read"
    if target.raw != value:
        return "what was read is not what was put"
    return None if store.remove([key]) == (1, 0) else "what was put cannot be removed"


def load(store: Store, parallel: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the times of the master, of puts, and of gets from each node. Raises StoreUnavailable."""
    keys = [f"kvprefetch-measure-{uuid.uuid4().hex}-{i}" for i in range(VALUES)]
    buffers = [ctypes.create_string_buffer(os.urandom(VALUE_BYTES), VALUE_BYTES) for _ in range(parallel)]
    addresses = [ctypes.addressof(buffer) for buffer in buffers]
    _buffers.extend(buffers)
    for address in addresses:
        store.register(address, VALUE_BYTES)
    how: dict[str, Any] = {"parallel": parallel, "seconds": seconds}
    yield loaded("master", lambda _, number: store.exist([keys[number % VALUES]]), **how)
    put: list[str] = []

    def put_one(worker: int, number: int) -> None:
        if store.put_from([keys[number]], [addresses[worker]], [VALUE_BYTES]) == [ErrorClass.OK]:
            put.append(keys[number])

    try:
        puts = loaded("put", put_one, parallel=parallel, seconds=math.inf, most=VALUES)
        nodes: dict[str, list[str]] = {}
        for key, replicas in zip(put, store.described(put), strict=True):
            memory = [each.get_memory_descriptor() for each in replicas if each.is_memory_replica()]
            for node in {each.buffer_descriptor.transport_endpoint for each in memory[:1]}:
                nodes.setdefault(node, []).append(key)
        if not nodes:
            yield {"failed": "no storage node took a value: none is there, or none has room"}
            return
        yield puts | {"bytes": VALUE_BYTES}
        for node, here in sorted(nodes.items()):
            yield from _node(store, node, here, addresses, how)
    finally:
        store.remove(keys)


def _node(
    store: Store, node: str, keys: list[str], addresses: list[int], how: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    bad: list[ErrorClass] = []

    def get_one(worker: int, number: int) -> None:
        [result] = store.get_into([keys[number % len(keys)]], [addresses[worker]], [VALUE_BYTES])
        if result is not ErrorClass.OK:
            bad.append(result)

    gets = loaded(f"get from {node}", get_one, **how)
    if bad:
        yield {"failed": f"storage node {node}: {len(bad)} of {len(gets['ms'])} gets failed: {bad[0].value}"}
    else:
        yield gets | {"bytes": VALUE_BYTES}


@contextlib.contextmanager
def _opened(arguments: Sequence[str], memory: int) -> Iterator[Store]:
    """Open the store of the cluster whose MOONCAKE_CONFIG is named, or a private one of `memory` bytes.

    Our log goes to standard error.
    """
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    log, master = structlog.get_logger(), None
    try:
        if arguments:
            settings = MooncakeSettings.from_file(arguments[0])
        else:
            master = EmbeddedMaster(memory, None, log)
            settings = master.start()
        store = Store(settings, log)
        store.open()
        yield store
        store.close()
    finally:
        if master is not None:
            master.stop()


def main(what: str, parallel: str, seconds: str, *where: str) -> None:
    try:
        with _opened(where, 16 << 20 if what == "trip" else 256 << 20) as store:
            for found in round_trip(store) if what == "trip" else load(store, int(parallel), float(seconds)):
                print(json.dumps(found), flush=True)
    except (ConfigError, StoreError, StoreUnavailable) as error:
        print(json.dumps({"failed": str(error)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # Mooncake's destructors may wait
