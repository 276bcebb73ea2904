"""The embedded store's disk: its folder and size, the lock on the folder, and Mooncake's settings for it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...shmring.wire.checks import shown
from ...shmring.wire.control_socket import user_folder
from ..config.model import ConfigError
from ..config.sizes import parse_size, whole_mib
from .disk_watch import DiskWatch, room_bytes
from .errors import StoreError

MIN_DISK_BYTES, MAX_DISK_BYTES = 16 << 20, 1 << 50
MIN_AUTO_BYTES = 1 << 30
DISK_BUFFER_BYTES = 256 << 20  # all that Mooncake reads from a disk at a time goes through
LOOK_MS = range(500, 60_000)  # Mooncake's default, and the longest
BLOCKS_BYTES_S = 200_000_000  # of files that hold small values, at the rate at which Mooncake writes them
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class DiskSpec:
    """A directory for the disk and the bytes that values may take there; None is no bound of its own."""

    path: Path
    size_bytes: int | None

    @classmethod
    def parse(cls, text: str) -> DiskSpec:
        """From "DIR" or "DIR:SIZE", such as /var/x:20GiB. The directory must be absolute. Raises ConfigError."""
        head, colon, tail = text.rpartition(":")
        if not colon or "/" in tail:
            head, tail = text, ""
        size = None
        if colon and head != text:
            try:
                size = parse_size(tail)
            except ValueError as error:
                raise ConfigError(f"disk: {error}: disk={shown(text)}") from None
            if not MIN_DISK_BYTES <= size <= MAX_DISK_BYTES:
                raise ConfigError(f"disk: size should be 16MiB to 1024TiB: disk={shown(text)}")
        if not head.startswith("/") or ".." in Path(head).parts or "\0" in head:
            raise ConfigError(f"disk: directory should be absolute, without '..' and zeros: disk={shown(text)}")
        return cls(Path(head), size)


@functools.cache  # a running daemon keeps its disk, whatever is free at a reload
def automatic_disk() -> str | None:
    """Return `disk = "auto"`, as DIR:SIZE: in the user's data folder, with a fifth of what is free there and what its
    values take. None where no folder can be made, or a fifth is less than MIN_AUTO_BYTES."""
    path = Path(user_folder("DATA"))
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        there = path if path.exists() else path.parent
        if not os.access(there, os.W_OK | os.X_OK):
            return None
        size_bytes = room_bytes(there, MAX_DISK_BYTES, occupied=there == path) // 5
    except OSError:
        return None
    return f"{path}:{whole_mib(size_bytes)}" if size_bytes >= MIN_AUTO_BYTES else None


class Disk:
    """The folder until `close`, locked (two daemons would write over each other's files) and watched."""

    def __init__(self, spec: DiskSpec, log: Any) -> None:
        """Open and lock the folder. Raises StoreError when another daemon has it, and ConfigError."""
        self.path = spec.path
        self._size_bytes, self._log = spec.size_bytes or 0, log
        self._failing = False  # as the log knows it
        self._fd = open_folder(self.path, log)
        try:
            if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it must be readable and writable")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            room = room_bytes(self.path, self._size_bytes)
        except BlockingIOError:
            os.close(self._fd)
            raise StoreError(f"disk: another daemon uses it: disk={str(self.path)!r}") from None
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(f"disk: cannot be used: {error.strerror}: disk={str(self.path)!r}") from None
        if room < self._size_bytes:
            log.warning("disk.small", disk_bytes=self._size_bytes, room_bytes=room)
        self.values = files_in(self._fd) // 2  # each has two files
        self.watch = DiskWatch(self.path, self._fd)

    def close(self) -> None:
        self.watch.close()
        os.close(self._fd)

    def tick(self) -> None:
        """Log when the disk fails, and when it is well again."""
        if bool(fault := self.watch.fault) != self._failing:
            self._failing = not self._failing
            if fault:
                self._log.warning("disk.failing", error=fault)
            else:
                self._log.info("disk.recovered")

    def environment(self) -> dict[str, str]:
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
            # Mooncake looks at all files for that, and writes in between come on top: hence the margin, and a pause
            # in which small values, whose blocks the first bound misses, can hardly use it up.
            found["BUCKET_MAX_TOTAL_SIZE"] = found["TOTAL_SIZE_LIMIT_BYTES"] = str(self._size_bytes)
            found["BUCKET_MAX_PHYSICAL_BYTES"] = str(self._size_bytes * 9 // 10)
            found["BUCKET_DISK_SCAN_CACHE_MS"] = str(look_ms(self._size_bytes))
        return {f"MOONCAKE_OFFLOAD_{name}": value for name, value in found.items()}


def look_ms(size_bytes: int) -> int:
    """Return the pause between two looks at all files of a disk of this size.

    A look at 120,000 files takes a third of a second, in which nothing is written: each half second would be too often.
    """
    margin_ms = size_bytes // 10 * 1000 // BLOCKS_BYTES_S
    return min(max(LOOK_MS.start, margin_ms), LOOK_MS.stop)


def open_folder(path: Path, log: Any) -> int:
    """Return a descriptor of the folder, made if it is missing and closed to other users: values are made of prompts.

    A missing parent stays missing: it may be a mount that failed, and values would fill the file system below it.
    A folder that others could write to must be empty: its content may be theirs.  Raises ConfigError.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _close_to_others(fd, path, log)
        except BaseException:
            os.close(fd)
            raise
        return fd
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.ENOENT:
            why = "the folder above it is not there; make it, or mount it"
        elif error.errno == errno.EACCES:
            why += f"; make a folder that belongs to the daemon's user (uid={os.geteuid()}), or name another one"
        raise ConfigError(f"disk: cannot be used: {why}: disk={str(path)!r}") from None


def _close_to_others(fd: int, path: Path, log: Any) -> None:
    found = os.fstat(fd)
    files = files_in(fd)  # raises for a folder that cannot be read to its end; Mooncake's set-up would not
    check_folder(path, found, files)
    mode = stat.S_IMODE(found.st_mode)
    if not mode & _OTHERS and mode & stat.S_IRWXU == stat.S_IRWXU:
        return
    os.fchmod(fd, 0o700)
    log.warning("disk.mended", folder_mode=f"{mode:04o}", files=files)


def files_in(folder: int | Path) -> int:
    """Count the files of a folder, of which there may be millions. Raises OSError."""
    with os.scandir(folder) as found:
        return sum(1 for _ in found)


def check_folder(path: Path, found: os.stat_result, files: int) -> None:
    """Raise ConfigError for a folder with so many files in it that the daemon does not take."""
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"disk: the folder belongs to another user: disk={str(path)!r} uid={found.st_uid} daemon_uid={os.geteuid()}"
            ": chown it to the daemon's user, or name a new folder in one that this user may write to"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & _OTHERS_WRITE and files:
        raise ConfigError(
            f"disk: others may write to the folder, so its values may be anybody's: disk={str(path)!r} mode={mode:04o}"
            ": empty it, or chmod 700 it if you trust what it holds"
        )
