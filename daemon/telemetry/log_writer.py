"""Writes log lines to a pipe, a terminal or a socket without ever waiting for its reader.

A reader that stalls and a terminal that is stopped must not stop the main loop.  A write is made only when poll says
that it will not block, and of no more than PIPE_BUF bytes, which a pipe that is writable takes at once.  Lines wait in
memory up to a bound; beyond it they are lost and counted.  Files are written behind a pipe (streams.py).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque

LIMIT_BYTES = 4 << 20
PIECE_BYTES = select.PIPE_BUF


class LogWriter:
    """Any thread may call it. Lines keep their order."""

    def __init__(self, fd: int, limit_bytes: int = LIMIT_BYTES) -> None:
        self._fd = fd
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._waiting = 0
        self.lost_lines = 0
        self._told_lost = 0  # of these, those that take_lost() gave
        self._gone = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, line: str) -> None:
        """Write one line, or keep it until there is room, or lose it."""
        data = line.encode(errors="replace") + b"\n"
        with self._lock:
            if self._gone:
                return
            if self._waiting + len(data) > self._limit:
                self.lost_lines += 1
            else:
                self._lines.append(data)
                self._waiting += len(data)
            self._write_waiting()

    def tick(self) -> None:
        """Write what waits, as far as it goes at once."""
        with self._lock:
            self._write_waiting()

    def drain(self, timeout_s: float) -> None:
        """Write what waits, for `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.tick()
            if not self._lines or time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def take_lost(self) -> int:
        """How many lines were lost since the last call, once others get through again; 0 when nobody will read it."""
        with self._lock:
            if self._lines or self._gone:
                return 0
            lost, self._told_lost = self.lost_lines - self._told_lost, self.lost_lines
        return lost

    def _write_waiting(self) -> None:
        while self._lines and self._poll.poll(0):
            line = self._lines.popleft()
            self._waiting -= len(line)
            try:
                count = os.write(self._fd, line[:PIECE_BYTES])
            except BlockingIOError:
                count = 0
            except OSError:  # the reader left, and nobody else can come
                self._gone = True
                self._lines.clear()
                self._waiting = 0
                return
            if count < len(line):
                self._lines.appendleft(line[count:])
                self._waiting += len(line) - count
                if count == 0:
                    return
