"""The control socket: reads one message of each process that sent some, and hands it to the part that handles it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

from ...shmring.wire.admin import (
    Announce,
    AnnounceStep,
    Caller,
    Engine,
    EngineQuery,
    Reload,
    Remove,
    Report,
    SetMode,
    StatQuery,
    StatusQuery,
    WhyQuery,
)
from ...shmring.wire.attach import Hello, Mapped, Reset
from ...shmring.wire.codec import FromEngine, Message, receive_message, send_message
from ...shmring.wire.records import ProtocolError
from ..config.model import DaemonConfig
from ..telemetry.events import Ending
from .access import NOT_ALLOWED, Credentials, access_of
from .admin import Admin
from .budget import Budget
from .connections import Connections
from .door import DoorSockets
from .epochs import Epochs, Shared
from .group import Peer
from .handshake import Handshake


class Control:
    """Serves engines and users on the listening socket `sock`; `epoll` watches its descriptors for the loop."""

    def __init__(self, sock: socket.socket, shared: Shared, epochs: Epochs, epoll: select.epoll) -> None:
        self._shared, self.epochs = shared, epochs
        access = access_of(sock, shared.config)
        self._connections = Connections(sock, access, epoll, shared.log, shared.refusals)
        self.handshake = Handshake(shared, epochs, self._connections, epoll)
        self._admin = Admin(shared, epochs)
        self._budget = Budget()
        self.door = DoorSockets(shared.config, epoll, shared.log)
        # While one of them has members, `carry_on` is to be called: engines whose memory is being reserved, and
        # connections that wait until their user may ask.
        self.reserving, self.asking = self.handshake.reserving, self._connections.asking

    def listen_on(self, sock: socket.socket) -> None:
        self._connections.listen_on(sock, access_of(sock, self._shared.config))

    def ready(self, fds: list[int], now_ns: int) -> None:
        """Read one message of each of these descriptors; those of other parts are skipped.

        A connection whose user's questions took too much of the loop's time waits.  An engine's processes do not, and
        they ask nothing.
        """
        self.door.ready(fds, now_ns)
        for fd in fds:
            if fd == self._connections.sock.fileno():
                for closed in self._connections.accept():
                    self.handshake.left(closed)
            elif (peer := self._connections.get(fd)) is not None:
                if self._connections.paused(peer):  # its process hung up, and waits for no answer
                    self._leave(peer)
                elif peer.hello is not None:
                    self._read(peer, now_ns)
                elif self._budget.left(peer.credentials.uid, now_ns):
                    peer.read_ns, began_ns = now_ns, time.thread_time_ns()
                    self._read(peer, now_ns)
                    self._budget.spend(peer.credentials.uid, time.thread_time_ns() - began_ns, now_ns)
                else:
                    self._connections.pause(peer)

    def carry_on(self, now_ns: int) -> bool:
        """Attach the engines whose memory is there by now; True while connections wait until their user may ask."""
        if self.reserving:
            self.handshake.carry_on()
        if not self.asking:
            return False
        return self._connections.resume(lambda uid: self._budget.left(uid, now_ns) > 0)

    def tick(self, now_ns: int) -> None:
        """Do the periodic work of connections and handshakes; called several times a second."""
        self._connections.tick()
        self._budget.tick(now_ns)
        self._shared.refusals.tick()
        self.handshake.tick(now_ns)
        self.door.tick(now_ns)

    def reload(self, config: DaemonConfig, report: Report) -> None:
        """Serve by this configuration from now on, and tell the operators who asked for it."""
        before, self._shared.config = self._shared.config, config
        self._connections.access = access_of(self._connections.sock, config)
        if config.mode != before.mode:
            self.epochs.switch(config.mode)
        if config.namespaces != before.namespaces:  # the engines come back, with keys of the other kind
            self.handshake.end_all(Ending.ENGINE_GONE)
        self._admin.reloaded(report)

    def close(self) -> None:
        self.door.close()
        self.handshake.end_all(Ending.DAEMON_STOPPED)
        self._connections.close_all()

    def _read(self, peer: Peer, now_ns: int) -> None:
        try:
            with contextlib.ExitStack() as files:
                # For itself or others: the process of the HTTP door alone asks for other users, and sends descriptors.
                uid = self._connections.access.scope(peer.credentials)
                received = receive_message(peer.sock, max_fds=int(uid is None and peer.hello is None))
                if received is not None:
                    message, fds = received
                    for fd in fds:
                        files.callback(os.close, fd)
                    self._handle(peer, message, fds, uid, now_ns)
                    return
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._connections.refuse(peer, str(error), final=True)
        except OSError as error:  # the process ended meanwhile
            self._shared.log.debug("peer.gone", pid=peer.credentials.pid, error=str(error))
        self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        self._connections.close(peer)
        self.handshake.left(peer)

    def _about(self, peer: Peer, caller: Caller | None, uid: int | None) -> Credentials:
        """Return whose engines a message is about. Raises ProtocolError for a caller that the peer may not name."""
        if caller is None:
            return peer.credentials
        if uid is not None:
            raise ProtocolError(f"only root and the daemon's user ask for others: uid={peer.credentials.uid}")
        return Credentials(peer.credentials.pid, caller.uid, frozenset(caller.groups))

    def _announce(self, peer: Peer, message: EngineQuery | Announce, fds: Sequence[int], uid: int | None) -> None:
        """Answer a message that is about the engines of its caller."""
        access, about = self._connections.access, self._about(peer, message.caller, uid)
        if isinstance(message, EngineQuery):
            answer: Engine | Report = Report(ok=False, forbidden=True, text=f"uid={about.uid} {NOT_ALLOWED}")
            if access.may_attach(about):
                answer = self._admin.engine(message, access.scope(about))
            peer.send(answer.model_copy(update={"number": message.number}))
        elif len(fds) != 1:
            raise ProtocolError(f"an announcement has one descriptor: fds={len(fds)}")
        elif access.may_attach(about):
            self._admin.announce(message, access.scope(about), fds[0], peer.send)
        else:  # since it asked for the engine
            peer.send(AnnounceStep(number=message.number, outcome="rejected", reason=f"uid={about.uid} {NOT_ALLOWED}"))

    def _handle(self, peer: Peer, message: Message, fds: Sequence[int], uid: int | None, now_ns: int) -> None:
        """`uid`: whose engines the peer may see and steer; None: all."""
        # Refused only now: closing a socket with an unread message would lose the refusal.
        if uid is not None and not self._connections.access.may_attach(peer.credentials):
            self._connections.refuse(peer, f"uid={peer.credentials.uid} {NOT_ALLOWED}", final=True, forbidden=True)
            self._leave(peer)
            return
        if peer.hello is not None and not isinstance(message, FromEngine):
            raise ProtocolError(f"an engine's process asks nothing on its connection: type={message.type}")
        if isinstance(message, Hello):
            self.handshake.hello(peer, message)
        elif isinstance(message, Mapped):
            self.handshake.mapped(peer, message)
        elif isinstance(message, Reset):
            self.handshake.reset(peer, message)
        elif isinstance(message, EngineQuery | Announce):
            self._announce(peer, message, fds, uid)
        elif isinstance(message, StatusQuery | StatQuery):
            send_message(peer.sock, self._admin.answer(message, uid, now_ns))
        elif isinstance(message, WhyQuery):
            self._admin.why(message, uid, peer.credentials.uid, peer.send)
        elif isinstance(message, SetMode | Reload | Remove):
            self._admin.command(message, uid, peer.send)
        else:
            raise ProtocolError(f"message is not expected here: type={message.type}")
