"""The doorbell: one eventfd per engine, rung only when the consumer said that it sleeps."""

from __future__ import annotations

import errno
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
        """Never waits, even where the producer, whose descriptor is of the same open file, cleared its O_NONBLOCK."""
        try:
            os.preadv(self.fd, [bytearray(8)], -1, os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._clear_on_an_old_kernel()

    def _clear_on_an_old_kernel(self) -> None:
        """Before Linux 5.8, which knows no RWF_NOWAIT for an eventfd."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
