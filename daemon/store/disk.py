"""The embedded store's disk: its folder and size, the lock on the folder, and Mooncake's settings for it."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...shmring.wire.checks import shown
from ..config.sizes import parse_size
from .disk_folder import open_folder
from .disk_watch import DiskWatch, room_bytes
from .errors import EmbeddedError
from .settings import SettingsError

MIN_DISK_BYTES, MAX_DISK_BYTES = 16 << 20, 1 << 50
DISK_BUFFER_BYTES = 256 << 20  # all that Mooncake reads from a disk at a time goes through


@dataclass(frozen=True)
class DiskSpec:
    """A directory for the disk and the bytes that values may take there; None is no bound of its own."""

    path: Path
    size_bytes: int | None

    @classmethod
    def parse(cls, text: str) -> DiskSpec:
        """From "DIR" or "DIR:SIZE", such as /var/x:20GiB. The directory must be absolute. Raises SettingsError."""
        head, colon, tail = text.rpartition(":")
        if not colon or "/" in tail:
            head, tail = text, ""
        size = None
        if colon and head != text:
            try:
                size = parse_size(tail)
            except ValueError as error:
                raise SettingsError(f"disk: {error}: disk={shown(text)}") from None
            if not MIN_DISK_BYTES <= size <= MAX_DISK_BYTES:
                raise SettingsError(f"disk: size should be 16MiB to 1024TiB: disk={shown(text)}")
        if not head.startswith("/") or ".." in Path(head).parts or "\0" in head:
            raise SettingsError(f"disk: directory should be absolute, without '..' and zeros: disk={shown(text)}")
        return cls(Path(head), size)


class Disk:
    """The folder from `open` to `close`, locked: two daemons would write over each other's files."""

    def __init__(self, spec: DiskSpec, log: Any) -> None:
        self.path = spec.path
        self._size_bytes, self._log = spec.size_bytes or 0, log
        self._fd = -1
        self.watch: DiskWatch | None = None
        self._failing = False  # as the log knows it

    def open(self) -> None:
        """Lock the folder. Raises EmbeddedError when another daemon has it, and SettingsError."""
        self._fd = open_folder(self.path, self._log)
        try:
            if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it must be readable and writable")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            room = room_bytes(self.path, self._size_bytes)
        except BlockingIOError:
            self.close()
            raise EmbeddedError(f"disk: another daemon uses it: disk={str(self.path)!r}") from None
        except OSError as error:
            self.close()
            raise SettingsError(f"disk: cannot be used: {error.strerror}: disk={str(self.path)!r}") from None
        if room < self._size_bytes:
            self._log.warning("disk.small", disk_bytes=self._size_bytes, room_bytes=room)

    def start_watch(self) -> None:
        self.watch = DiskWatch(self.path, self._fd)

    def close(self) -> None:
        """Idempotent."""
        if self.watch is not None:
            self.watch.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def fault(self) -> str:
        """Why nothing can be kept on disk, in one line; empty while it can."""
        return self.watch.fault if self.watch is not None else ""

    def tick(self) -> None:
        """Log when the disk fails, and when it is well again."""
        if bool(fault := self.fault) != self._failing:
            self._failing = not self._failing
            if fault:
                self._log.warning("disk.failing", error=fault)
            else:
                self._log.info("disk.recovered")

    def environment(self) -> dict[str, str]:
        """Return the variables that Mooncake reads."""
        found = {
            "STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
            "BUCKET_KEYS_LIMIT": "1",
            "BUCKET_EVICTION_POLICY": "lru",
            "HEARTBEAT_INTERVAL_SECONDS": "1",
            "LOCAL_BUFFER_SIZE_BYTES": str(DISK_BUFFER_BYTES),
        }
        if self._size_bytes:
            # MAX_TOTAL_SIZE counts values and makes Mooncake evict from 90 % down to 80 %; MAX_PHYSICAL_BYTES counts
            # the blocks that the files take (each value also has a .meta file), and a write above it evicts first.
            # Mooncake looks at the files twice a second, and writes in between come on top: hence the margin.
            found["BUCKET_MAX_TOTAL_SIZE"] = found["TOTAL_SIZE_LIMIT_BYTES"] = str(self._size_bytes)
            found["BUCKET_MAX_PHYSICAL_BYTES"] = str(self._size_bytes * 9 // 10)
        return {f"MOONCAKE_OFFLOAD_{name}": value for name, value in found.items()}
