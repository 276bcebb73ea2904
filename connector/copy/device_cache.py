"""One rank's device cache in one epoch: a slab of device slots on its GPU, and host slots pinned for the GPU.

A thread pins piece by piece, so that a late attachment stalls no step.  It gives everything back once the epoch's
epoch is gone, when no copy that names its memory is under way.

The driver of a lost device may never return, so only this thread calls it.  A slab that is late does not exist in this
epoch, and pages that are not pinned are copied without the kernel.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...shmring.errors import DeviceError
from ...shmring.gpu.cuda import Device, SharedMemory
from ...shmring.gpu.driver import calls, pieces
from .paged import Rows

if TYPE_CHECKING:
    from ...shmring.wire.attach import Attached

# Between two pieces others get at CUDA's locks.
PAUSE_S = 0.001
# How long a call may take: as long as the daemon's, by default.
TIMEOUT_S = 4.0

log = logging.getLogger("vllm.kvprefetch.device_cache")


class DeviceCache:
    """`slots`: device slots (0: none), from `address` on. `pinned`: leading host slots that the GPU may read."""

    def __init__(self, device: Device, rows: Rows, attached: Attached, slab: int | None) -> None:
        """Open the daemon's slab; a failure is logged, and there is none.

        Takes over the slab's descriptor, if there is one.  `rows`: the host slots, mapped until they are unpinned.
        Waits TIMEOUT_S at most.
        """
        self._device, self._rows = device, rows
        self._slot_bytes = attached.slot_bytes
        self.slots = self.pinned = 0
        self._memory: SharedMemory | None = None
        self._lock = threading.Lock()  # guards the decision whether there is a slab
        self._settled = threading.Event()  # that decision is made
        self._ending = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, args=(attached, slab), name="kvprefetch-pin", daemon=True)
        self._thread.start()
        if slab is not None and not self._settled.wait(TIMEOUT_S):
            with self._lock:
                if not self._settled.is_set():
                    self._settled.set()
                    self._warned = True
                    text = "kvprefetch: no staging in device memory: the GPU does not answer: uuid=%s timeout_s=%g"
                    log.warning(text, device.uuid, TIMEOUT_S)

    @property
    def address(self) -> int:
        return 0 if self._memory is None else self._memory.address

    def tick(self) -> None:
        """Warn once when the GPU does not answer."""
        try:
            calls.check((self._device.uuid,), TIMEOUT_S)
        except DeviceError as error:
            if not self._warned:
                self._warned = True
                text = "kvprefetch: %s; staging stays as it is: device_slots=%d pinned_slots=%d slots=%d"
                log.warning(text, str(error), self.slots, self.pinned, len(self._rows))

    def end(self) -> None:
        """Let the thread give everything back; returns at once."""
        self._ending.set()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self, attached: Attached, slab: int | None) -> None:
        registered: list[int] = []
        try:
            self._map(attached, slab)
            self._pin(registered)
        except Exception as error:  # of any kind: the memory is given back below
            text = "kvprefetch: cannot pin staging: pinned_slots=%d slots=%d: %s"
            log.warning(text, self.pinned, len(self._rows), error)
        self._ending.wait()
        for address in registered:
            self._give_back(self._device.unregister, address)
        if self._memory is not None:
            self._give_back(self._memory.close)

    def _map(self, attached: Attached, slab: int | None) -> None:
        """Decide whether there is a slab; a late one is given back at once."""
        memory: SharedMemory | None = None
        try:
            if slab is not None:
                memory = self._open(attached, slab)
        except DeviceError as error:
            # As text: a log handler that keeps the error would keep the epoch, by its traceback.
            log.warning("kvprefetch: no staging in device memory: %s", str(error))
        finally:
            with self._lock:
                late = self._settled.is_set()
                if memory is not None and not late:
                    self._memory, self.slots = memory, attached.device_slots
                self._settled.set()
        if late and memory is not None:
            self._give_back(memory.close)

    def _open(self, attached: Attached, slab: int) -> SharedMemory:
        try:
            calls.check((self._device.uuid,), TIMEOUT_S)
            with calls.to((self._device.uuid,)):
                return self._device.open(slab, attached.device_slots * attached.slot_bytes)
        finally:
            os.close(slab)

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

    def _give_back(self, how: Callable[..., None], *values: int) -> None:
        try:
            with calls.to((self._device.uuid,)):
                how(*values)
        except Exception as error:
            log.warning("kvprefetch: device memory could not be given back: %s", error)
