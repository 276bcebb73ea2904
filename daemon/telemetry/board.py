"""The daemon's picture of itself, in a named POSIX shared-memory segment: written once a second, and left by a death.

The daemon's HTTP server reads it there, and so do `status`, `health` and `top` as processes of their own: it answers
while the main loop hangs, and after the daemon died.  It has no request ids, and says no more than /metrics does.

    byte 0   magic and version
         8   sequence: the area that is whole now is number % 2
        16   beat of the main loop, CLOCK_MONOTONIC, ns
        64   two areas: bytes of the status (8), the status as JSON

The writer fills the area that is not shown, and then shows it by the sequence number (release; acquire for readers).  A
reader that finds another number after its copy reads again.  The writer holds a lock (flock) on the segment: the kernel
ends that when the process ends, however it does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...shmring._atomics import Words
from .health import Health, judge

MAGIC = b"kvpbord2"
SEQUENCE, BEAT = 1, 2  # words of 8 bytes
AREAS_AT = 64
STATUS_BYTES = 256 << 10
_HEAD = struct.Struct("<Q")
AREA_BYTES = _HEAD.size + STATUS_BYTES
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

    def health(self, now_ns: int | None = None) -> Health:
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        return judge(self.status, self.beat_ns, now_ns, alive=self.alive)


class Board:
    """The writer. The main thread beats and writes, any thread looks.

    A segment that an earlier daemon left under this name is replaced: there is one daemon at a control socket.  Where
    no segment can be had, such as without /dev/shm, or because another user has the name, `fault` says why, and the
    picture is seen in this process alone.
    """

    def __init__(self, socket: str, gid: int = -1) -> None:
        self._name, self._fd, self.fault = "", -1, ""
        try:
            self._fd = self._create(name_of(socket), gid)
            self._memory = mmap.mmap(self._fd, SIZE)
        except (ImportError, OSError, ValueError) as error:
            self.fault = str(error)
            self._memory = mmap.mmap(-1, SIZE)
        self._words = Words(self._memory)
        self.beat(time.monotonic_ns())
        self.write({})
        self._memory[: len(MAGIC)] = MAGIC

    def _create(self, name: str, gid: int) -> int:
        import posix_ipc  # not in an engine's environment, where `status` asks the socket

        try:
            with contextlib.suppress(posix_ipc.ExistentialError):
                posix_ipc.unlink_shared_memory(name)
            segment = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=MODE, size=SIZE)
        except posix_ipc.Error as error:
            raise OSError(f"{error}: name={name}") from None
        self._name = name
        os.set_inheritable(segment.fd, False)
        if gid >= 0:
            os.fchown(segment.fd, -1, gid)
        os.fchmod(segment.fd, MODE)  # the umask may have taken the group's right
        fcntl.flock(segment.fd, fcntl.LOCK_EX)
        return int(segment.fd)

    def beat(self, now_ns: int) -> None:
        self._words.store_release(BEAT, now_ns)

    @property
    def beat_ns(self) -> int:
        return self._words.load_acquire(BEAT)

    def write(self, status: Mapping[str, Any]) -> None:
        """Show this status; one beyond the bound is left out."""
        data = json.dumps(status).encode()
        data = data if len(data) <= STATUS_BYTES else b"{}"
        number = self._words.load_acquire(SEQUENCE) + 1
        at = AREAS_AT + number % 2 * AREA_BYTES
        _HEAD.pack_into(self._memory, at, len(data))
        self._memory[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        self._words.store_release(SEQUENCE, number)

    def look(self) -> Picture:
        return _copied(self._memory, self._words, alive=True)

    def close(self) -> None:
        """Remove the name; whoever has the segment open keeps it."""
        if self._name:
            import posix_ipc

            with contextlib.suppress(posix_ipc.ExistentialError):
                posix_ipc.unlink_shared_memory(self._name)
            self._name = ""


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
        with mmap.mmap(segment.fd, SIZE, prot=mmap.PROT_READ) as memory:
            if memory[: len(MAGIC)] != MAGIC:
                return None
            words = Words(memory, writable=False)
            try:
                picture = _copied(memory, words, alive=_locked(segment.fd))
            finally:
                words.release()
    except (OSError, ValueError):
        return None
    finally:
        segment.close_fd()
    return Picture(picture.status, picture.beat_ns, picture.alive, found.st_uid)


def _locked(fd: int) -> bool:
    """Whether the writer lives."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _copied(memory: mmap.mmap, words: Words, *, alive: bool) -> Picture:
    """Copy the area that is whole. Raises ValueError where the writer never leaves it in peace, or wrote no JSON."""
    for _ in range(_TRIES):
        number = words.load_acquire(SEQUENCE)
        at = AREAS_AT + number % 2 * AREA_BYTES
        (status_bytes,) = _HEAD.unpack_from(memory, at)
        status = memory[at + _HEAD.size : at + _HEAD.size + min(status_bytes, STATUS_BYTES)]
        if words.load_acquire(SEQUENCE) == number:
            return Picture(json.loads(status), words.load_acquire(BEAT), alive)
    raise ValueError("the picture changes all the time")
