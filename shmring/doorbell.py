"""The doorbell: one eventfd per engine, rung only when the consumer said that it sleeps."""

from __future__ import annotations

import os


class Doorbell:
    """One eventfd. The producer rings it, the consumer waits for it in its own epoll and clears it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Doorbell:
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def ring(self) -> None:
        """One system call. A full counter means the bell is ringing already."""
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            pass

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
