"""The processes of one engine incarnation on the control socket: who has come, what each said, who is missing."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from dataclasses import dataclass, field

from ...shmring.wire.attach import Attached, Hello, Mapped
from ...shmring.wire.codec import Message, send_message
from ...shmring.wire.records import ProtocolError
from ..engine.epoch import Epoch
from ..engine.memory import EngineInfo
from .access import Credentials

# The scheduler comes last, when all ranks have said hello.
INCOMPLETE_S = 30.0
_NAMED_RANKS = 8


@dataclass(eq=False)
class Peer:
    """One connected process."""

    sock: socket.socket
    credentials: Credentials
    allowed: bool
    hello: Hello | None = None
    group: Group | None = None
    mapped: Mapped | None = None
    handed: bool = False  # it was sent the descriptors of its memory

    @property
    def waiting(self) -> bool:
        """It belongs to no engine that has a place; hanging up on it costs no attached engine."""
        return self.group is None or not self.group.placed

    def tell(self, message: Message) -> None:
        """Worth no waiting: lost where the process is gone, which its end of file says, or does not read."""
        with contextlib.suppress(OSError):
            send_message(self.sock, message)


@dataclass(eq=False)
class Group:
    """The processes of one engine incarnation, and their epoch once all have said hello."""

    key: tuple[str, str]
    world_size: int
    uid: int
    scheduler: Peer | None = None
    workers: dict[int, Peer] = field(default_factory=dict)
    placed: bool = False  # it counts as an attached engine: its memory is being reserved, or there
    epoch: Epoch | None = None
    waits_to_be_handed: bool = False  # its memory, until the kernel takes more descriptors
    overdue_s: float = math.inf  # when the missing ranks are to be reported; CLOCK_MONOTONIC

    @property
    def peers(self) -> list[Peer]:
        return [*self.workers.values(), *([self.scheduler] if self.scheduler is not None else [])]

    @property
    def complete(self) -> bool:
        return self.scheduler is not None and len(self.workers) == self.world_size

    def has_place(self, hello: Hello) -> bool:
        """Whether a process that says this is awaited."""
        taken = self.scheduler is not None if hello.role == "scheduler" else hello.rank in self.workers
        return not taken and not self.placed

    def join(self, peer: Peer, hello: Hello) -> None:
        """It takes its place. Raises ProtocolError where it is not of this engine."""
        if hello.world_size != self.world_size or peer.credentials.uid != self.uid:
            raise ProtocolError(
                f"differs from its engine's other processes: world_size={hello.world_size} "
                f"expected={self.world_size} uid={peer.credentials.uid} expected={self.uid}"
            )
        peer.hello, peer.group = hello, self
        if hello.role == "scheduler":
            self.scheduler = peer
            self.overdue_s = time.monotonic() + INCOMPLETE_S
        else:
            self.workers[hello.rank] = peer

    def overdue(self) -> str:
        """Ranks for which the scheduler has waited too long, as "1, 2"; "" for none. Says it once."""
        if self.complete or self.scheduler is None or time.monotonic() < self.overdue_s:
            return ""
        self.overdue_s = math.inf
        missing = [str(rank) for rank in range(self.world_size) if rank not in self.workers]
        return ", ".join(missing[:_NAMED_RANKS] + ["…"] * (len(missing) > _NAMED_RANKS))

    def leave(self, peer: Peer) -> None:
        if self.scheduler is peer:
            self.scheduler = None
        self.workers = {rank: other for rank, other in self.workers.items() if other is not peer}

    def engine(self) -> EngineInfo:
        """What its processes said when they came; only when complete."""
        assert self.scheduler is not None
        hello = self.scheduler.hello
        assert hello is not None
        assert hello.scheduler is not None
        said = [self.workers[rank].hello for rank in range(self.world_size)]
        workers = [each.worker for each in said if each is not None and each.worker is not None]
        return EngineInfo(hello.engine_id, hello.block_tokens, hello.scheduler, workers)

    def mapped(self) -> list[Mapped] | None:
        """What the workers, by rank, said when they had mapped the epoch; None until all processes have."""
        if any(peer.mapped is None for peer in self.peers):
            return None
        said = [self.workers[rank].mapped for rank in range(self.world_size)]
        return [mapped for mapped in said if mapped is not None]

    def memory_of(self, peer: Peer, epoch: Epoch) -> tuple[Attached, list[int]]:
        """The message that hands one of its processes its memory, and the descriptors that go with it."""
        if peer is self.scheduler:
            attached = Attached(
                epoch=epoch.number, segment_bytes=epoch.layout.total_bytes, slot_count=epoch.slot_count,
                slot_bytes=0, device_slots=epoch.layout.device_slots, removal_ms=epoch.removal_ms,
            )  # fmt: skip
            return attached, [epoch.control.fd, epoch.doorbell.fd]
        assert peer.hello is not None
        rank, device = peer.hello.rank, epoch.memory.device
        segment = epoch.staging.segments[rank]
        attached = Attached(
            epoch=epoch.number, segment_bytes=segment.size_bytes, slot_count=epoch.slot_count,
            slot_bytes=epoch.staging.block_bytes[rank], device_slots=epoch.layout.device_slots,
            device_handle=device.handle(rank) if device is not None else "",
            live_epochs=self.engine().scheduler.live_epochs,
        )  # fmt: skip
        return attached, [segment.fd, *([device.lease(rank)] if device is not None else [])]
