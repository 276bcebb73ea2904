"""Watches whether the disk's folder can still be written to: Mooncake silently drops values that it cannot write."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

PERIOD_S = 5.0
HUNG_S = 30.0
# Mooncake removes its oldest values, at worst all, until 256 MiB of the file system are free (kMinFreeSpace in
# storage_backend.cpp).  Below three quarters of that nothing was left to remove.
MIN_FREE_BYTES = 256 << 20
_LOW_BYTES = MIN_FREE_BYTES * 3 // 4
_TRIAL = bytes(4096)


def room_bytes(folder: Path, wanted: int, *, occupied: bool = True) -> int:
    """Return how many bytes of its file system values in this folder may take.

    Where less than `wanted` is free, what the folder's values take already (`occupied`) counts too; a daemon that uses
    the folder may remove some of them meanwhile.
    """
    room = shutil.disk_usage(folder).free - MIN_FREE_BYTES
    if room < wanted and occupied:
        for each in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                room += each.stat().st_blocks * 512
    return max(0, room)


class DiskWatch:
    """Probes the folder every PERIOD_S, on a thread of its own: a disk that fails may never return a call."""

    def __init__(self, path: Path, fd: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`fd` is the folder that the store was opened with. `clock`: seconds, monotonic."""
        self._path, self._fd, self._clock = path, os.dup(fd), clock
        self.free_bytes: int | None = None  # of its file system, at the last probe
        self._found = ""
        self._synced_ns = 0  # the folder's time of change at the last write that reached the disk
        self._began: float | None = None  # when the running probe began
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-watch", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> str:
        """The fault and its cure, in one line; empty while all is well. Any thread may ask."""
        began = self._began
        if began is not None and self._clock() - began > HUNG_S:
            return self._line(f"no answer for {HUNG_S:.0f} s", "look at the kernel's log")
        return self._found

    def close(self) -> None:
        """Stop the thread. One that hangs in the kernel stays until the process ends."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._began = self._clock()
            self._found = self.probe()
            self._began = None
            self._stop.wait(PERIOD_S)
        os.close(self._fd)

    def probe(self) -> str:
        """Try the folder now; return a line as `fault` does."""
        try:
            here = os.stat(self._path)
            if not os.path.samestat(here, os.fstat(self._fd)):
                return self._line("another folder is there now", "restart the daemon")
            space = os.statvfs(self._path)
            self.free_bytes = free = space.f_bavail * space.f_frsize
            if free < _LOW_BYTES:
                bounds = f"free={free >> 20} MiB min={MIN_FREE_BYTES >> 20} MiB"
                return self._line(bounds, "make room, or choose a smaller size")
            self._write(here.st_mtime_ns)
        except FileNotFoundError:
            return self._line("the folder is gone", "restart the daemon")
        except OSError as error:
            return self._line(error.strerror or str(error), "look at the kernel's log")
        return ""

    def _write(self, changed_ns: int) -> None:
        """Write a file without a name, which nobody finds; sync it only when Mooncake has written since."""
        try:
            fd = os.open(self._path, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):  # a file system, or a kernel, without such files
                return
            raise
        try:
            os.write(fd, _TRIAL)
            if changed_ns != self._synced_ns:
                os.fsync(fd)
                self._synced_ns = changed_ns
        finally:
            os.close(fd)

    def _line(self, what: str, advice: str) -> str:
        return f"nothing can be kept on disk: {what}: disk={str(self._path)!r}: {advice}"
