"""The daemon's picture of itself, in a named POSIX shared-memory segment: written once a second, and left by a death.

The daemon's HTTP server reads it there, and so do `status`, `health` and `top` as processes of their own: it answers
while the main loop hangs, and after the daemon died.  It has no request ids, and says no more than /metrics does.

    byte 0   magic and version
         8   sequence: the area that is whole now is number % 2
        16   beat of the main loop, CLOCK_MONOTONIC, ns
        64   two areas: bytes of the status (8), the status as JSON

The writer fills the area that is not shown, and then shows it by the sequence number.  A reader that finds another
number after its copy reads again.  Nobody maps the segment: a write without room is an error and no signal, and so is a
read of one that was cut.  The writer holds a lock (flock) on it: the kernel ends that when the process ends, however it
does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .health import DaemonHealth, judge

MAGIC = b"kvpbord2"
SEQUENCE_AT, BEAT_AT = 8, 16
AREAS_AT = 64
STATUS_BYTES = 256 << 10
_WORD = struct.Struct("<Q")
AREA_BYTES = _WORD.size + STATUS_BYTES
SIZE = AREAS_AT + 2 * AREA_BYTES
MODE = 0o640
_TRIES = 100


def name_of(socket: str | os.PathLike[str]) -> str:
    """Return the name of the segment of the daemon behind this control socket."""
    return f"/kvprefetchd-{hashlib.sha256(os.fsencode(os.path.realpath(socket))).hexdigest()[:16]}"


@dataclass(frozen=True)
class Picture:
    """What the daemon showed last, and whether it lives. `status` is that of control/report.py."""

    status: Mapping[str, Any]
    beat_ns: int
    alive: bool = True
    uid: int = -1  # of the daemon's user, where another process reads

    def health(self, now_ns: int | None = None) -> DaemonHealth:
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        return judge(self.status, self.beat_ns, now_ns, alive=self.alive)


class Board:
    """The writer. The main thread beats and writes, any thread looks.

    A segment that an earlier daemon left under this name is replaced: there is one daemon at a control socket.  Where
    no segment can be had, such as with /dev/shm full, or because another user has the name, `fault` says why, and the
    picture is seen in this process alone.
    """

    def __init__(self, socket: str, gid: int = -1) -> None:
        self._gid, self._number, self.fault = gid, 0, ""
        self.name = name_of(socket)  # "" where the segment has none
        try:
            self._fd = self._create()
        except (ImportError, OSError, ValueError) as error:
            self.name, self.fault = "", str(error)
            self._fd = os.memfd_create("kvprefetch-picture", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, SIZE)
        self.beat(time.monotonic_ns())
        self.write({})
        os.pwrite(self._fd, MAGIC, 0)

    def _create(self, content: bytes = b"") -> int:
        """Return the descriptor of a new segment; a failure leaves none. Raises ImportError, OSError, ValueError."""
        import posix_ipc  # not in an engine's environment, where `status` asks the socket

        try:
            with contextlib.suppress(posix_ipc.ExistentialError):
                posix_ipc.unlink_shared_memory(self.name)
            fd = int(posix_ipc.SharedMemory(self.name, posix_ipc.O_CREX, mode=0o600, size=SIZE).fd)
        except posix_ipc.Error as error:
            raise OSError(f"{error}: name={self.name}") from None
        try:
            os.set_inheritable(fd, False)
            os.posix_fallocate(fd, 0, SIZE)
            os.pwrite(fd, content, 0)
            fcntl.flock(fd, fcntl.LOCK_EX)  # before others may open it
            if self._gid >= 0:
                os.fchown(fd, -1, self._gid)
            os.fchmod(fd, MODE)
        except BaseException:
            posix_ipc.unlink_shared_memory(self.name)
            os.close(fd)
            raise
        return fd

    @property
    def there(self) -> bool:
        """Whether the name is that of our segment still; a picture without a name misses none."""
        if not self.name:
            return True
        import posix_ipc

        try:
            fd = posix_ipc.SharedMemory(self.name, read_only=True).fd
        except (posix_ipc.Error, OSError):
            return False
        try:
            return os.path.sameopenfile(fd, self._fd)
        finally:
            os.close(fd)

    def make_anew(self) -> None:
        """Show the same picture in another segment, under the name. Raises OSError."""
        fd = self._create(os.pread(self._fd, SIZE, 0))
        os.dup2(fd, self._fd, inheritable=False)  # for threads that read: they find this segment or the one before
        os.close(fd)

    def beat(self, now_ns: int) -> None:
        os.pwrite(self._fd, _WORD.pack(now_ns), BEAT_AT)

    def write(self, status: Mapping[str, Any]) -> None:
        """Show this status; one beyond the bound is left out."""
        data = json.dumps(status).encode()
        data = data if len(data) <= STATUS_BYTES else b"{}"
        self._number += 1
        os.pwrite(self._fd, _WORD.pack(len(data)) + data, AREAS_AT + self._number % 2 * AREA_BYTES)
        os.pwrite(self._fd, _WORD.pack(self._number), SEQUENCE_AT)

    def look(self) -> Picture:
        return _copied(self._fd, alive=True)

    def close(self) -> None:
        """Remove the name, unless a later daemon has it; whoever has the segment open keeps it."""
        if self.name and self.there:
            import posix_ipc

            with contextlib.suppress(posix_ipc.Error, OSError):
                posix_ipc.unlink_shared_memory(self.name)
        self.name = ""


def read(socket: Path) -> Picture | None:
    """Return the picture of the daemon behind a control socket, dead or alive.

    None where there is none, where this user may not read it, or where another user than root, ours or the socket's
    owner made it.
    """
    try:
        import posix_ipc
    except ImportError:
        return None
    try:
        segment = posix_ipc.SharedMemory(name_of(socket), read_only=True)
    except (posix_ipc.Error, OSError):
        return None
    try:
        found = os.fstat(segment.fd)
        owners = {0, os.geteuid()}
        with contextlib.suppress(OSError):
            owners.add(os.stat(socket).st_uid)
        if found.st_size != SIZE or found.st_uid not in owners or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
        if os.pread(segment.fd, len(MAGIC), 0) != MAGIC:
            return None
        return _copied(segment.fd, alive=_locked(segment.fd), uid=found.st_uid)
    except (OSError, ValueError):
        return None
    finally:
        segment.close_fd()


def _locked(fd: int) -> bool:
    """Whether the writer lives."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _copied(fd: int, *, alive: bool, uid: int = -1) -> Picture:
    """Copy the area that is whole. Raises ValueError where the writer never leaves it in peace, or wrote no object."""
    for _ in range(_TRIES):
        number = _word(fd, SEQUENCE_AT)
        at = AREAS_AT + number % 2 * AREA_BYTES
        status = os.pread(fd, min(_word(fd, at), STATUS_BYTES), at + _WORD.size)
        if _word(fd, SEQUENCE_AT) == number:
            try:
                found = json.loads(status)
            except RecursionError as error:
                raise ValueError("the picture is no status") from error
            if not isinstance(found, dict):
                raise ValueError("the picture is no status")
            return Picture(found, _word(fd, BEAT_AT), alive, uid)
    raise ValueError("the picture changes all the time")


def _word(fd: int, at: int) -> int:
    data = os.pread(fd, _WORD.size, at)
    if len(data) != _WORD.size:
        raise ValueError("the picture was cut")
    return int(_WORD.unpack(data)[0])
