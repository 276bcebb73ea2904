"""Where the tests of this folder run: on a GPU with torch's CUDA, for `make gpu`, or on the fake driver, by default."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from kvprefetch.connector.copy.device_cache import DeviceCache
from kvprefetch.connector.copy.paged import PagedCache
from kvprefetch.connector.worker.copies import CudaCopies, TorchStreams
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.cuda import Device
from tests.gpu.peer import ON_GPU
from tests.support.layouts import caches

BUSY_S = 0.5
BUSY_CYCLES = 1_000_000_000  # about as long


class GpuSide:
    """torch on a GPU."""

    def __init__(self) -> None:
        self.device = cuda.open_device(cuda.uuid_of(0))

    def allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cuda:0")

    def copies(self, paged: PagedCache) -> CudaCopies:
        return CudaCopies(paged, self.device, TorchStreams(torch.device("cuda:0")))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def busy(self) -> Callable[[], bool]:
        """Keep the compute stream busy for a while; the result says whether it still is."""
        torch.cuda._sleep(BUSY_CYCLES)
        return self.queued()

    def queued(self) -> Callable[[], bool]:
        """Return what says whether the compute stream still works at what is queued by now."""
        event = torch.cuda.Event()
        event.record()
        return lambda: not event.query()

    def captured(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Capture a copy between tensors in a graph; return what replays it on the compute stream."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            target.copy_(source)
        replay: Callable[[], None] = graph.replay
        return replay

    def close(self) -> None:
        pass


class FakeSide:
    """The fake driver; tensors of torch's CPU build in its memory."""

    def __init__(self) -> None:
        from tests.support import fakecuda
        from tests.support.fakecuda.torch import FakeStreams

        fakecuda.load()
        self.device: Device = cuda.open_device(fakecuda.UUID)
        self._streams = FakeStreams(self.device)
        self.allocate = self._streams.allocate
        self._made = [self._streams]
        self._new, self._global_mode = FakeStreams, fakecuda.GLOBAL_MODE

    def copies(self, paged: PagedCache) -> CudaCopies:
        self._made.append(self._new(self.device))
        streams: Any = self._made[-1]
        return CudaCopies(paged, self.device, streams)

    def synchronize(self) -> None:
        for streams in self._made:
            streams.synchronize()

    def busy(self) -> Callable[[], bool]:
        self.device.call("launchHostFunc", 0, lambda _: time.sleep(BUSY_S), 0)
        return self.queued()

    def queued(self) -> Callable[[], bool]:
        event = self._streams.event()
        event.record(self._streams.compute)
        return lambda: not event.query()

    def captured(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        stream, call = self.device.stream(), self.device.call
        call("streamBeginCapture", stream.pointer, self._global_mode)
        stream.copy(target.data_ptr(), source.data_ptr(), source.nbytes)
        graph = call("graphInstantiate", call("streamEndCapture", stream.pointer))
        stream.close()
        return lambda: call("graphLaunch", graph, 0)

    def close(self) -> None:
        for streams in self._made:
            streams.close()


def side() -> GpuSide | FakeSide:
    return GpuSide() if ON_GPU else FakeSide()


class PinnedCache:
    """As a DeviceCache: it pins the host slots, but its slab is memory of this process."""

    def __init__(self, device: Device, rows: Any, slots: int) -> None:
        self._memory = device.allocate(slots * rows.shape[1])
        attached: Any = SimpleNamespace(device_slots=0, slot_bytes=rows.shape[1])
        self._pins = DeviceCache(device, rows, attached, None)
        self.slots, self.address = slots, self._memory.address

    @property
    def pinned(self) -> int:
        return self._pins.pinned

    def close(self) -> None:
        self._pins.end()
        assert self._pins.join(60)
        self._memory.close()


def kv_caches(layout: str, dtype: Any, sizes: dict[str, int], on: GpuSide | FakeSide) -> dict[str, torch.Tensor]:
    """Return a paged cache of random bytes in device memory."""
    return caches(layout, dtype, sizes=sizes, allocate=on.allocate)
