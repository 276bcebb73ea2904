"""Finds leaks from outside: processes, shared memory, flags, slots, pins, credits.

The auditor reads /proc, /dev/shm and the daemon's live segments through /proc/PID/fd (mapped read-only), and asks the
daemon last. A gauge that disagrees with the shared words is a finding, too.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvprefetch.daemon.telemetry import board
from kvprefetch.shmring import view
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.wire import admin
from kvprefetch.shmring.wire.codec import receive_message, send_message
from kvprefetch.shmring.wire.records import FlagState
from tests.support.waiting import poll

# This process and everything it starts have the mark in their environment; a stranger has not.
# Several test processes run at once (pytest-xdist), so each sets a mark of its own.
os.environ["KVPREFETCH_TEST_RUN"] = uuid.uuid4().hex
MARK = f"KVPREFETCH_TEST_RUN={os.environ['KVPREFETCH_TEST_RUN']}".encode()


def our_processes() -> dict[int, str]:
    """Return the processes that this test run started, however deep below it: pid -> command line."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                marked = MARK in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            # Python's own, which ends with the test process that has used a pool of processes.
            tracks = "multiprocessing.resource_tracker" in command
            if marked and not tracks and int(entry.name) != os.getpid():
                found[int(entry.name)] = command
    return found


# Control sockets of the daemons that this process started, and of those that it killed since.
SOCKETS: set[Path] = set()
KILLED: set[Path] = set()


def our_shared_memory() -> set[str]:
    """Return our names under /dev/shm that should not be there: all but the picture of a daemon.

    That has a name for as long as its daemon runs, and is left behind by a SIGKILL alone: then the next daemon at this
    socket takes it over.
    """
    names = {name for name in os.listdir("/dev/shm") if "kvprefetch" in name.replace("kvprefetchd-", "")}
    left = [socket for socket in SOCKETS - KILLED if (seen := board.read(socket)) is not None and not seen.alive]
    return names | {board.name_of(socket)[1:] for socket in left}


def control_segments(pid: int) -> list[dict[str, Any]]:
    """Describe the control segments that a daemon holds open, read-only (shmring/view.py)."""
    names = {state.value: state.name for state in FlagState}
    views: dict[int, dict[str, Any]] = {}  # Python's mmap keeps a second descriptor
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "kvprefetch" not in (name := os.readlink(link)) or not name.startswith(("/memfd:", "/dev/shm/")):
                continue
            fd = os.open(link, os.O_RDONLY)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_size == 0:  # just being made
                continue
            with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped, memoryview(mapped) as buffer:
                seen = view.describe(buffer, time.monotonic_ns(), names)
            views[seen["epoch"]] = seen
        except SegmentCorrupt:
            pass  # a staging segment: it has no header
        finally:
            os.close(fd)
    return list(views.values())


def ask_daemon(path: str | Path) -> admin.Status:
    """Ask the daemon for its status."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))  # without a timeout: with one, connect() fails at once when the backlog is full
        sock.settimeout(10)
        send_message(sock, admin.StatusQuery())
        received = receive_message(sock)
    assert received is not None
    assert isinstance(received[0], admin.Status)
    return received[0]


class Auditor:
    """Compares what is there after a test with what was there before it."""

    def __init__(self) -> None:
        self._processes = set(our_processes())
        self._shared_memory = our_shared_memory()

    def leftovers(self) -> list[str]:
        """Return the processes and the shared memory that were not there at the start."""
        processes = [f"process {pid}: {name}" for pid, name in our_processes().items() if pid not in self._processes]
        return processes + [f"/dev/shm/{name}" for name in sorted(our_shared_memory() - self._shared_memory)]

    def assert_nothing_left(self, timeout_s: float = 10.0) -> None:
        """Check that all is gone, after everything was stopped or killed."""
        _assert_none(self.leftovers, timeout_s)

    def assert_idle(self, pid: int, path: str | Path, timeout_s: float = 10.0) -> None:
        """Check a live daemon without requests: every flag is free, nothing is pinned, all credits are back."""
        _assert_none(lambda: self.pinned(pid, path), timeout_s)

    def pinned(self, pid: int, path: str | Path) -> list[str]:
        """Return what a live daemon still holds."""
        findings: list[str] = []
        views = {seen["epoch"]: seen for seen in control_segments(pid)}
        status = ask_daemon(path)
        for engine in status.engines:
            epoch = int(engine["epoch"])
            seen = views.pop(epoch, None)
            if seen is None:
                findings.append(f"epoch {epoch}: no control segment is open")
                continue
            used = {state: count for state, count in seen["flags"]["states"].items() if state != "FREE"}
            if used:
                findings.append(f"epoch {epoch}: flags in use: {used}")
            if seen["ring"]["used_bytes"]:
                findings.append(f"epoch {epoch}: ring not drained: bytes={seen['ring']['used_bytes']}")
            if (there := seen["credits"]["outstanding"]) != int(engine["save_slots"]):
                findings.append(f"epoch {epoch}: credits out: {there} of {engine['save_slots']} there")
            findings += [
                f"epoch {epoch}: {name}={engine[name]}"
                for name in ("blocks_pinned", "requests", "orders", "saves_queued", "device_copies")
                if engine[name]
            ]
            if int(engine["slots_free"]) + int(engine["slots_idle"]) != int(engine["slots"]):
                findings.append(f"epoch {epoch}: slots lost: {engine}")
        findings += [f"epoch {epoch}: segment of no attached engine" for epoch in views]
        return findings


def _assert_none(findings: Callable[[], list[str]], timeout_s: float) -> None:
    left: list[str] = []

    def none_left() -> bool:
        left[:] = findings()
        return not left

    assert poll(none_left, timeout_s, pause_s=0.05), "left behind:\n  " + "\n  ".join(left)
