"""Loads the daemon's socket, the store and the disk, and says how fast each answers (`doctor --measure`)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from kvprefetch.client.control import Conversation, Unavailable

from ...shmring.wire.admin import Status, StatusQuery
from ..config.model import DaemonConfig
from ..config.sizes import size
from ..store.disk import DiskSpec
from ..store.load import loaded
from ..telemetry.pretty import number, printable

STORE_S = 100.0
CHUNK_BYTES, CHUNKS = 1 << 20, 64

Found = dict[str, Any]  # of store/load.py, with the `bytes` of a call where it moved any; or `failed`


def measured(config: DaemonConfig, seconds: float) -> Iterator[Found]:
    """Yield the percentiles and rates of each, or what failed: `seconds` of as many calls at a time as of fetches."""
    load: dict[str, Any] = {"parallel": config.fetch_threads, "seconds": seconds}
    for each in (*socket(config, **load), *store(config, "load", **load), *disk(config, **load)):
        yield summary(each) if "ms" in each else each


def summary(found: Found) -> Found:
    times, seconds = sorted(found["ms"]), found["seconds"]
    p50, p99 = (times[math.ceil(len(times) * share) - 1] for share in (0.5, 0.99))
    row = {"what": printable(found["what"]), "count": len(times), "p50_ms": p50, "p99_ms": p99}
    row["per_second"] = len(times) / seconds
    return row | ({"bytes_per_second": found["bytes"] * len(times) / seconds} if "bytes" in found else {})


def words(row: Found) -> str:
    rate = f", {size(row['bytes_per_second'])}/s" if "bytes_per_second" in row else ""
    p50, p99, count = (number(row[name]) for name in ("p50_ms", "p99_ms", "per_second"))
    return f"{row['what']}: p50 {p50} ms, p99 {p99} ms, {count} a second{rate}"


def socket(config: DaemonConfig, *, parallel: int, seconds: float) -> Iterator[Found]:
    """Ask the running daemon, if there is one, for its status."""
    with contextlib.suppress(Unavailable), contextlib.ExitStack() as stack:  # doctor has said why
        asking = [stack.enter_context(Conversation(config.socket)) for _ in range(parallel)]
        yield loaded("socket", lambda i, _: asking[i].ask(StatusQuery(), Status), parallel=parallel, seconds=seconds)


def store(config: DaemonConfig, what: str, *, parallel: int = 1, seconds: float = 0.0) -> Iterator[Found]:
    """Try the store in a process that can be killed: see store/probe.py."""
    if find_spec("mooncake") is None:
        yield {"failed": "store: Mooncake is not installed here: run this in the daemon's environment"}
        return
    where = [str(config.mooncake_config)] if config.mooncake_config is not None else []
    command = [sys.executable, "-m", "kvprefetch.daemon.store.probe", what, str(parallel), str(seconds), *where]
    said, most_s = b"", STORE_S + 10 * seconds
    try:
        said = subprocess.run(command, capture_output=True, timeout=most_s, check=True).stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        yield {"failed": f"store: no answer within {most_s:.0f} s"}
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines() or ["no reason"]
        yield {"failed": f"store: it ended with status {error.returncode}: {printable(reason[-1])}"}
    yield from (json.loads(line) for line in said.splitlines() if line.startswith(b"{"))


def disk(config: DaemonConfig, *, parallel: int, seconds: float) -> Iterator[Found]:
    """Write a file without a name, and read its chunks."""
    if config.disk is None or config.mooncake_config is not None:
        return
    folder = DiskSpec.parse(config.disk).path
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
            chunks = [stack.enter_context(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(parallel)]
            fd = file.fileno()
            for _ in range(CHUNKS):
                file.write(os.urandom(CHUNK_BYTES))
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with contextlib.suppress(OSError):  # a file system without it reads through the page cache
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            yield loaded(
                f"disk {folder}",
                lambda i, number: os.preadv(fd, [chunks[i]], number % CHUNKS * CHUNK_BYTES),
                parallel=parallel,
                seconds=seconds,
            ) | {"bytes": CHUNK_BYTES}
    except OSError as error:
        yield {"failed": f"disk: {error.strerror}: disk={str(folder)!r}"}
