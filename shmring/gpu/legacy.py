"""Device memory for another process of the same user, on a GPU whose driver has no descriptors of memory.

A legacy handle neither keeps the memory nor says who may open it; CUDA leaves undefined what happens when memory is
freed that another process has mapped.  So the descriptor that is handed over is one end of a socket pair, with the
handle in it.  The importer closes it after unmapping (the kernel does at its death), and then the allocator frees.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING

from ..errors import DeviceError
from .driver import LegacyHandle, asked, call, calls

if TYPE_CHECKING:
    from .cuda import Device

HANDLE_BYTES = ctypes.sizeof(LegacyHandle)
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class LegacyMemory:
    """As cuda.Memory. `opened`: the other process's end, of memory that it allocated."""

    def __init__(self, device: Device, address: int, size_bytes: int, opened: socket.socket | None = None) -> None:
        self._device, self._opened = device, opened
        self.address, self.size_bytes = address, size_bytes
        self._exported: list[socket.socket] = []
        self._closed = False

    @classmethod
    def allocate(cls, device: Device, size_bytes: int) -> LegacyMemory:
        return cls(device, int(device.call("malloc", size_bytes)), size_bytes)

    @classmethod
    def imported(cls, device: Device, descriptor: int, size_bytes: int) -> LegacyMemory:
        other = socket.socket(fileno=os.dup(descriptor))
        try:
            uid = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if uid != os.geteuid():
                raise DeviceError(
                    "this GPU shares memory among the processes of one user alone, since its driver has no descriptors "
                    f"of memory: uid={os.geteuid()} daemon_uid={uid}"
                )
            handle = LegacyHandle.from_buffer_copy(other.recv(HANDLE_BYTES).ljust(HANDLE_BYTES))
            device.make_current()
            address = asked("cuIpcOpenMemHandle_v2", handle, LAZY_PEER_ACCESS)
        except BaseException:
            other.close()
            raise
        return cls(device, address, size_bytes, other)

    def export(self) -> int:
        handle = LegacyHandle()
        self._device.make_current()
        call("cuIpcGetMemHandle", ctypes.byref(handle), self.address)
        ours, theirs = socket.socketpair()
        ours.send(handle)
        self._exported.append(ours)
        return theirs.detach()

    def close(self) -> None:
        """Unmap opened memory; free ours on a thread, once no process has it mapped."""
        if self._closed:
            return
        self._closed = True
        if self._opened is None:
            threading.Thread(target=self._free, name="device-end", daemon=True).start()
            return
        self._device.make_current()
        call("cuIpcCloseMemHandle", self.address)
        self._opened.close()

    def _free(self) -> None:
        for other in self._exported:
            with other, contextlib.suppress(OSError):  # a reset connection is an end, too
                while other.recv(1):
                    pass
        with calls.to((self._device.uuid,)):
            self._device.call("free", self.address)
