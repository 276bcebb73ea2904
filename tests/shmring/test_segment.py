"""Segments: without a name, reserved, sealed, and of the size that was announced."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprefetch.shmring import segment as module
from kvprefetch.shmring.errors import SegmentError
from kvprefetch.shmring.segment import Segment


def online_nodes() -> list[int]:
    """Return this machine's NUMA nodes."""
    return sorted(int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*"))


def numa_line(segment: Segment) -> str:
    """Return what the kernel says of the segment's mapping."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line for line in lines if int(line.split()[0], 16) == segment.address)


def test_a_segment_is_zeroed_private_unnamed_and_of_its_size() -> None:
    before = {name for name in os.listdir("/dev/shm") if "kvprefetch" in name.replace("kvprefetchd-", "")}
    descriptors = len(os.listdir("/proc/self/fd"))
    segment = Segment.create(10_000)
    assert {name for name in os.listdir("/dev/shm") if "kvprefetch" in name.replace("kvprefetchd-", "")} == before
    status = os.fstat(segment.fd)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == len(segment.buffer) == 10_000
    assert status.st_blocks * 512 >= 10_000, "reserved, so that no first touch can fail"
    assert not os.get_inheritable(segment.fd)
    assert bytes(segment.buffer) == bytes(10_000)
    segment.close()
    assert segment.close(), "a second call does nothing"
    assert len(os.listdir("/proc/self/fd")) == descriptors


def any_advice_is_taken() -> bool:
    """QEMU's user mode takes each advice for a hint: it says yes to MADV_POPULATE_WRITE, and maps nothing."""
    with contextlib.suppress(OSError):
        mmap.mmap(-1, mmap.PAGESIZE).madvise(9999)
        return True
    return False


needs_advice = pytest.mark.skipif(any_advice_is_taken(), reason="this system takes any advice, and follows none")


def mapped_bytes(segment: Segment) -> int:
    inode = os.fstat(segment.fd).st_ino
    # By its name, too: files of other file systems may have the same inode number.
    [block] = re.split(rf" {inode} +/memfd:kvprefetch", Path("/proc/self/smaps").read_text())[1:]
    [kib] = re.findall(r"^Rss: +(\d+) kB", block.split("VmFlags")[0], re.MULTILINE)
    return int(kib) << 10


@needs_advice
def test_the_pages_of_a_control_segment_are_mapped_at_once() -> None:
    """A page fault costs more than the push that would meet it."""
    segment = Segment.create(1 << 20)
    assert mapped_bytes(segment) == 1 << 20
    segment.close()


@needs_advice
def test_a_sparse_segment_has_the_memory_of_the_slices_that_were_filled_and_their_pages_are_mapped() -> None:
    """A first write would meet a page fault otherwise, which costs more than the write."""
    segment = Segment.sparse(64 << 20)
    assert (os.fstat(segment.fd).st_blocks, mapped_bytes(segment)) == (0, 0)
    segment.fill(4 << 20, 12 << 20)
    assert os.fstat(segment.fd).st_blocks * 512 == mapped_bytes(segment) == 8 << 20
    assert bytes(segment.buffer[4 << 20 : 5 << 20]) == bytes(1 << 20)
    segment.close()


def test_memory_lies_in_huge_pages_where_the_kernel_gives_them_on_request() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not setting.exists() or not re.search(r"\[(always|within_size|advise|force)\]", setting.read_text()):
        pytest.skip("no huge pages for shared memory here (shmem_enabled)")
    segment = Segment.sparse(64 << 20)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    segment.fill(0, 64 << 20)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 1000, "16384 small ones"
    segment.close()


@pytest.mark.parametrize("view_of", [lambda buffer: buffer[:8], lambda buffer: np.frombuffer(buffer, np.uint8)])
def test_a_segment_stays_mapped_under_a_view_and_goes_with_the_next_close(view_of: Callable[[memoryview], Any]) -> None:
    """Never with the view: it may end on a thread that must not wait for the kernel."""
    maps = Path("/proc/self/maps").read_text().count("kvprefetch")
    segment = Segment.create(4096)
    view = view_of(segment.buffer)
    for _ in range(2):
        assert not segment.close()
        view[0] = 1
        assert bytes(view[:8]) == b"\1" + bytes(7)
    del view
    assert Path("/proc/self/maps").read_text().count("kvprefetch") == maps + 1
    assert segment.close()
    assert Path("/proc/self/maps").read_text().count("kvprefetch") == maps


def test_a_large_segment_is_emptied_piece_by_piece_and_keeps_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POPULATE_BYTES", 4096)
    monkeypatch.setattr(module, "RELEASE_BYTES", 1 << 20)
    segment = Segment.create(5 << 19)
    other = Segment(os.dup(segment.fd), segment.size_bytes)
    for offset in range(0, segment.size_bytes, 4096):
        segment.buffer[offset] = 1 + offset % 251
    view = segment.buffer[-1:]
    assert not segment.close()
    del view
    assert segment.close()
    assert all(other.buffer[offset] == 1 + offset % 251 for offset in range(0, other.size_bytes, 4096))
    assert other.close()


def test_a_large_segment_whose_memory_is_locked_is_unmapped_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after mlockall: the kernel refuses to empty locked memory in pieces, and no thread may end for it."""
    monkeypatch.setattr(module, "POPULATE_BYTES", 8192)
    segment = Segment.create(16384)
    address = ctypes.addressof(ctypes.c_char.from_buffer(segment.buffer))
    if ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(16384)):
        pytest.skip("no memory may be locked (ulimit -l)")
    assert segment.close()


def test_nobody_can_truncate_a_segment_under_the_other_side() -> None:
    segment = Segment.create(8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    segment.close()


def test_a_descriptor_smaller_than_announced_is_refused_and_closed() -> None:
    segment = Segment.create(4096)
    assert_refused(os.dup(segment.fd), 8192, "bytes=4096 announced=8192")
    segment.close()


def test_no_room_is_an_error_at_creation_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SegmentError, match="bytes=4096: No space left"):
        Segment.create(4096)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def assert_refused(fd: int, size: int, words: str) -> None:
    """The descriptor is refused with these words, and closed."""
    with pytest.raises(SegmentError, match=words):
        Segment(fd, size)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_empty_segment_is_refused() -> None:
    with pytest.raises(SegmentError, match="bytes=0"):
        Segment.create(0)


def test_what_could_be_truncated_under_us_is_refused_and_closed() -> None:
    """A SIGBUS would end the engine or the daemon that maps it."""
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    grown = os.memfd_create("grown", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(grown, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    file = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
    for fd in (unsealed, grown, file):
        if fd != grown:
            os.ftruncate(fd, 4096)
        assert_refused(fd, 4096, r"^segment could be truncated under us: seals=0x\d+ needed=F_SEAL_SHRINK$")


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_kernel_that_refuses_memory_files_is_an_error_of_ours(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, flags: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(SegmentError, match=f"memfd_create: {os.strerror(code)}"):
        Segment.create(4096)


def test_a_kernel_that_does_not_know_the_newest_flag_gets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.memfd_create

    def older(name: str, flags: int) -> int:
        if flags & module.MFD_NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return make(name, flags)

    monkeypatch.setattr(os, "memfd_create", older)
    Segment.create(4096).close()


def test_what_cannot_be_mapped_is_one_line_and_leaves_no_descriptor() -> None:
    fd = os.memfd_create("large", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 50)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert_refused(fd, 1 << 50, rf"^cannot map shared memory: bytes={1 << 50}: .*ulimit -v")


@pytest.mark.parametrize("node", online_nodes())
def test_pages_come_from_the_preferred_numa_node(node: int) -> None:
    """Of this machine's own nodes, as the kernel counts the pages."""
    segment = Segment.sparse(1 << 20)
    if not segment.prefer(node):
        segment.close()
        pytest.skip("no libnuma here, or mbind is refused")
    segment.fill(0, 1 << 20)
    assert f" prefer:{node} " in numa_line(segment)
    assert f" N{node}=" in numa_line(segment)
    segment.close()


def test_a_numa_node_that_is_not_there_is_refused() -> None:
    segment = Segment.sparse(4096)
    assert not segment.prefer(max(online_nodes()) + 1)
    segment.close()
