"""Shared-memory segments: anonymous, reserved, sealed, and handed over as file descriptors.

A segment is a memfd: a SIGKILL leaves no name in /dev/shm, and the size of /dev/shm (64 MB in a default container)
does not bound it.  A mapper checks the seal against shrinking: an access to a truncated mapping is a SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

from .errors import SegmentError

POPULATE_BYTES = 128 << 20
RELEASE_BYTES = 16 << 20  # of a large mapping at a time, about a millisecond
MFD_NOEXEC_SEAL = 8  # linux/memfd.h; with vm.memfd_noexec=2 nothing else is allowed
MPOL_PREFERRED = 1  # linux/mempolicy.h
NUMA_NODES = 1024
MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14
_madvise = ctypes.CDLL(None).madvise  # mmap.madvise would hold the interpreter's lock
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Segment:
    """A mapped segment. `buffer` is its memory; `fd` may be sent to another process (SCM_RIGHTS)."""

    def __init__(self, fd: int, size_bytes: int, *, populate: bool = True) -> None:
        """Map `size_bytes` of an open descriptor, and own the descriptor from now on. Raises SegmentError.

        `populate`: a segment of up to POPULATE_BYTES gets its pages mapped at once.
        """
        self.fd = fd
        self.size_bytes = size_bytes
        try:
            if not _seals(fd) & fcntl.F_SEAL_SHRINK:  # first: a sealed size cannot change any more
                raise SegmentError(f"segment could be truncated under us: seals={_seals(fd):#x} needed=F_SEAL_SHRINK")
            actual = os.fstat(fd).st_size
            if actual < size_bytes:
                raise SegmentError(f"segment is smaller than announced: bytes={actual} announced={size_bytes}")
            # Map a control segment's pages at once: a page fault costs more than the push that meets it.
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate and size_bytes <= POPULATE_BYTES else 0)
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
        # The array object only serves to learn the address; the segment keeps the memory mapped.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """Create and reserve a zeroed segment of mode 0600. Missing room is a SegmentError here, not a SIGBUS later."""
        segment = cls.sparse(size_bytes)
        try:
            segment.fill(0, size_bytes)
        except BaseException:
            segment.close()
            raise
        return segment

    @classmethod
    def sparse(cls, size_bytes: int) -> Segment:
        """Create a zeroed segment of mode 0600 without memory; `fill` reserves it. Raises SegmentError."""
        if size_bytes <= 0:
            raise SegmentError(f"segment size must be positive: bytes={size_bytes}")
        fd = _memfd()
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise SegmentError(f"cannot size shared memory: bytes={size_bytes}: {error.strerror}") from error
        segment = cls(fd, size_bytes, populate=False)
        segment._advise(0, size_bytes, mmap.MADV_HUGEPAGE)  # a kernel without huge pages refuses it
        return segment

    def prefer(self, node: int) -> bool:
        """Take pages that are filled from now on from this NUMA node, while it has some; False where that is refused.

        libnuma has the call; Mooncake needs that library, so a daemon has it.
        """
        nodes = (ctypes.c_ulong * (NUMA_NODES // 64))()
        nodes[node // 64] = 1 << node % 64
        try:
            mbind = ctypes.CDLL("libnuma.so.1").mbind
        except OSError:
            return False
        start, length = ctypes.c_void_p(self.address), ctypes.c_ulong(self.size_bytes)
        return bool(mbind(start, length, MPOL_PREFERRED, nodes, ctypes.c_ulong(NUMA_NODES), 0) == 0)

    def fill(self, start: int, stop: int) -> None:
        """Reserve the memory of bytes [start, stop) and map its pages, without the interpreter's lock.

        `start` is a multiple of the page size.  The kernel's lock of this process's memory map is held meanwhile, so
        large segments are filled in slices.  Raises SegmentError where memory is missing.
        """
        # First, because a page fault gets a huge page where the kernel gives them on request.  The second call finds
        # the memory there, or says what is missing; on an old kernel it does all.
        self._advise(start, stop - start, MADV_POPULATE_WRITE)
        try:
            os.posix_fallocate(self.fd, start, stop - start)
        except OSError as error:
            raise SegmentError(
                f"cannot reserve shared memory: bytes={self.size_bytes}: {error.strerror} (is there enough of it?)"
            ) from error

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
            if not self._advise(start, min(RELEASE_BYTES, self.size_bytes - start), mmap.MADV_DONTNEED):
                return  # memory that is locked (mlockall) cannot be emptied in pieces

    def _advise(self, start: int, length: int, advice: int) -> bool:
        return bool(_madvise(self.address + start, length, advice) == 0)


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
