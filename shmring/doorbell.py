"""The doorbell: one eventfd per engine; the producer rings it only while the consumer sleeps."""

from __future__ import annotations

import contextlib
import errno
import os


class Doorbell:
    """One eventfd. The producer rings it; the consumer waits for it in its own epoll and clears it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> Doorbell:
        return cls(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def ring(self) -> None:
        """Make one system call. A full counter means that the bell rings already."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Clear without waiting, even after the producer took O_NONBLOCK from the open file that both share."""
        with contextlib.suppress(BlockingIOError):
            try:
                os.preadv(self.fd, [bytearray(8)], -1, os.RWF_NOWAIT)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                os.eventfd_read(self.fd)  # before Linux 5.8 an eventfd has no RWF_NOWAIT

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
