"""One rank's device cache in one epoch: a slab of device slots on its GPU, and host slots pinned for the GPU.

A thread pins piece by piece, so that a late attachment stalls no step.  It gives everything back once the epoch's
session is gone, when no copy that names its memory is under way.

The driver of a lost device may never return, so only this thread calls it.  A slab that is late does not exist in this
epoch, and pages that are not pinned are copied without the kernel.
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

from ..shmring.errors import DeviceError
from ..shmring.gpu.calls import calls
from ..shmring.gpu.device import Device, Memory, exported_bytes, pieces
from ..shmring.gpu.lease import wait_for_end
from .paged import Rows

if TYPE_CHECKING:
    from ..shmring.wire.attach import Attached

# Between two pieces others get at CUDA's locks.
PAUSE_S = 0.001
# How long a call may take: as long as the daemon's, by default.
TIMEOUT_S = 4.0

log = logging.getLogger("vllm.kvprefetch.device_cache")


class DeviceCache:
    """`slots`: device slots (0: none), from `address` on. `pinned`: leading host slots that the GPU may read."""

    def __init__(self, device: Device, rows: Rows, attached: Attached, lease: socket.socket | None) -> None:
        """Open the daemon's slab, or allocate one where the daemon asks for it; a failure is logged, and there is none.

        Takes over the lease; without one there is no slab.  `rows`: the host slots, mapped until they are unpinned.
        Waits TIMEOUT_S at most.
        """
        self._device, self._rows, self._lease = device, rows, lease
        self._slot_bytes = attached.slot_bytes
        self.handle = b""
        self.slots = self.pinned = 0
        self._memory: Memory | None = None
        self._lock = threading.Lock()  # guards the decision whether there is a slab
        self._settled = threading.Event()  # that decision is made
        self._ending = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, args=(attached,), name="kvprefetch-pin", daemon=True)
        self._thread.start()
        if lease is not None and not self._settled.wait(TIMEOUT_S):
            self._give_up()

    @property
    def address(self) -> int:
        return 0 if self._memory is None else self._memory.address

    @cached_property
    def rows(self) -> Rows:
        """The device slots as an array, for device memory that the host can address."""
        flat = (ctypes.c_uint8 * (self.slots * self._slot_bytes)).from_address(self.address)
        return np.ctypeslib.as_array(flat).reshape(self.slots, self._slot_bytes)

    def tick(self) -> None:
        """Warn once when the GPU does not answer."""
        try:
            calls.check((self._device.uuid,), TIMEOUT_S)
        except DeviceError as error:
            if not self._warned:
                self._warned = True
                text = "kvprefetch: %s; staging stays as it is: device_slots=%d pinned_slots=%d slots=%d"
                log.warning(text, str(error), self.slots, self.pinned, len(self._rows))

    def _give_up(self) -> None:
        with self._lock:
            if not self._settled.is_set():
                self._settled.set()
                self._warned = True
                text = "kvprefetch: no staging in device memory: the GPU does not answer: uuid=%s timeout_s=%g"
                log.warning(text, self._device.uuid, TIMEOUT_S)

    def end(self) -> None:
        """Let the thread give everything back; returns at once."""
        self._ending.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until everything was given back."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self, attached: Attached) -> None:
        registered: list[int] = []
        try:
            self._map(attached)
            self._pin(registered)
        except Exception as error:  # of any kind: the memory is given back below
            text = "kvprefetch: cannot pin staging: pinned_slots=%d slots=%d: %s"
            log.warning(text, self.pinned, len(self._rows), error)
        self._ending.wait()
        for address in registered:
            self._give_back(self._device.unregister, address)
        self._let_go()

    def _map(self, attached: Attached) -> None:
        """Decide whether there is a slab; a late one is given back at once."""
        memory: Memory | None = None
        handle = b""
        try:
            if self._lease is not None:
                memory, handle = self._open(attached)
        except DeviceError as error:
            # As text: a log handler that keeps the error would keep the session, by its traceback.
            log.warning("kvprefetch: no staging in device memory: %s", str(error))
        finally:
            with self._lock:
                late = self._settled.is_set()
                self._memory = memory
                if memory is not None and not late:
                    self.slots, self.handle = attached.device_slots, handle
                self._settled.set()
            if late or memory is None:
                self._let_go()

    def _open(self, attached: Attached) -> tuple[Memory, bytes]:
        """Return the slab, and the handle of one that we allocated. Raises DeviceError."""
        size = attached.device_slots * attached.slot_bytes
        calls.check((self._device.uuid,), TIMEOUT_S)
        with calls.to((self._device.uuid,)):
            if attached.device_handle:
                return self._device.open(bytes.fromhex(attached.device_handle), size), b""
            memory = self._device.allocate(exported_bytes(size))
            try:
                return memory, memory.handle()
            except DeviceError:
                memory.close()
                raise

    def _pin(self, registered: list[int]) -> None:
        base = self._rows.ctypes.data
        calls.check((self._device.uuid,), TIMEOUT_S)
        for offset, size in pieces(self._rows.nbytes, self._slot_bytes):
            if self._ending.wait(PAUSE_S):
                break
            with calls.to((self._device.uuid,)):
                self._device.register(base + offset, size)
            registered.append(base + offset)
            self.pinned = min(len(self._rows), (offset + size) // self._slot_bytes)

    def _let_go(self) -> None:
        """Free the slab: the lease ends after our mapping, and our own allocation after the daemon's (lease.py)."""
        lease, self._lease = self._lease, None
        memory, self._memory = self._memory, None
        if lease is None:
            return
        if self.handle:
            wait_for_end(lease)
        if memory is not None:
            self._give_back(memory.close)
        lease.close()

    def _give_back(self, how: Callable[..., None], *values: int) -> None:
        try:
            with calls.to((self._device.uuid,)):
                how(*values)
        except Exception as error:
            log.warning("kvprefetch: device memory could not be given back: %s", error)
