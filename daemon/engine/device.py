"""Device staging: one slab of device memory per rank, cut into slots like its host staging, and copies into it.

Threads that may wait for the device make and use it; the main loop calls only what says so.  Nothing touches CUDA
before an engine with GPUs attaches.  A slab's lease says when it may be freed (shmring/gpu/lease.py).
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...shmring.errors import DeviceError
from ...shmring.gpu import cuda
from ...shmring.gpu.calls import calls
from ...shmring.gpu.device import GRAIN_BYTES, Device, Event, Memory, Stream, exported_bytes, pieces
from ...shmring.gpu.lease import wait_for_end
from ..config.sizes import size_text, whole_mib

if TYPE_CHECKING:  # what tests on a GPU do without (docs/BENCHMARKS.md)
    from .staging import HostStaging

MAX_SLOTS = 1 << 24


@dataclass(eq=False)
class _Rank:
    """One rank's slab. `ours` and `theirs`: the ends of its lease.  `handle`: empty where the engine exports."""

    device: Device
    slot_bytes: int
    ours: socket.socket
    theirs: socket.socket | None
    memory: Memory | None = None
    handle: bytes = b""
    stream: Stream | None = None
    pinned: list[int] = field(default_factory=list)


class DeviceStaging:
    """`slots` device slots on every rank. Raises DeviceError where there can be none."""

    def __init__(
        self, block_bytes: Sequence[int], uuids: Sequence[str], *, budget_bytes: int, margin_bytes: int, allocator: str
    ) -> None:
        """Take `budget_bytes` on each GPU, as far as they are free beyond `margin_bytes`.

        `block_bytes`, `uuids`: each rank's block and GPU.  `allocator`: `daemon` or `engine`.
        """
        self.allocator, self._block_bytes, self._uuids = allocator, list(block_bytes), sorted(set(uuids))
        self._host: HostStaging | None = None
        self._lock = threading.Lock()  # around the device's use: a stream is for one thread, and a copy may take long
        self._ended = False
        self._ranks: list[_Rank] = []
        with calls.to(self._uuids):
            self._allocate(uuids, budget_bytes, margin_bytes)

    def _allocate(self, uuids: Sequence[str], budget_bytes: int, margin_bytes: int) -> None:
        devices = {uuid: cuda.open_device(uuid) for uuid in self._uuids}
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
        try:
            for uuid, size in sizes:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                rank = _Rank(devices[uuid], size, ours, theirs)
                self._ranks.append(rank)
                if self.allocator == "daemon":
                    rank.memory = rank.device.allocate(exported_bytes(self.slots * size))
                    rank.handle = rank.memory.handle()
        except BaseException:
            self.hang_up()
            self.close()
            raise

    def follow(self, host: HostStaging) -> None:
        """Copy from this host staging of the same ranks; device slots have the numbers behind its slots."""
        self._host = host

    # --- the handshake, on the main loop ----------------------------------------------------------------------------

    def handle(self, rank: int) -> str:
        """Return what the rank opens, in hexadecimal digits; empty where it allocates."""
        return self._ranks[rank].handle.hex()

    def lease(self, rank: int) -> int:
        """Return the descriptor to hand to the rank, until hang_up()."""
        theirs = self._ranks[rank].theirs
        assert theirs is not None
        return theirs.fileno()

    def hang_up(self) -> None:
        """Close our copies of the ranks' ends: they have them now, or never will."""
        for rank in self._ranks:
            if rank.theirs is not None:
                rank.theirs.close()
                rank.theirs = None

    # --- copies, on threads; the next waits for the one before ------------------------------------------------------

    def open(self, handles: Sequence[str]) -> str:
        """Get ready for copies, with each rank's handle where the engine exports. Returns an error, or ""."""

        def work() -> None:
            for rank, handle in zip(self._ranks, handles, strict=True):
                if self.allocator == "engine":
                    rank.memory = rank.device.open(bytes.fromhex(handle), self.slots * rank.slot_bytes)
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
            events = [self._queue(number, rank, slots) for number, rank in enumerate(self._ranks)]
            for event in events:
                event.wait()

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

    def _queue(self, number: int, rank: _Rank, slots: Sequence[tuple[int, int]]) -> Event:
        """Queue a rank's copies; return the event behind them."""
        assert rank.stream is not None
        assert rank.memory is not None
        assert self._host is not None
        for host, device in slots:
            target = rank.memory.address + (device - self._host.slot_count) * rank.slot_bytes
            rank.stream.copy(target, self._host.addresses(host)[number], rank.slot_bytes)
        return rank.stream.record()

    # --- the end ----------------------------------------------------------------------------------------------------

    def unpin(self) -> None:
        """Wait for the copy that runs, let go of the host staging, and copy nothing any more."""
        with self._lock, calls.to(self._uuids):
            self._ended = True
            for rank in self._ranks:
                if rank.stream is not None:
                    with contextlib.suppress(DeviceError):
                        rank.stream.close()
                    rank.stream = None
                for address in rank.pinned:
                    with contextlib.suppress(DeviceError):
                        rank.device.unregister(address)
                rank.pinned = []

    def close(self) -> None:
        """Unmap the engine's memory; free ours on a thread, as soon as no process has it mapped."""
        self.hang_up()
        ranks, self._ranks = self._ranks, []
        if ranks:
            threading.Thread(target=_give_back, args=(ranks, self.allocator), name="device-end", daemon=True).start()


def _give_back(ranks: Sequence[_Rank], allocator: str) -> None:
    for rank in ranks:
        if allocator == "daemon":
            wait_for_end(rank.ours)
        if rank.memory is not None:
            with contextlib.suppress(DeviceError), calls.to((rank.device.uuid,)):
                rank.memory.close()
        rank.ours.close()
