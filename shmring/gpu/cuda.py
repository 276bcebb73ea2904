"""CUDA through cupy: find a GPU by UUID, allocate, export, import, register host memory, copy, launch.

The first question about a CUDA device imports cupy; the first method of a Device makes the CUDA context.  Only raw
runtime calls are used: cupy's memory pools would keep memory that others map, and the asynchronous allocator's memory
has no IPC handle.  Calls that may take long while cupy holds the interpreter's lock go to the driver (driver.py).

The code rests on CUDA's documentation: `cudaSetDevice` is per thread, so it precedes each call that depends on it.  An
IPC handle names a whole allocation, and `cudaMalloc` may cut small ones from a larger one, so an exported allocation is
a multiple of 2 MiB and begins at one.  The process that made a handle cannot open it.  With unified addressing,
registered host memory has the same address on the device.

Tests replace `devices` by a provider of host memory.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DeviceError
from .device import GRAIN_BYTES, HANDLE_BYTES, Argument, Device, Devices, Event, Kernel, Memory, Stream
from .driver import Driver


def _cupy() -> Any:
    try:
        import cupy
    except Exception as error:  # it loads CUDA's libraries, so it can raise more than ImportError
        raise DeviceError(f"cupy cannot be imported: {_line(error)}") from error
    return cupy


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def _checked(what: str, function: Callable[..., Any], *values: Any) -> Any:
    """Call cupy; any error becomes a DeviceError that begins with `what`."""
    try:
        return function(*values)
    except Exception as error:
        raise DeviceError(f"{what}: {_line(error)}") from error


def _uuid(runtime: Any, index: int) -> str:
    # cupy reads the 16 bytes as a C string and drops those after a zero, in every process alike.
    raw = bytes(_checked("cudaGetDeviceProperties", runtime.getDeviceProperties, index)["uuid"])
    return str(uuid.UUID(bytes=raw[:16].ljust(16, b"\0")))


class CudaDevices:
    """The devices that this process may see. Reading a UUID makes no CUDA context."""

    def __init__(self) -> None:
        self._driver = Driver()
        self._opened: dict[str, CudaDevice] = {}

    def open(self, uuid: str) -> Device:
        if (opened := self._opened.get(uuid)) is not None:
            return opened  # do not ask the other devices again: one of them may hang
        runtime = _cupy().cuda.runtime
        self._driver.init()
        count = _checked("cudaGetDeviceCount", runtime.getDeviceCount)
        found = [index for index in range(count) if _uuid(runtime, index) == uuid]
        if len(found) != 1:
            raise DeviceError(f"not exactly one device has this UUID: uuid={uuid} found={len(found)} devices={count}")
        return self._opened.setdefault(uuid, CudaDevice(found[0], uuid, self._driver))

    def uuid_of(self, kind: str, index: int) -> str:
        if kind != "cuda":
            return ""
        runtime = _cupy().cuda.runtime
        self._driver.init()
        return _uuid(runtime, index)


class CudaDevice:
    """A device by its index in this process."""

    def __init__(self, index: int, uuid: str, driver: Driver) -> None:
        self.index, self.uuid, self.driver = index, uuid, driver
        self._started = False
        self.cupy = _cupy()
        self.runtime = self.cupy.cuda.runtime
        properties = _checked("cudaGetDeviceProperties", self.runtime.getDeviceProperties, index)
        self.processors = int(properties["multiProcessorCount"])
        same = self.runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        self._same_addresses = bool(_checked("cudaDeviceGetAttribute", self.runtime.deviceGetAttribute, same, index))

    def make_current(self) -> None:
        """Make the device current for this thread, and its context the first time. Raises DeviceError."""
        if not self._started:
            self.driver.start(self.index)
            self._started = True
        _checked("cudaSetDevice", self.runtime.setDevice, self.index)

    def call(self, what: str, *values: Any) -> Any:
        """Call the runtime's `what` with this device current. Raises DeviceError."""
        self.make_current()
        return _checked(what, getattr(self.runtime, what), *values)

    def free_bytes(self) -> int:
        self.make_current()
        return self.driver.free_bytes()

    def allocate(self, size_bytes: int) -> Memory:
        return CudaMemory(self, int(self.call("malloc", size_bytes)), size_bytes, ours=True)

    def open(self, handle: bytes, size_bytes: int) -> Memory:
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(f"handle has another size: bytes={len(handle)} expected={HANDLE_BYTES}")
        self.make_current()
        return CudaMemory(self, self.driver.open(handle), size_bytes, ours=False)

    def register(self, address: int, size_bytes: int) -> None:
        if not self._same_addresses:
            raise DeviceError("hostRegister: this device does not use the host's addresses for registered memory")
        portable, mapped = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped: cupy has no names for them
        self.call("hostRegister", address, size_bytes, portable | mapped)

    def unregister(self, address: int) -> None:
        self.call("hostUnregister", address)

    def stream(self) -> Stream:
        return CudaStream(self)

    def kernel(self, source: str, name: str) -> Kernel:
        self.make_current()

        def load() -> Any:
            # RawModule compiles and loads for the current device; its Function keeps the module loaded.
            return self.cupy.RawModule(code=source, options=("-std=c++17",)).get_function(name).kernel

        return CudaKernel(self, _checked(f"kernel {name}", load))


class CudaMemory:
    """An allocation (`ours`), or a mapping of another process's memory."""

    def __init__(self, device: CudaDevice, address: int, size_bytes: int, *, ours: bool) -> None:
        self._device, self._ours, self._closed = device, ours, False
        self.address, self.size_bytes = address, size_bytes

    def handle(self) -> bytes:
        if not self._ours or self._closed or self.size_bytes % GRAIN_BYTES or self.address % GRAIN_BYTES:
            raise DeviceError(
                f"only whole allocations can be exported: address={self.address:#x} bytes={self.size_bytes} "
                f"both multiples of {GRAIN_BYTES}"
            )
        self._device.make_current()
        return self._device.driver.handle(self.address)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._ours:
            self._device.call("free", self.address)
        else:
            self._device.make_current()
            self._device.driver.close(self.address)


class CudaStream:
    """A stream without synchronisation with the default stream."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.pointer = int(device.call("streamCreateWithFlags", device.runtime.streamNonBlocking))
        self._default_kind = device.runtime.memcpyDefault
        self._events: set[CudaEvent] = set()

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        self._device.call("memcpyAsync", target, source, size_bytes, self._default_kind, self.pointer)

    def record(self) -> Event:
        event = CudaEvent(self._device, self._events)
        self._device.call("eventRecord", event.pointer, self.pointer)
        return event

    def close(self) -> None:
        pointer, self.pointer = self.pointer, 0
        if not pointer:
            return
        try:
            self._device.call("streamSynchronize", pointer)
        finally:
            for event in list(self._events):
                event.destroy()
            self._device.call("streamDestroy", pointer)


class CudaEvent:
    """An event; it is destroyed after its wait, or with its stream."""

    def __init__(self, device: CudaDevice, alive: set[CudaEvent]) -> None:
        runtime = device.runtime
        flags = runtime.eventDisableTiming | runtime.eventBlockingSync
        self._device, self._alive = device, alive
        self.pointer = int(device.call("eventCreateWithFlags", flags))
        alive.add(self)

    def wait(self) -> None:
        if self.pointer:
            try:
                self._device.call("eventSynchronize", self.pointer)
            finally:
                self.destroy()

    def destroy(self) -> None:
        pointer, self.pointer = self.pointer, 0
        self._alive.discard(self)
        if pointer:
            self._device.call("eventDestroy", pointer)


class CudaKernel:
    """A function of a loaded module, launched through the driver, so that a launch packs nothing anew."""

    def __init__(self, device: CudaDevice, function: Any) -> None:
        self._device, self._function = device, function
        self._launch, self._set_device = device.cupy.cuda.driver.launchKernel, device.runtime.setDevice
        self._argument: Argument | None = None
        self._pointer = np.zeros(1, np.uint64)
        self._array = self._pointer.ctypes.data

    def launch(self, grid: int, threads: int, argument: Argument, stream: int) -> None:
        if argument is not self._argument:
            # The driver takes an array of pointers to the parameters, and copies the parameters before it returns.
            self._argument, self._pointer[0] = argument, argument.ctypes.data
        try:
            self._set_device(self._device.index)
            self._launch(self._function.ptr, grid, 1, 1, threads, 1, 1, 0, stream, self._array, 0)
        except Exception as error:
            raise DeviceError(f"cuLaunchKernel: {_line(error)}") from error


# The provider; tests replace it.
devices: Devices = CudaDevices()


def open_device(uuid: str) -> Device:
    """Return the device with this UUID. Raises DeviceError."""
    return devices.open(uuid)


def uuid_of(kind: str, index: int) -> str:
    """Return the UUID of torch's device `kind:index`; "" for a kind without device memory. Raises DeviceError."""
    return devices.uuid_of(kind, index)
