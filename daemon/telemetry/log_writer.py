"""Writes log lines to a pipe, a terminal or a socket without ever waiting for its reader.

A reader that stalls must not stop the main loop.  So the writer asks poll first, and writes at most PIPE_BUF bytes,
which a writable pipe takes at once.  Lines wait in memory up to a bound; beyond it they are lost and counted.  Files
lie behind a pipe (streams.py).
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
    """Any thread may call. Lines keep their order."""

    def __init__(self, fd: int, limit_bytes: int = LIMIT_BYTES) -> None:
        self._fd = fd
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._waiting = 0
        self.lost_lines = 0
        self._reported_lost = 0  # of these, by take_lost()
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
            if not self._lines or time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def take_lost(self) -> int:
        """Return how many lines were lost since the last call; 0 as long as lines wait, or when the reader is gone."""
        with self._lock:
            if self._lines or self._gone:
                return 0
            lost, self._reported_lost = self.lost_lines - self._reported_lost, self.lost_lines
        return lost

    def _write_waiting(self) -> None:
        while self._lines and self._poll.poll(0):
            line = self._lines.popleft()
            self._waiting -= len(line)
            try:
                count = os.write(self._fd, line[:PIECE_BYTES])
            except BlockingIOError:
                count = 0
            except OSError:  # the reader is gone for good
                self._gone = True
                self._lines.clear()
                self._waiting = 0
                return
            if count < len(line):
                self._lines.appendleft(line[count:])
                self._waiting += len(line) - count
                if count == 0:
                    return
