"""Times questions to a store's master and gets from each of its storage nodes; `kvprefetchd latency` runs this.

`python -m kvprefetch.daemon.store.latency [MOONCAKE_CONFIG]`: that cluster, or without it a private store on loopback.
It prints a JSON object for each, `{"what": …, "ms": […], "bytes": …}` with the size of one value, or `{"failed": …}`.
It reads as the daemon does, and removes its values at the end.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .client import Store
from .errors import ErrorClass
from .probe import FAILURES, opened

VALUE_BYTES = 1 << 20
VALUES = 64  # they lie on nodes that the master chooses: with few values a node may get none
QUESTIONS = 200
GETS = 4  # of each value


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


def main(arguments: Sequence[str]) -> None:
    try:
        with opened(arguments, 256 << 20) as store:
            for found in measure(store):
                print(json.dumps(found), flush=True)
    except FAILURES as error:
        print(json.dumps({"failed": str(error)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # Mooncake's destructors may wait
