"""Copies between slots and this rank's paged KV, those of a step together: by NumPy or torch, or by the copy kernel.

On a GPU synchronous loads and all saves run on the compute stream, that is torch's current one: before the forward that
reads the blocks, behind the one that wrote them.  Asynchronous loads run beside it on a stream of their own, which
waits for what the compute stream held when the step began: steps before may still use their blocks, this one does not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..shmring import cuda
from ..shmring.cuda import Device, DeviceError
from . import cuda_copy
from .cuda_copy import STEP, STEP_BLOCKS
from .paged import PagedCache

if TYPE_CHECKING:
    from .session import WorkerSession

log = logging.getLogger("vllm.kvprefetch.copies")


class Copy(NamedTuple):
    """Slot slots[i] to or from block block_ids[i]; made by `checked`."""

    session: WorkerSession
    slots: Sequence[int]
    block_ids: Sequence[int]


class Copies(Protocol):
    """How a step's copies are done."""

    def mark(self) -> None:
        """A step with asynchronous loads begins."""

    def run(self, copies: Sequence[Copy], *, save: bool = False, beside: bool = False) -> Any:
        """Start copies; something whose `query()` is true once they are done, or None when they are.

        An error says that any of them may be undone, and that none goes on.
        """


def checked(
    paged: PagedCache, session: WorkerSession, slots: Sequence[int], block_ids: Sequence[int], *, save: bool = False
) -> Copy:
    """A copy that touches nothing outside slots and blocks. Raises ValueError, IndexError."""
    if session.rows.shape[1] != paged.block_bytes:
        raise ValueError(f"slot size differs: slot_bytes={session.rows.shape[1]} block_bytes={paged.block_bytes}")
    if len(slots) != len(block_ids):
        raise ValueError(f"slots and blocks differ in number: slots={len(slots)} blocks={len(block_ids)}")
    bound = len(session.rows) + (session.tier.slots if session.tier is not None and not save else 0)
    for name, numbers, end in (("slot", slots, bound), ("block", block_ids, paged.num_blocks)):
        if numbers and not (min(numbers) >= 0 and max(numbers) < end):
            raise IndexError(f"{name} is out of bounds: {name}={max(numbers)} least={min(numbers)} end={end}")
    return Copy(session, slots, block_ids)


class PlainCopies:
    """By NumPy in host memory; by torch, block by block, for a GPU without cupy. All on the current stream."""

    def __init__(self, paged: PagedCache) -> None:
        self._paged = paged

    def mark(self) -> None:
        pass

    def run(self, copies: Sequence[Copy], *, save: bool = False, beside: bool = False) -> Any:
        for session, slots, block_ids in copies:
            if save:
                self._paged.save(session.rows, slots, block_ids)
                continue
            host = len(session.rows)
            pairs = list(zip(slots, block_ids, strict=True))
            near = [(slot - host, block) for slot, block in pairs if slot >= host]
            if near:
                assert session.tier is not None
                self._paged.load(session.tier.rows, *zip(*near, strict=True))
            if far := [(slot, block) for slot, block in pairs if slot < host]:
                self._paged.load(session.rows, *zip(*far, strict=True))
        return self._paged.fence()


class Streams(Protocol):
    """torch's streams and events of one GPU."""

    side: Any

    def current(self) -> Any: ...
    def use(self, stream: Any) -> AbstractContextManager[Any]: ...
    def event(self) -> Any: ...
    def on_device(self, data: npt.NDArray[np.uint8]) -> Any: ...


class TorchStreams:
    """The streams of the GPU that the paged cache is on."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.side = torch.cuda.Stream(device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def event(self) -> Any:
        return torch.cuda.Event()

    def on_device(self, data: npt.NDArray[np.uint8]) -> Any:
        return torch.from_numpy(data).to(self._device)


class CudaCopies:
    """By the copy kernel: one launch for a step's loads or saves. Host slots that are not pinned yet go torch's way.

    Nothing is allocated after construction, and nothing is waited for.
    """

    def __init__(self, paged: PagedCache, device: Device, streams: Streams) -> None:
        """Compile the kernel or find it compiled. Raises DeviceError, and ValueError for blocks it cannot copy."""
        pieces, self._units = cuda_copy.piece_table(paged.pieces)
        self._paged, self._device, self._streams = paged, device, streams
        self._kernel = device.kernel(cuda_copy.SOURCE, cuda_copy.KERNEL)
        self._pieces = streams.on_device(pieces.view(np.uint8))
        self._step = np.zeros(1, STEP)
        self._fields = {name: self._step[name][0:1] for name in ("host", "device", "host_slots", "count", "gather")}
        self._slots, self._blocks = self._step["slots"][0], self._step["blocks"][0]
        self._step["pieces"], self._step["slot_bytes"] = self._pieces.data_ptr(), paged.block_bytes
        self._step["units"] = self._units
        self._mark: Any = None

    def mark(self) -> None:
        self._mark = self._streams.event()
        self._mark.record(self._streams.current())

    def run(self, copies: Sequence[Copy], *, save: bool = False, beside: bool = False) -> Any:
        stream = self._streams.current()
        if beside:
            if self._mark is None:
                self.mark()
            stream = self._streams.side
            stream.wait_event(self._mark)
            self._mark = None
        try:
            for session, slots, block_ids in _by_session(copies):
                self._copy(session, slots, block_ids, stream, save=save)
            fence = self._streams.event()
            fence.record(stream)
        except BaseException:
            stream.synchronize()  # what was queued must not outlast the answer that it failed
            raise
        return fence

    def _copy(
        self, session: WorkerSession, slots: Sequence[int], block_ids: Sequence[int], stream: Any, *, save: bool
    ) -> None:
        host, tier = len(session.rows), session.tier
        pinned = 0 if tier is None else tier.pinned
        if pinned < host and any(pinned <= slot < host for slot in slots):
            pairs = list(zip(slots, block_ids, strict=True))
            with self._streams.use(stream):
                copy = self._paged.save if save else self._paged.load
                copy(session.rows, *zip(*[pair for pair in pairs if pinned <= pair[0] < host], strict=True))
            if not (pairs := [pair for pair in pairs if not pinned <= pair[0] < host]):
                return
            slots, block_ids = zip(*pairs, strict=True)
        fields = self._fields
        fields["host"][0], fields["host_slots"][0] = session.rows.ctypes.data, host
        fields["device"][0], fields["gather"][0] = 0 if tier is None else tier.address, save
        for start in range(0, len(slots), STEP_BLOCKS):
            part = slots[start : start + STEP_BLOCKS]
            count = len(part)
            self._slots[:count], self._blocks[:count] = part, block_ids[start : start + STEP_BLOCKS]
            fields["count"][0] = count
            grid = cuda_copy.grid_for(self._units, count, self._device.processors)
            self._kernel.launch(grid, cuda_copy.THREADS, self._step, stream.cuda_stream)


def _by_session(copies: Sequence[Copy]) -> Iterable[Copy]:
    """The copies of one session as one; nearly always there is one session."""
    if len(copies) == 1:
        return copies
    joined: dict[int, tuple[WorkerSession, list[int], list[int]]] = {}
    for session, slots, block_ids in copies:
        _, all_slots, all_blocks = joined.setdefault(session.epoch, (session, [], []))
        all_slots.extend(slots)
        all_blocks.extend(block_ids)
    return [Copy(*one) for one in joined.values()]


def for_cache(paged: PagedCache) -> tuple[Copies, Device | None]:
    """How to copy to and from this cache, and the device that its slots may lie on; None where only the host's may."""
    kind, index = paged.device.type, paged.device.index
    try:
        uuid = cuda.uuid_of(kind, index if index is not None else 0)
        if not uuid:
            return PlainCopies(paged), None
        device = cuda.open_device(uuid)
        if kind == "cpu":
            return PlainCopies(paged), device
        return CudaCopies(paged, device, TorchStreams(paged.device)), device
    except (DeviceError, ValueError) as error:
        log.warning("kvprefetch: no staging in device memory, and copies go block by block: %s", error)
        return PlainCopies(paged), None
