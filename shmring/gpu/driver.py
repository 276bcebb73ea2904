"""Calls into the CUDA driver that cupy has no function for, or that take long and hold the interpreter's lock there.

cupy 13.6 to 14.2 (`cupy_backends/cuda/api/runtime.pyx`) has no memory by descriptor and cuts a UUID at a zero byte.  It
keeps the lock in calls that start the driver, make contexts and streams, ask for free memory, or open legacy handles.
ctypes gives up the lock.  A driver whose device is lost may never return from a call, so the callers run each where
nothing else waits for it (`calls`).
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import c_ubyte, c_uint64
from typing import Any

from ..errors import DeviceError

LIBRARY = "libcuda.so.1"
POSIX_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
# Of CUdevice_attribute.
PROCESSORS, SAME_ADDRESSES, DESCRIPTORS = 16, 91, 103
GRAIN_BYTES = 2 << 20  # device memory for another process consists of whole grains
PIECE_BYTES = 16 << 20  # registered at a time, some milliseconds: other calls into CUDA may wait meanwhile


def allocation(device: int) -> bytes:
    """Return a CUmemAllocationProp: pinned memory of the device, for export as a descriptor."""
    return struct.pack("4iP8x", 1, POSIX_DESCRIPTOR, 1, device, 0)


def access(device: int) -> bytes:
    """Return a CUmemAccessDesc: the device may read and write its own memory."""
    return struct.pack("3i", 1, device, 3)


class LegacyHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", c_ubyte * 64),)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(LIBRARY)


def call(name: str, *values: Any) -> None:
    """Call the function; integers are passed with 64 bits, which those of 32 bits end in. Raises DeviceError."""
    try:
        function = getattr(_library(), name)
    except (OSError, AttributeError) as error:
        raise DeviceError(f"{LIBRARY}: {error}".split("\n", 1)[0]) from error
    code = int(function(*(c_uint64(value) if isinstance(value, int) else value for value in values)))
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorName(code, ctypes.byref(text))
        raise DeviceError(f"{name}: {(text.value or b'unknown').decode()}: code={code}")


def asked(name: str, *values: Any) -> int:
    """Call a function whose first parameter says where the one number goes that it answers with; return that."""
    found = c_uint64()
    call(name, ctypes.byref(found), *values)
    return found.value


def pieces(size_bytes: int, slot_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of the pieces in which to register a segment of slots.

    Each cut lies between two slots, because a copy must not span two registrations, and between two pages.  The last
    piece ends with the segment's last page.
    """
    least = math.lcm(slot_bytes, mmap.PAGESIZE)
    step = least * max(1, PIECE_BYTES // least)
    end = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return [(offset, min(step, end - offset)) for offset in range(0, end, step)]


class DeviceCalls:
    """The running calls of one process: nobody can interrupt one that hangs, so its device is left alone meanwhile.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._running: dict[object, tuple[frozenset[str], float]] = {}

    @contextmanager
    def to(self, uuids: Iterable[str]) -> Iterator[None]:
        """Register one call to these devices for the length of the block."""
        call = object()
        self._running[call] = (frozenset(uuids), time.monotonic())
        try:
            yield
        finally:
            del self._running[call]

    def check(self, uuids: Iterable[str], timeout_s: float) -> None:
        """Raise DeviceError when a call to one of these devices has run for longer than `timeout_s`."""
        wanted, now = frozenset(uuids), time.monotonic()
        for called, since in list(self._running.values()):
            if now - since > timeout_s and (silent := sorted(wanted & called)):
                raise DeviceError(f"the GPU does not answer: uuid={','.join(silent)} call_age_s={now - since:.1f}")


calls = DeviceCalls()
