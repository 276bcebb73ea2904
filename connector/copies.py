"""Copies between slots and this rank's paged KV, those of a step together: by NumPy or torch, or by the copy kernel.

On a GPU synchronous loads and all saves run on the compute stream, that is torch's current one: before the forward that
reads the blocks, behind the one that wrote them.  Asynchronous loads run beside it on a stream of their own, which
waits for what the compute stream held when the step began: steps before may still use their blocks, this one does not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..shmring import cuda
from ..shmring.cuda import Device, DeviceError
from . import cuda_copy
from .cuda_copy import ENTRY
from .paged import PagedCache
from .session import WorkerSession

# Blocks of one launch, and how many launches' tables may be in use before one has to be waited for.
TABLE_ENTRIES = 4096
TABLES = 16
# A table this short is read where it lies, in host memory: sooner there than a copy of it would be.
SHORT_TABLE = 8

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
    def pinned(self, size_bytes: int) -> Any: ...
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

    def pinned(self, size_bytes: int) -> Any:
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)

    def on_device(self, data: npt.NDArray[np.uint8]) -> Any:
        return torch.from_numpy(data).to(self._device)


class _Table:
    """The kernel's table of one launch: pinned, and room for a copy of it on the device."""

    def __init__(self, streams: Streams, entries: int) -> None:
        self.host = streams.pinned(entries * ENTRY.itemsize)
        self.device = streams.on_device(np.zeros(entries * ENTRY.itemsize, np.uint8))
        self.entries = self.host.numpy().view(ENTRY)
        self.event: Any = None


class CudaCopies:
    """By the copy kernel: one launch for a step's loads or saves. Host slots that are not pinned yet go torch's way.

    Nothing is allocated after construction, and nothing is waited for unless TABLES launches are under way.
    """

    def __init__(self, paged: PagedCache, device: Device, streams: Streams, entries: int = TABLE_ENTRIES) -> None:
        """Compile the kernel or find it compiled. Raises DeviceError, and ValueError for blocks it cannot copy."""
        pieces, self._units = cuda_copy.piece_table(paged.pieces)
        self._paged, self._device, self._streams = paged, device, streams
        self._kernel = device.kernel(cuda_copy.SOURCE, cuda_copy.KERNEL)
        self._pieces = streams.on_device(pieces.view(np.uint8))
        self._entries = cuda_copy.entries_per_launch(self._units, entries)
        self._tables = [_Table(streams, self._entries) for _ in range(TABLES)]
        self._next = 0
        self._params = np.zeros(5, np.uint64)
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
        fence = self._streams.event()
        try:
            for rows, block_ids in self._direct(copies, stream, save=save):
                self._launch(rows, block_ids, stream, save=save).event = fence
                # After each launch: so many blocks may come that their tables are used again within this call.
                fence.record(stream)
        except BaseException:
            stream.synchronize()  # what was queued must not outlast the answer that it failed
            raise
        return fence

    def _direct(self, copies: Sequence[Copy], stream: Any, *, save: bool) -> Iterator[tuple[Any, Any]]:
        """(addresses of slots, blocks) for the kernel, in portions of a table; the others are copied by torch."""
        found: list[tuple[Any, Any]] = []
        for session, slots, block_ids in copies:
            host, slot_bytes = len(session.rows), self._paged.block_bytes
            numbers, blocks = np.array(slots, np.int64), np.array(block_ids, np.int64)
            pinned, device_base = 0, 0
            if session.tier is not None:
                pinned, device_base = session.tier.pinned, session.tier.address
            if pinned < host:
                direct = (numbers < pinned) | (numbers >= host)
                if not direct.all():
                    with self._streams.use(stream):
                        copy = self._paged.save if save else self._paged.load
                        copy(session.rows, numbers[~direct].tolist(), blocks[~direct].tolist())
                    numbers, blocks = numbers[direct], blocks[direct]
            base = np.where(numbers < host, session.rows.ctypes.data, device_base - host * slot_bytes)
            found.append((base + numbers * slot_bytes, blocks))
        rows, all_blocks = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
        for start in range(0, max(1, len(rows)), self._entries):
            yield rows[start : start + self._entries], all_blocks[start : start + self._entries]

    def _launch(self, rows: Any, block_ids: Any, stream: Any, *, save: bool) -> _Table:
        table = self._tables[self._next]
        self._next = (self._next + 1) % len(self._tables)
        if table.event is not None and not table.event.query():
            table.event.synchronize()
        count = len(rows)
        if not count:  # all went torch's way
            return table
        table.entries["row"][:count] = rows
        table.entries["block"][:count] = block_ids
        address = table.host.data_ptr()
        if count > SHORT_TABLE:
            size = count * ENTRY.itemsize
            with self._streams.use(stream):
                table.device[:size].copy_(table.host[:size], non_blocking=True)
            address = table.device.data_ptr()
        self._params[:] = (self._pieces.data_ptr(), self._units, address, count, save)
        grid = cuda_copy.grid_for(self._units, count, self._device.processors)
        self._kernel.launch(grid, cuda_copy.THREADS, self._params, stream.cuda_stream)
        return table


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
