"""Shared-memory segments: anonymous, reserved, sealed, and handed over as file descriptors.

A segment is a memfd: a SIGKILL leaves no name in /dev/shm, and the size of /dev/shm (64 MB in a default container)
does not bound it.  A mapper checks the seal against shrinking: an access to a truncated mapping is a SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time

from .errors import SegmentError

POPULATE_BYTES = 128 << 20
RELEASE_BYTES = 16 << 20  # of a large mapping at a time, about a millisecond
MFD_NOEXEC_SEAL = 8  # linux/memfd.h; with vm.memfd_noexec=2 nothing else is allowed


class Segment:
    """A mapped segment. `buffer` is its memory; `fd` may be sent to another process (SCM_RIGHTS)."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map `size_bytes` of an open descriptor, and own the descriptor from now on. Raises SegmentError."""
        self.fd = fd
        self.size_bytes = size_bytes
        try:
            if not _seals(fd) & fcntl.F_SEAL_SHRINK:  # first: a sealed size cannot change any more
                raise SegmentError(f"segment could be truncated under us: seals={_seals(fd):#x} needed=F_SEAL_SHRINK")
            actual = os.fstat(fd).st_size
            if actual < size_bytes:
                raise SegmentError(f"segment is smaller than announced: bytes={actual} announced={size_bytes}")
            # Map a control segment's pages at once: a page fault costs more than the push that meets it.
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if size_bytes <= POPULATE_BYTES else 0)
            try:
                self._map = mmap.mmap(fd, size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                raise SegmentError(
                    f"cannot map shared memory: bytes={size_bytes}: {error.strerror} (ulimit -v?)"
                ) from error
        except BaseException:
            os.close(fd)
            raise
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """Create and reserve a zeroed segment of mode 0600. Missing room is a SegmentError here, not a SIGBUS later."""
        if size_bytes <= 0:
            raise SegmentError(f"segment size must be positive: bytes={size_bytes}")
        fd = _memfd()
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise SegmentError(
                f"cannot reserve shared memory: bytes={size_bytes}: {error.strerror} (is there enough of it?)"
            ) from error
        return cls(fd, size_bytes)

    def close(self) -> bool:
        """Close the descriptor and unmap. Returns False while a view (NumPy, a slice) stands on it: call again then.

        Unmapping takes the kernel 50 ms per GiB.  So only this call unmaps, on the caller's thread and never with the
        last view; other threads of the process run meanwhile.
        """
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._map.closed:
            return True
        try:
            self.buffer.release()
            if self.size_bytes > POPULATE_BYTES:
                with contextlib.suppress(OSError):  # memory that is locked (mlockall) cannot be emptied in pieces
                    self._drop_pages()
            self._map.close()
        except BufferError:
            self.buffer = memoryview(self._map)
            return False
        return True

    def _drop_pages(self) -> None:
        """Empty the mapping piece by piece; the bytes stay in the file, where a view still finds them.

        One munmap of the whole would hold the lock of the memory map for 0.1 s per GiB, against every other thread.
        """
        for start in range(0, self.size_bytes, RELEASE_BYTES):
            self._map.madvise(mmap.MADV_DONTNEED, start, min(RELEASE_BYTES, self.size_bytes - start))
            time.sleep(0)  # madvise itself keeps the interpreter's lock


def _memfd() -> int:
    """Create a sealable memory file. Raises SegmentError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        try:
            return os.memfd_create("kvprefetch", flags | MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 6.3 does not know MFD_NOEXEC_SEAL
                raise
            return os.memfd_create("kvprefetch", flags)
    except OSError as error:
        raise SegmentError(
            f"cannot create shared memory: memfd_create: {error.strerror} (a seccomp filter?)"
        ) from error


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not a memory file
        return 0
