"""What one rank uses of its GPU in one epoch: the slab of device slots, and the pages of host slots pinned for it.

A thread of its own pins, piece by piece, so that a late attachment stalls no step, and gives everything back once the
epoch's session is gone, which is when no copy that names its memory is under way.

The slab's owner may free it only when the other side has unmapped it: freeing memory that another process has mapped is
undefined.  Each side holds one end of a socket pair, the lease.  Who imported closes its end after unmapping (the
kernel does, when it dies); who exported waits for that.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..shmring import cuda
from ..shmring.cuda import Device, DeviceError, Memory
from .paged import Rows

if TYPE_CHECKING:
    from ..shmring.messages import Attached

# Between two pieces others get at CUDA's locks.
PAUSE_S = 0.001

log = logging.getLogger("vllm.kvprefetch.tier")


class DeviceTier:
    """`address`: of the first device slot, of `slots` in all (0: none). `pinned`: leading host slots it may read."""

    def __init__(self, device: Device, rows: Rows, attached: Attached, lease: socket.socket | None) -> None:
        """Open the slab, or allocate it where the engine is to own it; where that fails there is none, and a warning.

        Owns the lease; with one there is a slab. `rows` are the host slots, which stay mapped until they are unpinned.
        """
        self._device, self._rows, self._lease = device, rows, lease
        self._slot_bytes = attached.slot_bytes
        self.handle = b""
        self.pinned = 0
        self._memory = self._map(attached) if lease is not None else None
        self.slots = attached.device_slots if self._memory is not None else 0
        if self._lease is not None and self._memory is None:
            self._lease.close()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvprefetch-pin", daemon=True)
        self._thread.start()

    @property
    def address(self) -> int:
        return 0 if self._memory is None else self._memory.address

    @cached_property
    def rows(self) -> Rows:
        """The device slots as an array, for device memory that the host can address."""
        flat = (ctypes.c_uint8 * (self.slots * self._slot_bytes)).from_address(self.address)
        return np.ctypeslib.as_array(flat).reshape(self.slots, self._slot_bytes)

    def end(self) -> None:
        """Let the thread give everything back; returns at once."""
        self._ending.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until everything was given back."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _map(self, attached: Attached) -> Memory | None:
        size = attached.device_slots * attached.slot_bytes
        try:
            if attached.device_handle:
                return self._device.open(bytes.fromhex(attached.device_handle), size)
            memory = self._device.allocate(cuda.exported_bytes(size))
            try:
                self.handle = memory.handle()
                return memory
            except DeviceError:
                memory.close()
                raise
        except DeviceError as error:
            # As text: a log handler that keeps the error would keep the session, by its traceback.
            log.warning("kvprefetch: no staging in device memory: %s", str(error))
            return None

    def _run(self) -> None:
        base = self._rows.ctypes.data
        registered: list[int] = []
        try:
            for offset, size in cuda.pieces(self._rows.nbytes, self._slot_bytes):
                if self._ending.wait(PAUSE_S):
                    break
                self._device.register(base + offset, size)
                registered.append(base + offset)
                self.pinned = min(len(self._rows), (offset + size) // self._slot_bytes)
        except Exception as error:  # whatever it is, the rest goes unpinned, and what is held is given back in the end
            log.warning(
                "kvprefetch: cannot pin staging: pinned_slots=%d slots=%d: %s", self.pinned, len(self._rows), error
            )
        self._ending.wait()
        for address in registered:
            _given_back(self._device.unregister, address)
        if self.handle and self._lease is not None:
            _wait_for_end(self._lease)
        if self._memory is not None:
            _given_back(self._memory.close)
        if self._lease is not None:
            self._lease.close()


def _given_back(how: Callable[..., None], *values: int) -> None:
    try:
        how(*values)
    except Exception as error:
        log.warning("kvprefetch: device memory could not be given back: %s", error)


def _wait_for_end(lease: socket.socket) -> None:
    lease.setblocking(True)
    try:
        while lease.recv(64):
            pass
    except OSError:
        pass  # a reset connection is an end too
