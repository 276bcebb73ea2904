"""The process's signals: SIGTERM and SIGINT stop the daemon, SIGHUP reloads its configuration."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType


class Signals:
    """Notes signals for the loop. A handler only sets a field: it may run in the middle of a log line."""

    def __init__(self) -> None:
        self.stop = 0  # the signal that stops the daemon
        self.reload = False
        self.fd = -1  # readable after a signal

    def install(self, epoll: select.epoll) -> None:
        """Handle signals from now on, and let them wake `epoll`. Call it on the main thread."""
        self.fd, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in handled:
            signal.signal(number, self.note)
        # Deliver a SIGHUP that came during the start; the process that started this one may have blocked the others.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        epoll.register(self.fd, select.EPOLLIN)

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        if number == signal.SIGHUP:
            self.reload = True
        else:
            self.stop = number

    def clear(self) -> None:
        """Make `fd` quiet again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 512)
