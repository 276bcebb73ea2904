"""The interface of a GPU for both sides, and the sizes that CUDA gives to exported and registered memory. Pure."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

HANDLE_BYTES = 64  # of a CUDA IPC memory handle
GRAIN_BYTES = 2 << 20  # exported allocations are multiples: a smaller one could share its handle with another
PAGE_BYTES = 4096  # registered host memory consists of whole pages
PIECE_BYTES = 16 << 20  # registered at a time, some milliseconds: other calls into CUDA may wait meanwhile

Argument = npt.NDArray[np.void]


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Wait for the point without spinning. Raises DeviceError."""


class Stream(Protocol):
    """Work in order, beside all other work; for one thread at a time."""

    @property
    def pointer(self) -> int:
        """The cudaStream_t."""

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """Queue a copy between two addresses of device memory or registered host memory. Raises DeviceError.

        From unregistered host memory the call returns only after the read.
        """

    def record(self) -> Event:
        """Return the point behind everything queued so far. Raises DeviceError."""

    def close(self) -> None:
        """Finish the queued work, then destroy the stream and its events."""


class Memory(Protocol):
    """Device memory, allocated here or mapped from another process."""

    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...

    def handle(self) -> bytes:
        """Return HANDLE_BYTES bytes with which another process opens it. Raises DeviceError, also for opened memory."""

    def close(self) -> None:
        """Free or unmap it, once; nothing may use the address any more. Raises DeviceError."""


class Kernel(Protocol):
    """A compiled kernel with one parameter, a structure by value."""

    def launch(self, grid: int, threads: int, argument: Argument, stream: int) -> None:
        """Queue `grid` blocks of `threads`; the caller may change `argument` afterwards. Raises DeviceError."""


class Device(Protocol):
    """One GPU. Any thread may call it; each call makes it the thread's current device and may raise DeviceError."""

    @property
    def uuid(self) -> str: ...
    @property
    def processors(self) -> int:
        """Multiprocessors."""

    def free_bytes(self) -> int:
        """Return the device's unused memory, of all processes."""

    def allocate(self, size_bytes: int) -> Memory:
        """Call `cudaMalloc`. Exportable memory is a multiple of GRAIN_BYTES."""

    def open(self, handle: bytes, size_bytes: int) -> Memory:
        """Map memory that another process exported."""

    def register(self, address: int, size_bytes: int) -> None:
        """Pin whole pages of host memory, and give the device access at the same address; blocks until that is done."""

    def unregister(self, address: int) -> None:
        """Undo `register` of exactly this address; waits for the device's work on it."""

    def stream(self) -> Stream: ...

    def kernel(self, source: str, name: str) -> Kernel:
        """Load `source`, compiled now or earlier, for this device; `name` is its extern "C" function."""


class Devices(Protocol):
    """A provider of devices."""

    def open(self, uuid: str) -> Device:
        """Return the device with this UUID. Raises DeviceError."""

    def uuid_of(self, kind: str, index: int) -> str:
        """Return the UUID of torch's device `kind:index`; "" for a kind without device memory. Raises DeviceError."""


def exported_bytes(size_bytes: int) -> int:
    """Round up to an exportable size."""
    return -(-size_bytes // GRAIN_BYTES) * GRAIN_BYTES


def pieces(size_bytes: int, slot_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of the pieces in which to register a segment of slots.

    Each cut lies between two slots, because a copy must not span two registrations, and between two pages.  The last
    piece ends with the segment's last page.
    """
    least = slot_bytes * PAGE_BYTES // math.gcd(slot_bytes, PAGE_BYTES)
    step = least * max(1, PIECE_BYTES // least)
    end = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    return [(offset, min(step, end - offset)) for offset in range(0, end, step)]
