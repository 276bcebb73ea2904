"""Stands in for cupy, whose wheels have CUDA's runtime built in, and that takes NVIDIA's driver alone.

It has what shmring/gpu/cuda.py calls, and what tests need for a capture, over the fake driver.  Where cupy keeps the
interpreter's lock in a call, so does this.  A kernel is compiled for the host (kernel.py).  Stricter than CUDA's
runtime: a thread without a current context gets an error, not the first GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import c_uint64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_free = ctypes.CDLL("libcuda.so.1")
_locked = ctypes.PyDLL("libcuda.so.1")
_KERNELS = Path(os.environ["FAKECUDA_KERNELS"])
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class CUDARuntimeError(RuntimeError):
    pass


class CompileException(Exception):
    pass


def _check(library: ctypes.CDLL, name: str, *values: Any) -> None:
    code = getattr(library, name)(*(c_uint64(value) if isinstance(value, int) else value for value in values))
    if code:
        text = ctypes.c_char_p()
        _free.cuGetErrorName(code, ctypes.byref(text))
        words = (text.value or b"CUDA_ERROR_UNKNOWN").decode().removeprefix("CUDA_ERROR_").split("_")
        raise CUDARuntimeError(f"cudaError{''.join(word.capitalize() for word in words)}: code {code} of the driver")


def _made(library: ctypes.CDLL, name: str, *values: Any) -> int:
    found = c_uint64()
    _check(library, name, ctypes.byref(found), *values)
    return found.value


def _calls(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    return lambda *values: _check(library, name, *values)


def _makes(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    return lambda *values: _made(library, name, *values)


class _Runtime:
    """As cupy.cuda.runtime; contexts are made at the first use, for good."""

    streamNonBlocking = 1
    memcpyDefault = 4
    eventDisableTiming, eventBlockingSync = 2, 1
    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self._contexts: dict[int, int] = {}
        self._host_functions: list[Any] = []
        self.malloc, self.free = _makes(_free, "cuMemAlloc_v2"), _calls(_free, "cuMemFree_v2")
        self.memset = _calls(_free, "cuMemsetD8_v2")
        self.hostRegister = _calls(_free, "cuMemHostRegister_v2")
        self.hostUnregister = _calls(_free, "cuMemHostUnregister")
        self.streamSynchronize = _calls(_free, "cuStreamSynchronize")
        self.eventCreateWithFlags = _makes(_locked, "cuEventCreate")
        self.eventDestroy = _calls(_locked, "cuEventDestroy_v2")
        self.eventRecord = _calls(_locked, "cuEventRecord")
        self.eventSynchronize = _calls(_free, "cuEventSynchronize")
        self.streamBeginCapture = _calls(_free, "cuStreamBeginCapture")
        self.graphLaunch = _calls(_free, "cuGraphLaunch")

    def setDevice(self, index: int) -> None:
        if index not in self._contexts:
            self._contexts[index] = _made(_locked, "cuDevicePrimaryCtxRetain", index)
        _check(_locked, "cuCtxSetCurrent", self._contexts[index])

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind == self.memcpyDefault
        _check(_free, "cuMemcpyAsync", target, source, size, stream)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        _check(_free, "cuStreamWaitEvent", stream, event, flags)

    def eventQuery(self, event: int) -> int:
        return int(_locked.cuEventQuery(c_uint64(event)))

    def streamEndCapture(self, stream: int) -> int:
        found = c_uint64()
        _check(_free, "cuStreamEndCapture", stream, ctypes.byref(found))
        return found.value

    def graphInstantiate(self, graph: int) -> int:
        return _made(_free, "cuGraphInstantiateWithFlags", graph, 0)

    def launchHostFunc(self, stream: int, function: Callable[[Any], None], value: Any) -> None:
        self._host_functions.append(_HOST_FUNCTION(lambda _: function(value)))
        _check(_free, "cuLaunchHostFunc", stream, self._host_functions[-1], 0)


cuda = SimpleNamespace(runtime=_Runtime(), driver=SimpleNamespace(launchKernel=_calls(_free, "cuLaunchKernel")))


class RawModule:
    """As cupy's, of CUDA C++; compiled files are kept."""

    def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
        from tests.support.fakecuda import kernel

        assert options == ("-std=c++17",)
        try:
            path = kernel.compiled(code, _KERNELS, kernel.CHECKED)
        except ValueError as error:
            raise CompileException(str(error)) from error
        self._module = _made(_free, "cuModuleLoad", str(path).encode())

    def get_function(self, name: str) -> Any:
        pointer = _made(_free, "cuModuleGetFunction", self._module, name.encode())
        return SimpleNamespace(kernel=SimpleNamespace(ptr=pointer))
