"""Tries a store as a process that can be killed: a value's whole life (`doctor`), or times (`doctor --measure`).

`python -m kvprefetch.daemon.store.probe trip|times [MOONCAKE_CONFIG]`: in that cluster, or in a private store on
loopback.  It prints a JSON object for each thing that it tried: `{"what": …, "ms": […]}`, for gets with the `bytes`
of one value, or `{"failed": …}`.  Mooncake's own output goes between.  It leaves nothing in the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import structlog

from .client import Store
from .embedded import EmbeddedMaster
from .errors import EmbeddedError, ErrorClass, StoreError, StoreUnavailable
from .settings import MooncakeSettings, SettingsError

SIZE = 4096
VALUE_BYTES = 1 << 20
VALUES = 64  # they lie on nodes that the master chooses: with few values a node may get none
QUESTIONS = 200
GETS = 4  # of each value
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


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Return how long each of `count` calls took, in ms."""
    took = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        took.append((time.perf_counter() - started) * 1e3)
    return took


def measure(store: Store) -> Iterator[dict[str, Any]]:
    """Yield the times of the master and of each node. Raises StoreUnavailable."""
    keys = [f"kvprefetch-latency-{uuid.uuid4().hex}-{i}" for i in range(VALUES)]
    buffer = ctypes.create_string_buffer(os.urandom(VALUE_BYTES), VALUE_BYTES)
    address = ctypes.addressof(buffer)
    store.register(address, VALUE_BYTES)
    yield {"what": "master", "ms": timed(lambda: store.exist(keys[:1]), QUESTIONS)}
    try:
        put = [key for key in keys if store.put_from([key], [address], [VALUE_BYTES]) == [ErrorClass.OK]]
        nodes: dict[str, list[str]] = {}
        for key, replicas in zip(put, store.described(put), strict=True):
            memory = [each.get_memory_descriptor() for each in replicas if each.is_memory_replica()]
            for node in {each.buffer_descriptor.transport_endpoint for each in memory[:1]}:
                nodes.setdefault(node, []).append(key)
        if not nodes:
            yield {"failed": "no storage node took a value: none is there, or none has room"}
        for node, here in sorted(nodes.items()):
            yield from _node(store, node, here, address)
    finally:
        store.remove(keys)


def _node(store: Store, node: str, keys: list[str], address: int) -> Iterator[dict[str, Any]]:
    results: list[ErrorClass] = []
    gets = iter(keys * GETS)
    took = timed(lambda: results.extend(store.get_into([next(gets)], [address], [VALUE_BYTES])), len(keys) * GETS)
    if bad := [result for result in results if result is not ErrorClass.OK]:
        yield {"failed": f"storage node {node}: {len(bad)} of {len(results)} gets failed: {bad[0].value}"}
    good = [ms for ms, result in zip(took, results, strict=True) if result is ErrorClass.OK]
    if good:
        yield {"what": f"get from {node}", "ms": good, "bytes": VALUE_BYTES}


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


def main(what: str, *arguments: str) -> None:
    try:
        tried, memory = (round_trip, 16 << 20) if what == "trip" else (measure, 256 << 20)
        with _opened(arguments, memory) as store:
            for found in tried(store):
                print(json.dumps(found), flush=True)
    except (StoreError, StoreUnavailable, EmbeddedError, SettingsError) as error:
        print(json.dumps({"failed": str(error)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # Mooncake's destructors may wait
