"""`kvprefetchd doctor --measure`: how long the daemon, the master, each storage node and the disk take to answer."""

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
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...client.control import Conversation, Unavailable
from ...shmring.wire.admin import Status, StatusQuery
from ..config.model import DaemonConfig
from ..store.disk import DiskSpec
from ..telemetry.overview import aligned
from ..telemetry.pretty import number, printable

ASKED = 100
STORE_S = 100.0
CHUNK_BYTES, CHUNKS = 1 << 20, 64

Found = dict[str, Any]  # `what`, `ms` and for reads the `bytes` of each; or `failed`


def run(config: DaemonConfig, *, as_json: bool) -> int:
    found = [*socket(config), *store(config), *disk(config)]
    rows = [summary(each) for each in found if "ms" in each]
    failed = [str(each["failed"]) for each in found if "failed" in each]
    if as_json:
        print(json.dumps({"measured": rows, "failed": failed}, indent=2))
    else:
        cells = [[row["what"], *(number(row[name]) for name in ("p50_ms", "p99_ms")), _rate(row)] for row in rows]
        table = aligned([["", "p50 ms", "p99 ms", "MB/s"], *cells]) if cells else []
        print("\n".join(table + [f"failed: {line}" for line in failed]))
    return 1 if failed else 0


def summary(found: Found) -> Found:
    """Return the percentiles of the times, nearest rank, and for reads the rate."""
    times = sorted(found["ms"])
    p50, p99 = (times[math.ceil(len(times) * share) - 1] for share in (0.5, 0.99))
    rate = {"mb_s": found["bytes"] * len(times) / sum(times) / 1e3} if "bytes" in found else {}
    return {"what": printable(found["what"]), "count": len(times), "p50_ms": p50, "p99_ms": p99, **rate}


def _rate(row: Found) -> str:
    return number(row["mb_s"]) if "mb_s" in row else ""


def socket(config: DaemonConfig) -> Iterator[Found]:
    took = []
    try:
        with Conversation(config.socket) as daemon:
            for _ in range(ASKED):
                started = time.perf_counter()
                daemon.ask(StatusQuery(), Status)
                took.append((time.perf_counter() - started) * 1e3)
        yield {"what": "socket", "ms": took}
    except Unavailable as error:
        yield {"failed": error.what}


def store(config: DaemonConfig, what: str = "times") -> Iterator[Found]:
    """Try the store in a process that can be killed: see store/probe.py."""
    if find_spec("mooncake") is None:
        yield {"failed": "store: Mooncake is not installed here: run this in the daemon's environment"}
        return
    where = [str(config.mooncake_config)] if config.mooncake_config is not None else []
    command = [sys.executable, "-m", "kvprefetch.daemon.store.probe", what, *where]
    said = b""
    try:
        said = subprocess.run(command, capture_output=True, timeout=STORE_S, check=True).stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        yield {"failed": f"store: no answer within {STORE_S:.0f} s"}
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().splitlines() or ["no reason"]
        yield {"failed": f"store: it ended with status {error.returncode}: {printable(reason[-1])}"}
    yield from (json.loads(line) for line in said.splitlines() if line.startswith(b"{"))


def disk(config: DaemonConfig) -> Iterator[Found]:
    if config.disk is None or config.mooncake_config is not None:
        return
    folder = DiskSpec.parse(config.disk).path
    try:
        yield {"what": f"disk {folder}", "ms": read_times(folder), "bytes": CHUNK_BYTES}
    except OSError as error:
        yield {"failed": f"disk: {error.strerror}: disk={str(folder)!r}"}


def read_times(folder: Path) -> list[float]:
    """Write a file without a name, and return how long each of its chunks took to read, in ms. Raises OSError."""
    took = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, mmap.mmap(-1, CHUNK_BYTES) as chunk:
        fd = file.fileno()
        for _ in range(CHUNKS):
            file.write(os.urandom(CHUNK_BYTES))
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with contextlib.suppress(OSError):  # a file system without it reads through the page cache
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        for i in range(CHUNKS):
            started = time.perf_counter()
            os.preadv(fd, [chunk], i * CHUNK_BYTES)
            took.append((time.perf_counter() - started) * 1e3)
    return took
