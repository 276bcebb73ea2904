"""CUDA driver calls that may take long and that cupy would make under the interpreter's lock.

cupy 13.6 to 14.2 (`cupy_backends/cuda/api/runtime.pyx`) keeps the lock in `cudaGetDeviceCount`, which starts the
driver, `cudaSetDevice`, which makes a context, `cudaGetDeviceProperties`, `cudaMemGetInfo` and the calls about memory
handles.  A daemon's main loop or an engine's step would stand meanwhile, for ever where the device is lost.  ctypes
gives up the lock.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import DeviceError
from .device import HANDLE_BYTES

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class Driver:
    """libcuda, loaded at the first call. All but `init` and `start` need a current context; all raise DeviceError."""

    def __init__(self, name: str = "libcuda.so.1") -> None:
        self._name = name
        self._library: ctypes.CDLL | None = None

    def init(self) -> None:
        """Start the driver; the first start may wake every GPU of the machine."""
        self._call("cuInit", ctypes.c_uint(0))

    def start(self, index: int) -> None:
        """Make the device's primary context (as `cudaSetDevice`) for the life of the process."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.init()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """Map memory that another process exported, and return its address."""
        address, flags = ctypes.c_uint64(), ctypes.c_uint(LAZY_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _call(self, name: str, *values: Any) -> None:
        try:
            if self._library is None:
                self._library = ctypes.CDLL(self._name)
            function = getattr(self._library, name)
        except (OSError, AttributeError) as error:
            raise DeviceError(f"{self._name}: {error}".split("\n", 1)[0]) from error
        code = int(function(*values))
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DeviceError(f"{name}: {(text.value or b'unknown').decode()}: code={code}")
