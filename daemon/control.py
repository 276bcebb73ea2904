"""The control socket: who may attach, the handshake of all processes of an engine, and their end of file.

One SOCK_SEQPACKET connection per process (scheduler and each worker).  When the scheduler and every worker of one
incarnation have said hello, a session with a new epoch is made and each gets its segments; when all mapped them it is
active.  The first end of file ends the epoch for all of them: they come back with a new hello and get a new one.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial

from ..shmring import messages
from ..shmring.messages import (
    Attached,
    Hello,
    Mapped,
    Message,
    Purge,
    Refused,
    Reset,
    ResetDone,
    SetMode,
    StatQuery,
    Status,
    StatusQuery,
    Warm,
)
from ..shmring.protocol import GROUPS, ProtocolError
from . import report
from .access import Access, credentials_of
from .engine.memory import EngineMemory, EngineShape
from .engine.session import EngineSession
from .engine.transfers import check_turns
from .group import Group, Peer
from .store.client import StoreError
from .telemetry.events import Ending
from .telemetry.logs import Log

MAX_STRANGERS = 64  # connections of users who may not attach, until they spoke and were told
MAX_SILENT = 256  # connections without a hello; beyond, the oldest is hung up on
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


# Reserve the memory of (epoch, engine) and call back, on the main loop, with it or with what went wrong.
Prepare = Callable[[int, EngineShape, Callable[["EngineMemory | Exception"], None]], None]
# Do what an operator asked (SetMode, Purge, Warm), and call back, now or later, with the answer.
Steer = Callable[[Message, Callable[[Message], None]], None]
# Owns the memory; raises StoreError where the store refuses it.
MakeSession = Callable[[EngineMemory, EngineShape], EngineSession]


class Control:
    """Accepts processes and keeps their groups.

    `prepare` reserves the memory of a complete group off the main loop, `make_session` builds its session on it.
    """

    def __init__(
        self, sock: socket.socket, prepare: Prepare, make_session: MakeSession, log: Log,
        *, access: Access, status: Callable[[], Status], steer: Steer, max_engines: int, watch: Callable[[int], None],
        unwatch: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.sock = sock
        self.access, self.max_engines = access, max_engines  # a reload may change both
        self._prepare, self._make_session = prepare, make_session
        self._log = log
        self._status, self._steer = status, steer
        self._watch, self._unwatch = watch, unwatch
        self._peers: dict[int, Peer] = {}
        self._groups: dict[tuple[str, str], Group] = {}
        self._paused = False
        self.ended: list[EngineSession] = []  # ended sessions, until the owner of the loop closes them

    def sessions(self) -> list[EngineSession]:
        return [group.session for group in self._groups.values() if group.session is not None]

    def ready(self, fd: int) -> None:
        """A watched descriptor is readable."""
        if fd == self.sock.fileno():
            self._accept()
        elif (peer := self._peers.get(fd)) is not None:
            try:
                received = messages.receive_message(peer.sock, max_fds=0)
                if received is not None:
                    self._handle(peer, received[0])
                    return
            except BlockingIOError:
                return
            except ProtocolError as error:
                self._refuse(peer, str(error), final=True)
            except OSError as error:  # the process went away while we spoke
                self._log.debug("peer.lost", pid=peer.credentials.pid, error=str(error))
            self._drop(peer)

    def end(self, session: EngineSession, ending: Ending) -> None:
        """End a session from our side: its processes see the end of file and come back."""
        for group in list(self._groups.values()):
            if group.session is session:
                self._dissolve(group, ending)

    def listen_on(self, sock: socket.socket, access: Access) -> None:
        """From now on processes come by this socket."""
        self._unwatch(self.sock.fileno())
        self.sock.close()
        self.sock, self.access, self._paused = sock, access, False
        self._watch(sock.fileno())

    def close(self) -> None:
        for group in list(self._groups.values()):
            self._dissolve(group, Ending.DAEMON_STOPPED)
        for peer in list(self._peers.values()):
            self._close_peer(peer)
        self._unwatch(self.sock.fileno())
        self.sock.close()

    # --- connections ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self.sock.accept()
        except OSError as error:
            if error.errno in _NO_ROOM and not self._hang_up(os.strerror(error.errno)):
                self._unwatch(self.sock.fileno())  # it stays readable: without a pause the loop would spin
                self._paused = True
            return
        sock.setblocking(False)
        credentials = credentials_of(sock)
        peer = Peer(sock, credentials, self.access.may_attach(credentials))
        if not peer.allowed and sum(not other.allowed for other in self._peers.values()) >= MAX_STRANGERS:
            sock.close()
            return
        self._peers[sock.fileno()] = peer
        self._watch(sock.fileno())
        if sum(each.hello is None for each in self._peers.values()) > MAX_SILENT:
            self._hang_up(f"connections without a hello: max={MAX_SILENT}")

    def _hang_up(self, error: str) -> bool:
        """No room for another connection: the oldest without a hello goes. False when there is none."""
        oldest = next((peer for peer in self._peers.values() if peer.hello is None), None)
        if oldest is None:
            self._log.warning("peers.full", error=error)
            return False
        self._log.warning("peers.full", error=error, pid=oldest.credentials.pid)
        self._close_peer(oldest)
        return True

    def tick(self) -> None:
        """Listen again after a pause. Called a few times a second."""
        if self._paused:
            self._paused = False
            self._watch(self.sock.fileno())

    def _handle(self, peer: Peer, message: Message) -> None:
        if not peer.allowed:  # said only now: closing with its message unread would lose ours
            raise ProtocolError(f"uid={peer.credentials.uid} may not attach: the socket's group and allow_uids may")
        if isinstance(message, Hello):
            self._hello(peer, message)
        elif isinstance(message, Mapped):
            self._mapped(peer, message)
        elif isinstance(message, StatusQuery):
            messages.send_message(peer.sock, self._status())
        elif isinstance(message, StatQuery):
            messages.send_message(peer.sock, report.segments(self.sessions(), time.monotonic_ns()))
        elif isinstance(message, (SetMode, Purge, Warm)):
            self._steered(peer, message)
        elif isinstance(message, Reset) and peer.group is not None and peer.group.scheduler is peer:
            self._reset(peer, message)
        else:
            raise ProtocolError(f"message is not expected here: type={message.type}")

    def _steered(self, peer: Peer, message: Message) -> None:
        if not self.access.may_steer(peer.credentials):
            raise ProtocolError(f"only root and the daemon's own user may do this: uid={peer.credentials.uid}")
        self._steer(message, peer.tell)

    def _hello(self, peer: Peer, hello: Hello) -> None:
        if peer.hello is not None:
            raise ProtocolError("hello was said before")
        if hello.groups != GROUPS:
            raise ProtocolError(f"only one KV-cache group is served: groups={hello.groups} max={GROUPS}")
        if (hello.worker if hello.role == "worker" else hello.scheduler) is None:
            raise ProtocolError(f"{hello.role}: field required: role={hello.role}")
        if hello.rank >= (hello.world_size if hello.role == "worker" else 1):
            raise ProtocolError(f"rank out of bounds: rank={hello.rank} world_size={hello.world_size}")
        key = (hello.engine_id, hello.incarnation)
        group = self._groups.get(key)
        if group is None:
            if len(self._groups) >= self.max_engines:
                self._turn_away(peer, f"too many engines: max_engines={self.max_engines}")
                return
            group = self._groups[key] = Group(key, hello.world_size, peer.credentials.uid)
        if not group.has_place(hello):
            self._turn_away(peer, f"already attached: role={hello.role} rank={hello.rank}")
            return
        group.join(peer, hello)
        self._log.info(
            "peer.hello", engine=hello.engine_id, role=hello.role, rank=hello.rank, pid=peer.credentials.pid,
            version=hello.version,
        )  # fmt: skip
        if group.complete:
            self._attach(group)

    def _attach(self, group: Group) -> None:
        """All said hello: reserve memory, and go on when it is there."""
        engine = group.engine()
        group.attaching = True
        try:
            check_turns(engine.workers)
        except ValueError as error:
            self._attached(group, error)
            return
        self._prepare(secrets.randbits(53) + 1, engine, partial(self._attached, group))

    def _attached(self, group: Group, memory: EngineMemory | Exception) -> None:
        if isinstance(memory, Exception):
            self._refuse_engine(group, memory)
            return
        if not group.complete or self._groups.get(group.key) is not group:  # someone left meanwhile
            memory.close()
            self._dissolve(group)
            return
        engine = group.engine()
        try:
            session = group.session = self._make_session(memory, engine)
        except StoreError as error:
            self._refuse_engine(group, error)
            return
        assert group.scheduler is not None
        session.namespace.tell = group.scheduler.tell
        if engine.scheduler.events:
            session.saver.tell = group.scheduler.tell
        self._watch(session.doorbell.fd)
        try:
            self._hand_over(group, session)
        except OSError as error:  # one of them died just now
            self._log.debug("peer.lost", engine=session.engine_id, error=str(error))
            self._dissolve(group)

    def _refuse_engine(self, group: Group, error: Exception) -> None:
        self._log.error("engine.refused", engine=group.key[0], error=str(error))
        for peer in group.peers:
            self._refuse(peer, str(error), final=True)
        self._dissolve(group)

    def _hand_over(self, group: Group, session: EngineSession) -> None:
        device = session.memory.device
        for rank, worker in group.workers.items():
            segment = session.staging.segments[rank]
            attached = Attached(
                epoch=session.epoch, segment_bytes=segment.size_bytes, slot_count=session.slot_count,
                slot_bytes=session.staging.block_bytes[rank], device_slots=session.layout.device_slots,
                device_handle=device.handle(rank) if device is not None else "",
            )  # fmt: skip
            lease = [device.lease(rank)] if device is not None else []
            messages.send_message(worker.sock, attached, [segment.fd, *lease])
        assert group.scheduler is not None
        attached = Attached(
            epoch=session.epoch, segment_bytes=session.layout.total_bytes, slot_count=session.slot_count, slot_bytes=0,
            device_slots=session.layout.device_slots,
        )  # fmt: skip
        messages.send_message(group.scheduler.sock, attached, [session.control.fd, session.doorbell.fd])

    def _mapped(self, peer: Peer, message: Mapped) -> None:
        session = peer.group.session if peer.group is not None else None
        if session is None or message.epoch != session.epoch or peer.group is None:
            raise ProtocolError(f"mapped an epoch that is not current: epoch={message.epoch}")
        if peer.mapped is not None:
            raise ProtocolError(f"mapped was said before: epoch={message.epoch}")
        peer.mapped = message
        if (workers := peer.group.mapped()) is not None:
            session.activate(workers)
            self._log.info(
                "engine.attached", engine=session.engine_id, epoch=session.epoch, ranks=peer.group.world_size,
                slots=session.slot_count, save_slots=session.save_slots, block_bytes=session.block_bytes,
            )  # fmt: skip

    def _reset(self, peer: Peer, message: Reset) -> None:
        session = peer.group.session if peer.group is not None else None
        if session is None:
            raise ProtocolError("reset before the engine is attached")

        def reply(ok: bool) -> None:
            peer.tell(ResetDone(reset_generation=message.reset_generation, ok=ok))

        session.reset(message.reset_generation, message.timeout_ms / 1e3, reply)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _turn_away(self, peer: Peer, reason: str) -> None:
        self._refuse(peer, reason, final=False)
        self._close_peer(peer)

    def _refuse(self, peer: Peer, error: str, *, final: bool) -> None:
        pid, uid, _ = peer.credentials
        self._log.warning("peer.refused", pid=pid, uid=uid, error=error, final=final)
        peer.tell(Refused(error=error, final=final))

    def _drop(self, peer: Peer) -> None:
        group = peer.group
        self._close_peer(peer)
        if group is None:
            return
        if group.session is None:
            group.leave(peer)
            if not group.peers:
                self._groups.pop(group.key, None)
            return
        group.session.liveness.peer_is_gone()
        self._dissolve(group)

    def _dissolve(self, group: Group, ending: Ending = Ending.ENGINE_GONE) -> None:
        if self._groups.get(group.key) is group:  # its processes may be back already, as another group
            del self._groups[group.key]
        if group.session is not None:
            self._unwatch(group.session.doorbell.fd)
            group.session.end(ending)
            self.ended.append(group.session)
        for peer in group.peers:
            self._close_peer(peer)

    def _close_peer(self, peer: Peer) -> None:
        fd = peer.sock.fileno()
        if fd >= 0:
            self._peers.pop(fd, None)
            self._unwatch(fd)
            peer.sock.close()
