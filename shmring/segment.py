"""Anonymous shared-memory segments: created, unlinked at once, reserved, and handed over as file descriptors."""

from __future__ import annotations

import mmap
import os
import uuid

import posix_ipc

from .errors import SegmentError


class Segment:
    """A mapped shared-memory segment. `buffer` is its memory; `fd` may be sent to another process (SCM_RIGHTS).

    The name is unlinked before anyone else can see it, so a SIGKILL of either side at any time leaves nothing in /dev/shm.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = True) -> None:
        """Map `size_bytes` of an open descriptor, which the segment owns from now on. Raises SegmentError."""
        self.fd = fd
        self.size_bytes = size_bytes
        try:
            actual = os.fstat(fd).st_size
            if actual < size_bytes:
                # Mapping past the end of a tmpfs file is a SIGBUS at the first access: refuse it here.
                raise SegmentError(f"segment is smaller than announced: bytes={actual} announced={size_bytes}")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection)
        except BaseException:
            os.close(fd)
            raise
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """Create, unlink and reserve a zeroed segment. A full /dev/shm is a SegmentError here, not a SIGBUS later."""
        name = f"/kvprefetch-{uuid.uuid4().hex}"
        try:
            shm = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
        except OSError as error:
            raise SegmentError(f"cannot create shared memory: {error}") from error
        posix_ipc.unlink_shared_memory(name)
        try:
            os.set_inheritable(shm.fd, False)
            os.posix_fallocate(shm.fd, 0, size_bytes)
        except OSError as error:
            os.close(shm.fd)
            raise SegmentError(
                f"cannot reserve shared memory: bytes={size_bytes}: {error.strerror} (is /dev/shm large enough?)"
            ) from error
        return cls(shm.fd, size_bytes)

    def read_only_fd(self) -> int:
        """A new descriptor of the same memory that cannot be mapped writable; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap and close. Views still exported (numpy, torch) keep the mapping until they are gone; the fd is closed."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            # A numpy or torch view still stands on this memory; the mapping goes when the last view does.
            pass
