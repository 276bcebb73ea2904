"""The processes of one engine incarnation on the control socket: who has come, what each said, who is missing."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field

from ..shmring import messages
from ..shmring.messages import Hello, Mapped, Message
from ..shmring.protocol import ProtocolError
from .access import Credentials
from .engine.memory import EngineShape
from .engine.session import EngineSession


@dataclass(eq=False)
class Peer:
    """One connected process."""

    sock: socket.socket
    credentials: Credentials
    allowed: bool
    hello: Hello | None = None
    group: Group | None = None
    mapped: Mapped | None = None

    def tell(self, message: Message) -> None:
        """Worth no waiting: lost where the process is gone, which its end of file says, or does not read."""
        with contextlib.suppress(OSError):
            messages.send_message(self.sock, message)


@dataclass(eq=False)
class Group:
    """The processes of one engine incarnation, and their session once all have said hello."""

    key: tuple[str, str]
    world_size: int
    uid: int
    scheduler: Peer | None = None
    workers: dict[int, Peer] = field(default_factory=dict)
    attaching: bool = False
    session: EngineSession | None = None

    @property
    def peers(self) -> list[Peer]:
        return [*self.workers.values(), *([self.scheduler] if self.scheduler is not None else [])]

    @property
    def complete(self) -> bool:
        return self.scheduler is not None and len(self.workers) == self.world_size

    def has_place(self, hello: Hello) -> bool:
        """Whether a process that says this is awaited."""
        taken = self.scheduler is not None if hello.role == "scheduler" else hello.rank in self.workers
        return not taken and not self.attaching

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
        else:
            self.workers[hello.rank] = peer

    def leave(self, peer: Peer) -> None:
        if self.scheduler is peer:
            self.scheduler = None
        self.workers = {rank: other for rank, other in self.workers.items() if other is not peer}

    def engine(self) -> EngineShape:
        """What its processes said when they came; only when complete."""
        assert self.scheduler is not None
        hello = self.scheduler.hello
        assert hello is not None
        assert hello.scheduler is not None
        said = [self.workers[rank].hello for rank in range(self.world_size)]
        workers = [each.worker for each in said if each is not None and each.worker is not None]
        return EngineShape(hello.engine_id, hello.block_tokens, hello.scheduler, workers)

    def mapped(self) -> list[Mapped] | None:
        """What the workers, by rank, said when they had mapped the epoch; None until all processes have."""
        if any(peer.mapped is None for peer in self.peers):
            return None
        said = [self.workers[rank].mapped for rank in range(self.world_size)]
        return [mapped for mapped in said if mapped is not None]
