"""Copy between slots and this rank's paged KV, a whole step at a time: by the C extension, torch or the copy kernel.

On a GPU synchronous loads and all saves run on the compute stream, torch's current one: before the forward that reads
the blocks, behind the forward that wrote them.  Asynchronous loads run beside it on their own stream, which waits for
the compute stream's work up to the begin of the step: earlier steps may still use their blocks, this one does not.
Where no step in flight uses the blocks of synchronous loads, these run on a third stream while the step before runs
(`overlap`), and the compute stream waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...shmring.errors import DeviceError
from ...shmring.gpu import cuda
from ...shmring.gpu.cuda import Device
from ..copy import cuda_copy
from ..copy.cuda_copy import Launcher
from ..copy.paged import PagedCache

if TYPE_CHECKING:
    from ..attach.epoch import WorkerEpoch

log = logging.getLogger("vllm.kvprefetch.copies")


class Copy(NamedTuple):
    """Slot slots[i] to or from block block_ids[i]; made by `checked`."""

    epoch: WorkerEpoch
    slots: Sequence[int]
    block_ids: Sequence[int]


def checked(
    paged: PagedCache, epoch: WorkerEpoch, slots: Sequence[int], block_ids: Sequence[int], *, save: bool = False
) -> Copy:
    """Return a copy that touches nothing outside slots and blocks. Raises ValueError, IndexError."""
    if epoch.rows.shape[1] != paged.block_bytes:
        raise ValueError(f"slot size differs: slot_bytes={epoch.rows.shape[1]} block_bytes={paged.block_bytes}")
    if len(slots) != len(block_ids):
        raise ValueError(f"slots and blocks differ in number: slots={len(slots)} blocks={len(block_ids)}")
    bound = len(epoch.rows) + (epoch.device_cache.slots if epoch.device_cache is not None and not save else 0)
    for name, numbers, end in (("slot", slots, bound), ("block", block_ids, paged.num_blocks)):
        if numbers:
            array = np.asarray(numbers)
            least, most = int(array.min()), int(array.max())
            if not 0 <= least <= most < end:
                raise IndexError(f"{name} is out of bounds: {name}={most} least={least} end={end}")
    return Copy(epoch, slots, block_ids)


class PlainCopies:
    """By the C extension in host memory; by torch, block by block, on a GPU without cupy, on the current stream."""

    def __init__(self, paged: PagedCache) -> None:
        self._paged = paged

    def mark(self) -> None:
        """A step with asynchronous loads begins."""

    def run(self, copies: Sequence[Copy], *, save: bool = False, beside: bool = False, overlap: bool = False) -> Any:
        """Start copies. Return a fence with a `query()` that is true once they are done; None when they are.

        After an error any of them may be undone, and none goes on.
        """
        for epoch, slots, block_ids in copies:
            copy = self._paged.save if save else self._paged.load
            copy(epoch.rows, slots, block_ids)
        return self._paged.fence()


class TorchStreams:
    def __init__(self, device: Any) -> None:
        self._device = device
        # Higher priority than torch's own stream: its few blocks of threads do not wait for all those of the forward,
        # and it shares no hardware queue with the compute stream, where it would stand behind the forward's events.
        self.side = torch.cuda.Stream(device, priority=-1)
        self.overlap = torch.cuda.Stream(device, priority=-1)

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device.index)  # quicker than by the device, by a microsecond

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def event(self) -> Any:
        return torch.cuda.Event()

    def on_device(self, data: npt.NDArray[np.uint8]) -> Any:
        return torch.from_numpy(data).to(self._device)


class CudaCopies(PlainCopies):
    """By the copy kernel: a launch for up to STEP_BLOCKS of a step's loads or saves. Torch copies what is not pinned.

    Nothing is allocated after construction, and nothing is waited for.
    """

    def __init__(self, paged: PagedCache, device: Device, streams: TorchStreams) -> None:
        """Compile the kernel or find it compiled. Raises DeviceError, and ValueError for blocks it cannot copy."""
        super().__init__(paged)
        pieces, units = cuda_copy.piece_table(paged.pieces)
        self._streams = streams
        self._pieces = streams.on_device(pieces.view(np.uint8))
        stream = streams.current().cuda_stream
        self.launcher = Launcher(device, self._pieces.data_ptr(), units, paged.block_bytes, stream)
        self._mark: Any = None

    def mark(self) -> None:
        self._mark = self._streams.event()
        self._mark.record(self._streams.current())

    def run(self, copies: Sequence[Copy], *, save: bool = False, beside: bool = False, overlap: bool = False) -> Any:
        stream = self._streams.overlap if overlap else self._streams.current()
        if beside:
            if self._mark is None:
                self.mark()
            stream = self._streams.side
            stream.wait_event(self._mark)
            self._mark = None
        try:
            for copy in _by_epoch(copies):
                self._copy(copy, stream, save=save, beside=beside or overlap)
            fence = self._streams.event()
            fence.record(stream)
            if overlap:
                self._streams.current().wait_event(fence)
        except BaseException:
            stream.synchronize()  # no queued copy may outlast the answer that it failed
            raise
        return fence

    def _copy(self, copy: Copy, stream: Any, *, save: bool, beside: bool) -> None:
        epoch, slots, block_ids = copy
        host, cache = len(epoch.rows), epoch.device_cache
        pinned = 0 if cache is None else cache.pinned
        if pinned < host and any(pinned <= slot < host for slot in slots):
            pairs = list(zip(slots, block_ids, strict=True))
            with self._streams.use(stream):
                by_torch = self._paged.save if save else self._paged.load
                by_torch(epoch.rows, *zip(*[pair for pair in pairs if pinned <= pair[0] < host], strict=True))
            if not (pairs := [pair for pair in pairs if not pinned <= pair[0] < host]):
                return
            slots, block_ids = zip(*pairs, strict=True)
        self.launcher.set_addresses(epoch.rows.ctypes.data, host, 0 if cache is None else cache.address)
        most = cuda_copy.BESIDE_BLOCKS if beside and min(slots, default=host) < host else None
        for start in range(0, len(slots), cuda_copy.STEP_BLOCKS):
            stop = start + cuda_copy.STEP_BLOCKS
            self.launcher.launch(slots[start:stop], block_ids[start:stop], stream.cuda_stream, gather=save, most=most)


def _by_epoch(copies: Sequence[Copy]) -> Iterator[Copy]:
    """Join the copies of each epoch; nearly always there is one epoch, and one copy."""
    if len(copies) == 1:  # its array of slots, which NumPy takes faster than a list
        yield copies[0]
        return
    for epoch in {copy.epoch.number: copy.epoch for copy in copies}.values():
        mine = [copy for copy in copies if copy.epoch is epoch]
        yield Copy(epoch, [*chain(*(one.slots for one in mine))], [*chain(*(one.block_ids for one in mine))])


def for_cache(paged: PagedCache) -> tuple[PlainCopies, Device | None]:
    """Choose how to copy to and from this cache, and the device for device slots; None: host slots only."""
    if paged.device.type != "cuda":
        return PlainCopies(paged), None
    try:
        device = cuda.open_device(cuda.uuid_of(paged.device.index or 0))
        return CudaCopies(paged, device, TorchStreams(paged.device)), device
    except (DeviceError, ValueError) as error:
        log.warning("kvprefetch: no staging in device memory, and copies go block by block: %s", error)
        return PlainCopies(paged), None
