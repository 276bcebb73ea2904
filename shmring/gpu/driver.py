"""Calls into the CUDA driver that cupy has no function for, or that take long and hold the interpreter's lock there.

cupy 13.6 to 14.2 (`cupy_backends/cuda/api/runtime.pyx`) has no memory by descriptor and cuts a UUID at a zero byte.  It
keeps the lock in calls that start the driver, make contexts and streams, ask for free memory, or open legacy handles.
ctypes gives up the lock.  A driver whose device is lost may never return from a call, so the callers run each where
nothing else waits for it (calls.py).
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_ubyte, c_uint64
from typing import Any

from ..errors import DeviceError

LIBRARY = "libcuda.so.1"
POSIX_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
# Of CUdevice_attribute.
PROCESSORS, SAME_ADDRESSES, DESCRIPTORS = 16, 91, 103


class Location(ctypes.Structure):
    """CUmemLocation: memory of a device."""

    _fields_ = (("type", c_int), ("device", c_int))

    def __init__(self, device: int) -> None:
        super().__init__(type=1, device=device)  # CU_MEM_LOCATION_TYPE_DEVICE


class Allocation(ctypes.Structure):
    """CUmemAllocationProp: of memory that is exported as a descriptor."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", c_ubyte * 8),
    )

    def __init__(self, device: int) -> None:
        # CU_MEM_ALLOCATION_TYPE_PINNED
        super().__init__(type=1, handles=POSIX_DESCRIPTOR, location=Location(device))


class Access(ctypes.Structure):
    """CUmemAccessDesc: a device may read and write."""

    _fields_ = (("location", Location), ("flags", c_int))

    def __init__(self, device: int) -> None:
        super().__init__(location=Location(device), flags=3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


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


def attribute(number: int, index: int) -> int:
    """Return a CUdevice_attribute of a device. Raises DeviceError."""
    return asked("cuDeviceGetAttribute", number, index)
