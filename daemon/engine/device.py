"""Device staging: one slab of device memory per rank, cut into slots like its host staging, and copies into it.

Threads that may wait for the device make and use it; the main loop calls only what says so.  Nothing touches CUDA
before an engine with GPUs attaches.  Daemon and engine let go of a slab in any order (shmring/gpu/cuda.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...shmring.errors import DeviceError
from ...shmring.gpu import cuda
from ...shmring.gpu.cuda import Device, SharedMemory, Stream
from ...shmring.gpu.driver import GRAIN_BYTES, calls, pieces
from ..config.sizes import size_text, whole_mib

if TYPE_CHECKING:  # what tests on a GPU do without (docs/BENCHMARKS.md)
    from .staging import HostStaging

MAX_SLOTS = 1 << 24


@dataclass(eq=False)
class _Rank:
    """One rank's slab. `descriptor`: what its worker opens, until the worker has it; then -1."""

    device: Device
    slot_bytes: int
    memory: SharedMemory
    descriptor: int
    stream: Stream | None = None
    pinned: list[int] = field(default_factory=list)


class DeviceStaging:
    """`slots` device slots on every rank, whose GPUs are on these NUMA `nodes` (-1: not known).

    Raises DeviceError where there can be none.
    """

    def __init__(
        self, block_bytes: Sequence[int], uuids: Sequence[str], *, budget_bytes: int, margin_bytes: int
    ) -> None:
        """Take `budget_bytes` on each GPU, as far as they are free beyond `margin_bytes`.

        `block_bytes`, `uuids`: each rank's block and GPU.
        """
        self._block_bytes, self._uuids = list(block_bytes), sorted(set(uuids))
        self._host: HostStaging | None = None
        self._lock = threading.Lock()  # around the device's use: a stream is for one thread, and a copy may take long
        self._ended = False
        self._ranks: list[_Rank] = []
        self._pinned: list[tuple[Device, int]] = []  # what is left to unpin after the end
        try:
            with calls.to(self._uuids):
                self._allocate(uuids, budget_bytes, margin_bytes)
        except BaseException:
            self.close()
            raise

    def _allocate(self, uuids: Sequence[str], budget_bytes: int, margin_bytes: int) -> None:
        devices = {uuid: cuda.open_device(uuid) for uuid in self._uuids}
        self.nodes = [devices[uuid].numa_node() for uuid in uuids]
        sharing = Counter(uuids)
        room = {
            uuid: min(budget_bytes, device.free_bytes() - margin_bytes) // sharing[uuid] // GRAIN_BYTES * GRAIN_BYTES
            for uuid, device in devices.items()
        }
        sizes = list(zip(uuids, self._block_bytes, strict=True))
        self.slots = min(MAX_SLOTS, *(max(0, room[uuid]) // size for uuid, size in sizes))
        if self.slots == 0:
            least = min(room, key=lambda uuid: room[uuid])
            raise DeviceError(
                f"no room for a block: uuid={least} room={whole_mib(room[least])} "
                f"block={size_text(max(self._block_bytes))} device_staging={size_text(budget_bytes)} "
                f"device_margin={size_text(margin_bytes)}"
            )
        for uuid, size in sizes:
            memory = devices[uuid].allocate(self.slots * size)
            self._ranks.append(_Rank(devices[uuid], size, memory, -1))
            self._ranks[-1].descriptor = memory.export()

    def follow(self, host: HostStaging) -> None:
        """Copy from this host staging of the same ranks; device slots have the numbers behind its slots."""
        self._host = host

    # --- the handshake, on the main loop ----------------------------------------------------------------------------

    def descriptor(self, rank: int) -> int:
        """Return the descriptor to hand to the rank, until hang_up()."""
        return self._ranks[rank].descriptor

    def hang_up(self) -> None:
        """Close the ranks' descriptors: they have them now, or never will."""
        for rank in self._ranks:
            descriptor, rank.descriptor = rank.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    # --- copies, on threads; the next waits for the one before ------------------------------------------------------

    def open(self) -> str:
        """Get ready for copies. Returns an error, or ""."""

        def work() -> None:
            for rank in self._ranks:
                rank.stream = rank.device.stream()

        return self._use(work)

    def pieces(self) -> list[tuple[int, int, int]]:
        """Return (rank, address, bytes) of the pieces of host staging to pin."""
        assert self._host is not None
        return [
            (number, base + offset, size)
            for number, (base, whole) in enumerate(self._host.areas())
            for offset, size in pieces(whole, self._block_bytes[number])
        ]

    def pin(self, number: int, address: int, size_bytes: int) -> str:
        """Pin one piece, so that copies from it need no bounce. Returns an error, or ""."""

        def work() -> None:
            self._ranks[number].device.register(address, size_bytes)
            self._ranks[number].pinned.append(address)

        return self._use(work)

    def copy(self, slots: Sequence[tuple[int, int]]) -> str:
        """Copy (host slot, device slot) on every rank, and wait for the copies. Returns an error, or ""."""

        def work() -> None:
            for stream in [self._queue(number, rank, slots) for number, rank in enumerate(self._ranks)]:
                stream.wait()

        return self._use(work)

    def _use(self, work: Callable[[], None]) -> str:
        with self._lock:
            try:
                if self._ended:
                    return "the engine is gone"
                with calls.to(self._uuids):
                    work()
            except DeviceError as error:
                return str(error)
            return ""

    def _queue(self, number: int, rank: _Rank, slots: Sequence[tuple[int, int]]) -> Stream:
        assert rank.stream is not None
        assert self._host is not None
        for host, device in slots:
            target = rank.memory.address + (device - self._host.slot_count) * rank.slot_bytes
            rank.stream.copy(target, self._host.addresses(host)[number], rank.slot_bytes)
        return rank.stream

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Wait for the copy that runs, then give back all of it; the engine's mappings of the slabs stay.

        Return False where the driver did not let go of host memory, which must stay mapped: call again then.
        """
        with self._lock, calls.to(self._uuids):
            self._ended = True
            self.hang_up()
            ranks, self._ranks = self._ranks, []
            for rank in ranks:
                if rank.stream is not None:
                    with contextlib.suppress(DeviceError):
                        rank.stream.close()
                with contextlib.suppress(DeviceError):
                    rank.memory.close()
                self._pinned += [(rank.device, address) for address in rank.pinned]
            for each in list(self._pinned):
                with contextlib.suppress(DeviceError):
                    each[0].unregister(each[1])
                    self._pinned.remove(each)
            return not self._pinned
