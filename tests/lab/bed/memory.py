"""KV memory that is not there while an engine sleeps: who touches it then ends with a segmentation fault."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)


def take_away(tensors: Iterable[Any]) -> None:
    """Free the tensors' pages, and let nobody read or write them."""
    for at, size in _pages(tensors):
        _call("madvise", at, size, mmap.MADV_DONTNEED)
        _call("mprotect", at, size, 0)


def bring_back(tensors: Iterable[Any]) -> None:
    """Map new pages, full of zeros."""
    for at, size in _pages(tensors):
        _call("mprotect", at, size, mmap.PROT_READ | mmap.PROT_WRITE)


def _pages(tensors: Iterable[Any]) -> set[tuple[int, int]]:
    """Return address and size of the whole pages of each allocation: beside them are other people's bytes."""
    found = set()
    for storage in (each.untyped_storage() for each in tensors):
        begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            found.add((begin, end - begin))
    return found


def _call(name: str, at: int, size: int, what: int) -> None:
    if getattr(_LIBC, name)(ctypes.c_void_p(at), ctypes.c_size_t(size), what):
        raise OSError(ctypes.get_errno(), name)
