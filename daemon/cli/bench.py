"""`kvprefetchd bench`: load the daemon's socket, the store and the disk, and say how fast each answers."""

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

import click

from ...client.control import Conversation, Unavailable
from ...shmring.wire.admin import Status, StatusQuery
from ..config.model import DaemonConfig
from ..config.sizes import size
from ..store.disk import DiskSpec
from ..store.load import loaded
from ..telemetry.overview import aligned
from ..telemetry.pretty import number, printable
from .common import (
    Arguments,
    ConfigurationPage,
    Real,
    accepted,
    configuration_options,
    configuration_sources,
    declare,
    flag,
    of_running,
    option,
    show,
)
from .help_page import Group

PAGE = ConfigurationPage(
    "load the daemon's socket, the store and the disk, and print times and rates",
    details="Takes the options of serve, and loads what serve would use: it asks the running daemon for its status and "
    "the master for keys, puts 64 values of 1 MiB, reads those of each storage node as the daemon does, and removes "
    "them. With --mooncake-config it does so in the cluster, otherwise in a private store. With --disk it writes and "
    "reads a nameless file of 64 MiB in that folder, past the page cache where the file system can. Requests of that "
    "cluster wait for their share of its links meanwhile.",
    examples=(
        ("kvprefetchd bench", "this machine and the defaults, one call at a time"),
        ("kvprefetchd bench --mooncake-config mooncake.json", "how fast a cluster is, node by node"),
        ("kvprefetchd bench --parallel 4 --seconds 10 --disk /mnt/nvme/kvprefetch:500GiB", "a disk under load"),
    ),
    exits={0: "all of it answered", 1: "something did not answer"},
    also="kvprefetchd doctor, estimate; docs/TUNING.md",
)
STORE_S = 100.0
CHUNK_BYTES, CHUNKS = 1 << 20, 64

Found = dict[str, Any]  # of store/load.py, with the `bytes` of a call where it moved any; or `failed`


def add(commands: Group) -> None:
    text = "seconds for each row of the result (default: 1)"
    seconds = option("--seconds", metavar="S", type=Real(0, 600), default=1.0, help=text)
    count = click.IntRange(1, 64)
    parallel = option("--parallel", metavar="COUNT", type=count, default=1, help="calls at a time (default: 1)")
    json_too = flag("--json", "times in ms, and rates, as JSON")
    declare(commands, "bench", run, PAGE, seconds, parallel, json_too, *configuration_options())


def run(arguments: Arguments) -> int:
    config = of_running(accepted(configuration_sources(arguments)))
    load = {"parallel": arguments.parallel, "seconds": arguments.seconds}
    found = [*socket(config, **load), *store(config, "load", **load), *disk(config, **load)]
    rows = [summary(each) for each in found if "ms" in each]
    failed = [str(each["failed"]) for each in found if "failed" in each]
    if arguments.json:
        show({"measured": rows}, ok=not failed, problems=failed)
    else:
        table = aligned([["", "p50 ms", "p99 ms", "a second", ""], *map(_cells, rows)]) if rows else []
        print("\n".join([*table, *(f"failed: {line}" for line in failed)]))
    return 1 if failed else 0


def summary(found: Found) -> Found:
    """Return the percentiles of the times, nearest rank, and the rates."""
    times, seconds = sorted(found["ms"]), found["seconds"]
    p50, p99 = (times[math.ceil(len(times) * share) - 1] for share in (0.5, 0.99))
    row = {"what": printable(found["what"]), "count": len(times), "p50_ms": p50, "p99_ms": p99}
    row["per_second"] = len(times) / seconds
    return row | ({"bytes_per_second": found["bytes"] * len(times) / seconds} if "bytes" in found else {})


def _cells(row: Found) -> list[str]:
    rate = f"{size(row['bytes_per_second'])}/s" if "bytes_per_second" in row else ""
    return [row["what"], *(number(row[name]) for name in ("p50_ms", "p99_ms", "per_second")), rate]


def socket(config: DaemonConfig, *, parallel: int, seconds: float) -> Iterator[Found]:
    """Ask the running daemon for its status."""
    try:
        with contextlib.ExitStack() as stack:
            asking = [stack.enter_context(Conversation(config.socket)) for _ in range(parallel)]
            yield loaded(
                "socket", lambda i, _: asking[i].ask(StatusQuery(), Status), parallel=parallel, seconds=seconds
            )
    except Unavailable as error:
        yield {"failed": error.what}


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
