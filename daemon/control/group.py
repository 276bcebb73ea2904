"""The processes of one engine incarnation on the control socket: those that are there, and the missing ones."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from ...shmring.wire.attach import Attached, Hello, Mapped
from ...shmring.wire.codec import Message, send_message
from ...shmring.wire.records import ProtocolError
from ..engine.epoch import Epoch
from ..engine.memory import EngineInfo, groups_of
from .access import Credentials

INCOMPLETE_NS = 30_000_000_000  # in each stage but the first
WARM_UP_NS = 600_000_000_000  # of an engine, whose ranks say hello before it and whose scheduler does after it
NAMED = 8


class Stage(Enum):
    """What an engine waits for between its first hello and its attachment."""

    SCHEDULER = "its scheduler, which comes once the engine is warm"
    RANKS = "missing"  # the ranks that are named
    MEMORY = "its memory, which the daemon reserves"
    DESCRIPTORS = "its memory, as processes of the daemon's user leave descriptors unread"
    MAPPING = "its memory to be mapped"  # by the ranks that are named
    ATTACHED = ""


@dataclass(eq=False)
class Peer:
    """One connected process. `allowed`: its user may attach."""

    sock: socket.socket
    credentials: Credentials
    allowed: bool
    hello: Hello | None = None
    group: EngineGroup | None = None
    mapped: Mapped | None = None
    handed: bool = False  # it was sent the descriptors of its memory
    read_ns: int = 0  # when the loop read a message of it last

    @property
    def waiting(self) -> bool:
        """Whether it belongs to no engine that has a place: closing its connection costs no attached engine."""
        return self.group is None or not self.group.placed

    def send(self, message: Message) -> bool:
        """Send without waiting; True where the process has to read before it gets a message. This one is lost then."""
        try:
            send_message(self.sock, message)
        except BlockingIOError:
            return True
        except OSError:  # it is gone
            return False
        return False


@dataclass(eq=False)
class EngineGroup:
    """The processes of one engine incarnation, and their epoch once all have said hello."""

    key: tuple[str, str]
    world_size: int
    uid: int
    members: dict[tuple[str, int], Peer] = field(default_factory=dict)  # by role and rank
    placed: bool = False  # it counts as an attached engine: its memory is reserved, or is being reserved
    number: int = 0  # of its epoch, once it has a place
    epoch: Epoch | None = None
    attached: bool = False  # all its processes have mapped their memory
    waits_to_be_handed: bool = False  # its memory, until the kernel takes more descriptors in flight
    overdue: bool = False  # it was too long in this stage, and that was reported
    _stage: Stage = Stage.ATTACHED  # as the last tick saw it, since `since_ns`
    since_ns: int = 0

    @property
    def peers(self) -> list[Peer]:
        return list(self.members.values())

    @property
    def scheduler(self) -> Peer | None:
        return self.members.get(("scheduler", 0))

    @property
    def complete(self) -> bool:
        return len(self.members) == self.world_size + 1

    def join(self, peer: Peer, hello: Hello) -> None:
        """Add a process. Raises ProtocolError where it differs from the engine's other processes."""
        if hello.world_size != self.world_size or peer.credentials.uid != self.uid:
            raise ProtocolError(
                f"differs from its engine's other processes: world_size={hello.world_size} "
                f"expected={self.world_size} uid={peer.credentials.uid} expected={self.uid}"
            )
        peer.hello, peer.group = hello, self
        self.members[hello.role, hello.rank] = peer

    @property
    def stage(self) -> Stage:
        if self.scheduler is None:
            return Stage.SCHEDULER
        if not self.complete:
            return Stage.RANKS
        if self.epoch is None:
            return Stage.MEMORY
        if self.waits_to_be_handed:
            return Stage.DESCRIPTORS
        return Stage.ATTACHED if self.attached else Stage.MAPPING

    def becomes_overdue(self, now_ns: int) -> bool:
        """Whether it has just been in one stage for too long."""
        if (stage := self.stage) is not self._stage:
            self._stage, self.since_ns, self.overdue = stage, now_ns, False
        patience_ns = WARM_UP_NS if stage is Stage.SCHEDULER else INCOMPLETE_NS
        if self.overdue or stage is Stage.ATTACHED or now_ns - self.since_ns < patience_ns:
            return False
        self.overdue = True
        return True

    def late(self) -> str:
        """Name the ranks that it waits for, the first of them; "" where it waits for something else."""
        ranks = [self.members.get(("worker", rank)) for rank in range(self.world_size)]
        if self.epoch is None:
            late = [rank for rank, peer in enumerate(ranks) if peer is None]
        else:
            late = [rank for rank, peer in enumerate(ranks) if peer is not None and peer.mapped is None]
        return ", ".join([*map(str, late[:NAMED]), *(["…"] if len(late) > NAMED else [])])

    def waits_for(self) -> str:
        stage, late = self.stage, self.late()
        return f"{stage.value}: rank {late}" if stage in (Stage.RANKS, Stage.MAPPING) and late else stage.value

    def leave(self, peer: Peer) -> None:
        self.members = {place: other for place, other in self.members.items() if other is not peer}

    def workers(self) -> list[Peer]:
        """Return the workers by rank; only of a complete group."""
        return [self.members["worker", rank] for rank in range(self.world_size)]

    def engine(self) -> EngineInfo:
        """Return the engine that the processes' hellos describe; only of a complete group."""
        assert self.scheduler is not None
        hello = self.scheduler.hello
        assert hello is not None
        assert hello.scheduler is not None
        hellos = [peer.hello for peer in self.workers()]
        workers = [each.worker for each in hellos if each is not None and each.worker is not None]
        pid = self.scheduler.credentials.pid
        return EngineInfo(hello.engine_id, groups_of(hello.scheduler), hello.scheduler, workers, pid, self.uid)

    def mapped(self) -> list[Mapped] | None:
        """Return the workers' Mapped messages, by rank; None until all processes have sent theirs."""
        if any(peer.mapped is None for peer in self.peers):
            return None
        self.attached = True
        return [peer.mapped for peer in self.workers() if peer.mapped is not None]

    def memory_of(self, peer: Peer, epoch: Epoch) -> tuple[Attached, list[int]]:
        """Return the message that hands a process its memory, and the descriptors that go with it."""
        memory, layout, device = epoch.memory, epoch.memory.layout, epoch.memory.device
        attached = partial(Attached, epoch=epoch.number, slot_count=layout.slot_count, device_slots=layout.device_slots)
        if peer is self.scheduler:
            message = attached(segment_bytes=layout.total_bytes, slot_bytes=0, use_again_ms=epoch.use_again_ms)
            return message, [memory.control.fd, memory.doorbell.fd]
        assert peer.hello is not None
        rank = peer.hello.rank
        segment = memory.staging.segments[rank]
        message = attached(
            segment_bytes=segment.size_bytes,
            slot_bytes=memory.staging.block_bytes[rank],
            live_epochs=self.engine().scheduler.live_epochs,
        )
        return message, [segment.fd, *([device.descriptor(rank)] if device is not None else [])]
