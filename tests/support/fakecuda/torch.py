"""Stands in for torch.cuda, where torch has no CUDA: tensors in the fake driver's memory, its streams and events.

The tensors are torch's own, of the CPU, and stand in memory of the fake GPU, which the host can address.  The
connector's kernels and copies run on the fake driver's streams, and lag.  torch's operations on a CPU run at once,
where they would wait for the compute stream on a GPU; so what looks at a tensor waits first (`synchronize`).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvprefetch.shmring.gpu.cuda import Device, SharedMemory

NOT_READY = 600


class Event:
    """As torch.cuda.Event."""

    def __init__(self, device: Device, waits: bool) -> None:
        self._device, self._waits = device, waits
        self.pointer = int(device.call("eventCreateWithFlags", 2))

    def record(self, stream: Stream) -> None:
        self._device.call("eventRecord", self.pointer, stream.cuda_stream)
        if self._waits and stream.cuda_stream == 0:
            stream.synchronize()

    def query(self) -> bool:
        code = self._device.call("eventQuery", self.pointer)
        assert code in (0, NOT_READY), code
        return bool(code == 0)

    def synchronize(self) -> None:
        self._device.call("eventSynchronize", self.pointer)


class Stream:
    """As torch.cuda.Stream; `cuda_stream` is 0 for the default stream."""

    def __init__(self, device: Device, pointer: int) -> None:
        self._device, self.cuda_stream = device, pointer

    def wait_event(self, event: Event) -> None:
        self._device.call("streamWaitEvent", self.cuda_stream, event.pointer)

    def synchronize(self) -> None:
        self._device.call("streamSynchronize", self.cuda_stream)


class FakeStreams:
    """As connector.copies.TorchStreams.

    `at_once`: the compute stream is idle whenever it is recorded, since operations of a CPU follow that do not wait.
    """

    def __init__(self, device: Device, *, at_once: bool = False) -> None:
        self.device, self._at_once = device, at_once
        self.compute = Stream(device, 0)
        self._made = [device.stream(), device.stream()]
        self.side, self.overlap = (Stream(device, each.pointer) for each in self._made)
        self._events: list[Event] = []
        self._memories: list[SharedMemory] = []

    def current(self) -> Stream:
        return self.compute

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        stream.synchronize()
        yield

    def event(self) -> Event:
        self._events.append(Event(self.device, self._at_once))
        return self._events[-1]

    def on_device(self, data: npt.NDArray[np.uint8]) -> torch.Tensor:
        tensor = self.allocate(len(data))
        tensor.numpy()[:] = data
        return tensor

    def allocate(self, size: int) -> torch.Tensor:
        """Return so many bytes of device memory."""
        self._memories.append(self.device.allocate(size))
        return torch.from_numpy(array(self._memories[-1].address, size))

    def synchronize(self) -> None:
        for stream in (self.compute, self.side, self.overlap):
            stream.synchronize()

    def close(self) -> None:
        """Give everything back; no tensor may be used any more."""
        self.synchronize()
        for event in self._events:
            self.device.call("eventDestroy", event.pointer)
        for stream in self._made:
            stream.close()
        for memory in self._memories:
            memory.close()


def array(address: int, size: int) -> Any:
    """Return memory of the fake GPU as an array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
