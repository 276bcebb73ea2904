"""Puts a value into a Mooncake store, finds, reads, compares and removes it; `doctor` runs this as a process.

`python -m kvprefetch.daemon.store.round_trip [MOONCAKE_CONFIG]`: that cluster, or without it a private store of 16 MiB
on loopback. Its last line is `ok MILLISECONDS` or `failed REASON`; Mooncake's own output goes before.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import uuid

from .client import Store
from .errors import ErrorClass
from .probe import FAILURES, opened

SIZE = 4096
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


def round_trip(store: Store) -> str | None:
    """Say what went wrong, or None. Leaves nothing in the store."""
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


def main(arguments: list[str]) -> str:
    """Make the round trip; return the last line."""
    try:
        with opened(arguments, 16 << 20) as store:
            started = time.monotonic()
            problem = round_trip(store)
            took_ms = (time.monotonic() - started) * 1e3
    except FAILURES as error:
        return f"failed {error}"
    return f"failed {problem}" if problem else f"ok {took_ms:.1f}"


if __name__ == "__main__":
    print(main(sys.argv[1:]), flush=True)
    os._exit(0)  # Mooncake's destructors may wait
