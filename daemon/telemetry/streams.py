"""Keeps writes to standard output and standard error from waiting: for a pipe, a terminal, a socket or a file.

A pipe or a terminal is opened again without blocking.  For a file that does not help: a write waits while the disk
stands still.  So a thread of its own writes to the file, behind a pipe (docs/adr/0120).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import select
import stat
import sys
import threading
import time

from .reader import JOURNAL

PIECE_BYTES = 1 << 16
LIMIT_BYTES = 4 << 20  # of lines that wait for their reader
RETRY_S = 0.1
SETTLE_S = 2.0

_files: dict[tuple[int, int], LogFile] = {}  # by device and inode at the start: both streams may lead to one
_streams: list[int] = []  # descriptors that lead to their pipes now
_ending = threading.Event()


def never_wait(fd: int, *, ours: bool = False) -> str:
    """Let a write to `fd` fail at once where it would wait. Mooncake's calls write to standard error, too.

    `fd` gets a description of its own, so that other writers do not notice.  A socket cannot be opened again, and is
    changed itself if it is ours alone (`ours`).  A stream that cannot be opened for lack of rights stays as it is.
    Return a file's path, else a word for what `fd` leads to.
    """
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode):
        key = (status.st_dev, status.st_ino)
        if key not in _files:
            _files[key] = LogFile(fd)
        os.dup2(_files[key].pipe, fd, inheritable=True)
        _streams.append(fd)
        return _files[key].path or "a file without a name"
    if stat.S_ISSOCK(status.st_mode):
        if ours:
            os.set_blocking(fd, False)
        return JOURNAL if ours else "a socket"
    if terminal := os.isatty(fd) or stat.S_ISFIFO(status.st_mode):
        with contextlib.suppress(OSError):
            again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            os.dup2(again, fd, inheritable=True)
            os.close(again)
    return "a terminal" if os.isatty(fd) else "a pipe" if terminal else "nowhere"


def _appending(fd: int) -> int:
    """Open its file once more, for appending: one that is cut meanwhile (logrotate's copytruncate) goes on at 0."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # no right to open it: then all who have this description append
        again = os.dup(fd)
        fcntl.fcntl(again, fcntl.F_SETFL, fcntl.fcntl(again, fcntl.F_GETFL) | os.O_APPEND)
        return again


def open_again() -> None:
    """Go on in the files that have the paths of the start now: call it once the log was rotated."""
    for file in _files.values():
        file.again = True


def take_faults() -> list[str]:
    """Return why files could not be opened again, each reason once."""
    faults = [file.fault for file in _files.values() if file.fault]
    for file in _files.values():
        file.fault = ""
    return faults


def settle(timeout_s: float = SETTLE_S) -> None:
    """Wait until the files have all that this process wrote, for `timeout_s` at most. Call it last of all."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if not _files:
        return
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (*_streams, *(file.pipe for file in _files.values())):
        os.dup2(null, fd)  # closes the pipe's last end: the writer reads its rest, then the end of file
    _ending.set()
    deadline = time.monotonic() + timeout_s
    for file in _files.values():
        file.thread.join(max(0.0, deadline - time.monotonic()))


class LogFile:
    """A file behind a pipe; a thread of its own copies. `path`: its name at the start, "" where it has none.

    After `again` was set, the next line goes to the file that has the path then.
    """

    def __init__(self, fd: int) -> None:
        self.path, self.again, self.fault = _name_of(fd), False, ""
        self._file = _appending(fd)
        read, self.pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.pipe, False)
        if not _files:
            atexit.register(settle)
        self.thread = threading.Thread(target=self._copy, args=(read,), name="log-file", daemon=True)
        self.thread.start()

    def _copy(self, pipe: int) -> None:
        """Copy until nobody has the pipe's other end any more; change the file between two lines."""
        whole = True
        while data := os.read(pipe, PIECE_BYTES):
            if self.again and (whole or b"\n" in data):
                end = 0 if whole else data.index(b"\n") + 1
                self._write(data[:end])
                self._open()
                data = data[end:]
            whole = data.endswith(b"\n") if data else True
            self._write(data)

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except OSError:  # a full disk: try again until the daemon ends, as if it stood still
                if _ending.wait(RETRY_S):
                    return
                if self.again:  # the room may be another file's, or what the old one had
                    self._open()

    def _open(self) -> None:
        self.again = False
        if not self.path:
            return
        try:
            new = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        except OSError as error:
            self.fault = f"{error.strerror}: path={self.path!r}"
            return
        os.dup2(new, self._file, inheritable=False)
        os.close(new)


def _name_of(fd: int) -> str:
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return path if os.path.samestat(os.stat(path), os.fstat(fd)) else ""
    except OSError:
        return ""


class LogWriter:
    """Writes lines to a pipe, a terminal or a socket, in order, and never waits for the reader. Any thread may call.

    It asks poll first, and writes at most PIPE_BUF bytes, which a writable pipe takes at once.  Lines wait in memory up
    to a bound; beyond it they are lost and counted.
    """

    def __init__(self, fd: int, limit_bytes: int = LIMIT_BYTES) -> None:
        self._fd = fd
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._waiting = bytearray()  # lines, the first one perhaps written in part
        self.dropped_lines = 0
        self._reported_lost = 0  # of these, by take_lost()
        self._gone = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, line: str) -> None:
        """Write one line, or keep it until there is room, or lose it."""
        data = line.encode(errors="replace") + b"\n"
        with self._lock:
            if self._gone or len(self._waiting) + len(data) > self._limit:
                self.dropped_lines += 1
            else:
                self._waiting += data
            self._write_waiting()

    debug = info = warning = error = msg = write  # structlog calls the one of the line's level

    def tick(self) -> None:
        """Write the waiting lines, as far as they go at once."""
        with self._lock:
            self._write_waiting()

    def drain(self, timeout_s: float) -> None:
        """Write the waiting lines, for `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.tick()
            if not self._waiting or time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def take_lost(self) -> int:
        """Return how many lines were lost since the last call; 0 as long as lines wait, or when the reader is gone."""
        with self._lock:
            if self._waiting or self._gone:
                return 0
            lost, self._reported_lost = self.dropped_lines - self._reported_lost, self.dropped_lines
        return lost

    def _write_waiting(self) -> None:
        while self._waiting and self._poll.poll(0):
            # Whole lines where they fit: another writer's would come between the parts of one.
            end = self._waiting.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
            try:
                count = os.write(self._fd, self._waiting[:end])
            except BlockingIOError:
                return
            except OSError:  # the reader is gone for good
                self._gone = True
                self.dropped_lines += self._waiting.count(b"\n")
                count = len(self._waiting)
            del self._waiting[:count]
