"""Stands in for an engine: its processes attach over the control socket, and it serves requests over shared memory."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.liveness import PeerStatus
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.attach import Attached, Mapped, SchedulerInfo, WorkerInfo
from kvprefetch.shmring.wire.codec import receive_message, send_message
from kvprefetch.shmring.wire.records import NO_SESSION, FlagState, Outcome, RecordKind
from tests.support.engine_side import BLOCK_BYTES, EngineSide, EngineSpec, Key
from tests.support.waiting import eventually

__all__ = ["BLOCK_BYTES", "FakeEngine", "answer"]
M = TypeVar("M")


def answer(sock: socket.socket, *kinds: type[M]) -> M:
    """Return the daemon's next message, which is of one of these kinds. Descriptors that come with it are closed."""
    received = receive_message(sock)
    assert received is not None
    for fd in received[1]:
        os.close(fd)
    assert isinstance(received[0], kinds), received[0]
    return received[0]


class FakeEngine(EngineSide):
    """Scheduler and workers of one engine, attached to the daemon behind `path`. `spec`: fields of EngineSpec.

    With `device`, the UUID of a GPU, every rank has this GPU.
    """

    made: ClassVar[list[FakeEngine]] = []  # for the fixture that closes what a failed test left open

    def __init__(self, path: Path, *, attach: bool = True, **spec: Any) -> None:
        FakeEngine.made.append(self)
        self.path = path
        self.spec = EngineSpec(**spec)
        self.gpu = cuda.open_device(self.spec.device) if self.spec.device else None
        self.disk_blocks: int | None = None  # of the last load: blocks that came from disk
        self.sockets: list[socket.socket] = []
        self.staging: list[Segment] = []
        self.slabs: list[cuda.SharedMemory] = []
        if attach:
            self.attach()

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(10)
        sock.connect(str(self.path))
        self.sockets.append(sock)
        return sock

    def greet(self, role: str, rank: int = 0, **changes: object) -> socket.socket:
        """Connect, and say hello; `changes`: fields of the hello."""
        sock = self.connect()
        send_message(sock, self.spec.hello(role, rank, **changes))
        return sock

    def greet_all(self, **infos: WorkerInfo | SchedulerInfo) -> list[socket.socket]:
        """Connect and greet as every process, the scheduler last; `infos`: by role, other ones than the spec's."""
        roles = [*[("worker", rank) for rank in range(self.spec.ranks)], ("scheduler", 0)]
        return [self.greet(role, rank, **({role: infos[role]} if role in infos else {})) for role, rank in roles]

    def attach(self) -> None:
        *workers, self.scheduler = self.greet_all()
        for sock in workers:
            attached, fds = self.receive(sock)
            self.staging.append(Segment(fds[0], attached.segment_bytes))
            send_message(sock, self.mapped(attached, fds[1:]))
        attached, fds = self.receive(self.scheduler)
        self.epoch = attached.epoch
        self.control = Segment(fds[0], attached.segment_bytes)
        self.bell = Doorbell(fds[1])
        self.open(self.control.buffer, self.bell.ring)
        send_message(self.scheduler, Mapped(epoch=attached.epoch))
        eventually(lambda: self.liveness.peer(time.monotonic_ns()) is PeerStatus.ALIVE, what="ACTIVE")

    def mapped(self, attached: Attached, slabs: list[int]) -> Mapped:
        """Return a worker's answer, once it has its device slots."""
        for slab in slabs:
            if self.gpu is not None:
                self.slabs.append(self.gpu.open(slab, attached.device_slots * attached.slot_bytes))
            os.close(slab)
        return Mapped(epoch=attached.epoch, device=bool(slabs) and self.gpu is not None)

    def receive(self, sock: socket.socket) -> tuple[Attached, list[int]]:
        received = receive_message(sock)
        assert received is not None
        assert isinstance(received[0], Attached), received
        return received[0], received[1]

    def load(
        self, digests: list[bytes], *, local: int = 0, name: str = "request", session: bytes = NO_SESSION
    ) -> list[bytes] | None:
        """Hint, wait, claim, read rank 0's slots and release; return the bytes of each block, None for a miss."""
        key = self.hint(digests, local=local, name=name, session=session)
        flag = self.settled(key)
        assert flag.state == FlagState.READY
        self.disk_blocks = self.table.disk(key[0])
        if flag.count <= local:
            self.cancel(key, Outcome.MISS)
            return None
        values = self.take(key, local)
        assert values is not None
        return values

    def take(self, key: Key, local: int = 0) -> list[bytes] | None:
        """Claim, read rank 0's slots and release; None where it is claimed no more."""
        count = self.flag(key).count - local
        if not self.move(key, FlagState.CLAIMED):
            return None
        values = [self.read(slot) for slot in self.slots(key, 0, count)]
        assert self.move(key, FlagState.RELEASED)
        self.done(key, loaded=count, start=local)
        return values

    def read(self, slot: int, rank: int = 0) -> bytes:
        size = self.spec.block_bytes
        if slot >= self.layout.slot_count:
            return ctypes.string_at(self.slabs[rank].address + (slot - self.layout.slot_count) * size, size)
        return bytes(self.staging[rank].buffer[slot * size : (slot + 1) * size])

    def save(self, blocks: dict[bytes, bytes], *, reset_generation: int = 0, save_id: int = 1) -> None:
        """Copy values (the same on every rank) into granted slots and send the save."""
        eventually(lambda: self.credits.available() >= len(blocks), what="credits")
        slots, size = self.credits.take(len(blocks)), self.spec.block_bytes
        for slot, value in zip(slots, blocks.values(), strict=True):
            for segment in self.staging:
                segment.buffer[slot * size : (slot + 1) * size] = value
        saved = records.Saved(save_id, reset_generation, False, slots, [digest + b"\0" for digest in blocks])
        self.push(RecordKind.SAVED, records.encode_saved(saved))

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.sockets = []
        for slab in self.slabs:
            slab.close()
        self.slabs = []
        if self.staging:
            self.release()
            self.control.close()
            self.bell.close()
            for segment in self.staging:
                segment.close()
            self.staging = []
