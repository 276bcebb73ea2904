"""Writes log lines to a descriptor without ever waiting for who reads it.

A pipe whose reader stalls, a terminal that is stopped, a full disk: none of them may stop the main loop or end the
daemon.  A write is made only when poll says that it will not block, and of no more than PIPE_BUF bytes, which a pipe
that is writable takes at once.  Lines wait in memory up to a bound; beyond it, and when a write fails, they are lost
and counted.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import time
from collections import deque

LIMIT_BYTES = 4 << 20
PIECE_BYTES = select.PIPE_BUF


def never_wait(fd: int, *, ours: bool = False) -> None:
    """Let writes to a pipe or terminal fail at once where they would wait: Mooncake writes to standard error from the
    middle of its calls, set-up and close included, and a reader that stalls would hold them up for good.

    `fd` gets a description of its own, so that who else writes there does not notice.  A socket cannot be opened again:
    it is changed itself, if nobody else has it (`ours`). What cannot be opened again for lack of rights stays as it is.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode) and ours:
        os.set_blocking(fd, False)
    elif stat.S_ISFIFO(mode) or os.isatty(fd):
        with contextlib.suppress(OSError):
            again = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            os.dup2(again, fd, inheritable=True)
            os.close(again)


class LogWriter:
    """Any thread may call it. Lines keep their order."""

    def __init__(self, fd: int, limit_bytes: int = LIMIT_BYTES) -> None:
        self._fd = fd
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._waiting = 0
        self._begun = False  # the first line was written in part
        self._torn = False  # such a line lost its rest: the next one begins on a line of its own
        self._lost = 0
        self._failing = self._gone = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, line: str) -> None:
        """Write one line, or keep it until there is room, or lose it."""
        data = line.encode(errors="replace") + b"\n"
        with self._lock:
            if self._gone:
                return
            if self._waiting + len(data) > self._limit:
                self._lost += 1
            else:
                self._lines.append(data)
                self._waiting += len(data)
            self._pump()

    def pump(self) -> None:
        """Write what waits, as far as it goes at once."""
        with self._lock:
            self._pump()

    def drain(self, timeout_s: float) -> None:
        """Write what waits, for `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.pump()
            if not self._lines or time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def take_lost(self) -> int:
        """How many lines were lost since the last call, once others get through again; 0 when nobody will read it."""
        with self._lock:
            if self._lines or self._failing or self._gone:
                return 0
            lost, self._lost = self._lost, 0
        return lost

    def _pump(self) -> None:
        while self._lines and self._poll.poll(0):
            line = self._lines.popleft()
            self._waiting -= len(line)
            begin = b"\n" if self._torn else b""
            try:
                count = os.write(self._fd, (begin + line)[:PIECE_BYTES])
            except BlockingIOError:
                count = 0
            except BrokenPipeError:  # the reader left, and nobody else can come
                self._gone = True
                self._lines.clear()
                self._waiting = 0
                return
            except OSError:
                self._lost += 1
                self._torn, self._begun, self._failing = self._torn or self._begun, False, True
                continue
            if count > 0:
                self._torn = False
                count -= len(begin)
            self._failing = self._failing and count == 0
            self._begun = count < len(line) and (self._begun or count > 0)
            if count < len(line):
                self._lines.appendleft(line[count:])
                self._waiting += len(line) - count
                if count == 0:
                    return
