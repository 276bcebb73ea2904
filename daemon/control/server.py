"""The messages of the control socket: the handshake of an engine's processes, questions, orders, and the end of file.

One SOCK_SEQPACKET connection per process (scheduler and each worker).  When the scheduler and every worker of one
incarnation have said hello, a new epoch is made and each gets its segments; when all mapped them it is
active.  The first end of file ends the epoch for all of them: they come back with a new hello and get a new one.
"""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from ...shmring.wire.admin import NamespacesQuery, Purge, SetMode, StatQuery, Status, StatusQuery, Warm
from ...shmring.wire.attach import Hello, Mapped, Notice, Refused, Reset, ResetDone
from ...shmring.wire.codec import Message, encode_message, receive_message, send_message
from ...shmring.wire.records import GROUPS, ProtocolError
from ..engine.epoch import Epoch
from ..engine.memory import EngineInfo, EngineMemory
from ..engine.transfers import check_turns
from ..store.client import StoreError
from ..store.namespaces import Namespaces, NamespaceTaken
from ..telemetry.events import Ending
from ..telemetry.logs import Log
from . import report
from .access import Access
from .connections import MAX_PROCESSES, Connections
from .group import Group, Peer

# Reserve the memory of (epoch, engine) and call back, on the main loop, with it or with what went wrong.
Prepare = Callable[[int, EngineInfo, Callable[["EngineMemory | Exception"], None]], None]
# Free the memory of an engine that is gone, off the main loop.
Release = Callable[["EngineMemory"], None]
# Do what was asked (SetMode, Purge, Warm) for the engines of this user, of all for None, and call back, now or later,
# with the answer.
Steer = Callable[[Message, "int | None", Callable[[Message], None]], None]
# Raises StoreError where the store refuses the memory, which is not the epoch's then.
MakeEpoch = Callable[[EngineMemory, EngineInfo], Epoch]


class Control:
    """Speaks with the processes, and keeps those of one engine together in a group.

    `prepare` reserves the memory of a complete group off the main loop, `make_epoch` builds its epoch on it, and
    `release` frees what none was built on.  `max_engines` and `max_engines_per_uid` bound the groups that have memory;
    an incomplete group holds nothing but its connections, and those have bounds of their own.
    """

    def __init__(
        self, sock: socket.socket, prepare: Prepare, release: Release, make_epoch: MakeEpoch, log: Log,
        *, access: Access, namespaces: Namespaces, status: Callable[[int | None], Status], steer: Steer,
        max_engines: int, max_engines_per_uid: int, watch: Callable[[int], None], unwatch: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.connections = Connections(sock, access, log, drop=self._drop, watch=watch, unwatch=unwatch)
        self.max_engines, self.max_engines_per_uid = max_engines, max_engines_per_uid  # a reload may change both
        self._prepare, self._release, self._make_epoch = prepare, release, make_epoch
        self._log, self._namespaces = log, namespaces
        self._status, self._steer = status, steer
        self._watch, self._unwatch = watch, unwatch
        self._groups: dict[tuple[str, str], Group] = {}
        self._answers: dict[tuple[str, int], bytes] = {}  # of this turn of the loop, by question and user
        self.ended: list[Epoch] = []  # ended epochs, until the owner of the loop closes them

    def epochs(self, uid: int | None = None) -> list[Epoch]:
        """Return the epochs of this user's engines, of all engines for None."""
        return [group.epoch for group in self._groups.values() if group.epoch is not None and uid in (None, group.uid)]

    def ready(self, *fds: int) -> None:
        """One turn of the loop: these watched descriptors are readable. Reads one message of each."""
        self._answers.clear()
        for fd in fds:
            if fd == self.connections.sock.fileno():
                self.connections.accept()
            elif (peer := self.connections.get(fd)) is not None:
                self._read(peer)

    def tick(self) -> None:
        """Called a few times a second."""
        self.connections.tick()
        for group in [group for group in self._groups.values() if group.waits_to_be_handed]:
            self._hand_over(group)
        for group in self._groups.values():
            if missing := group.overdue():
                self._report(group, missing)

    def _report(self, group: Group, missing: str) -> None:
        """Log which ranks did not come, and tell the engine."""
        come, ranks = len(group.workers), group.world_size
        self._log.warning("engine.incomplete", engine=group.key[0], come=come, ranks=ranks, missing=missing)
        assert group.scheduler is not None
        text = (
            f"{come} of {ranks} ranks have attached to this daemon, missing: rank {missing}. Nothing is loaded or "
            "saved before all have. Look for `kvprefetch` in what those ranks log; all need this node and this socket"
        )
        group.scheduler.tell(Notice(text=text))

    def _read(self, peer: Peer) -> None:
        try:
            received = receive_message(peer.sock, max_fds=0)
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

    def end(self, epoch: Epoch, ending: Ending) -> None:
        """End an epoch from our side: its processes see the end of file and come back."""
        for group in list(self._groups.values()):
            if group.epoch is epoch:
                self._dissolve(group, ending)

    def close(self) -> None:
        for group in list(self._groups.values()):
            self._dissolve(group, Ending.DAEMON_STOPPED)
        self.connections.close_all()
        self._namespaces.close()

    # --- messages ---------------------------------------------------------------------------------------------------

    def _handle(self, peer: Peer, message: Message) -> None:
        if not peer.allowed:  # said only now: closing with its message unread would lose ours
            raise ProtocolError(f"uid={peer.credentials.uid} may not attach: the socket's group and allow_uids may")
        if isinstance(message, Hello):
            self._hello(peer, message)
        elif isinstance(message, Mapped):
            self._mapped(peer, message)
        elif isinstance(message, StatusQuery):
            self._answer(peer, message, self._status)
        elif isinstance(message, StatQuery):
            self._answer(peer, message, lambda uid: report.segments(self.epochs(uid), time.monotonic_ns()))
        elif isinstance(message, NamespacesQuery):
            send_message(peer.sock, self._namespaces.page(self._scope(peer), message.after))
        elif isinstance(message, (SetMode, Purge, Warm)):
            self._steered(peer, message)
        elif isinstance(message, Reset) and peer.group is not None and peer.group.scheduler is peer:
            self._reset(peer, peer.group.epoch, message)
        else:
            raise ProtocolError(f"message is not expected here: type={message.type}")

    def _scope(self, peer: Peer) -> int | None:
        return self.connections.access.scope(peer.credentials)

    def _answer(self, peer: Peer, query: StatusQuery | StatQuery, make: Callable[[int | None], Message]) -> None:
        """Send what `make` returns for the user whose engines the peer may see.

        All processes of a user that ask in one turn of the loop get one answer: the work is done once.
        """
        key = (query.type, peer.credentials.uid)
        if key not in self._answers:
            self._answers[key] = encode_message(make(self._scope(peer)))
        peer.sock.send(self._answers[key])

    def _steered(self, peer: Peer, message: Message) -> None:
        scope = self._scope(peer)
        if isinstance(message, SetMode) and scope is not None:
            raise ProtocolError(f"only root and the daemon's own user may do this: uid={scope}")
        self._steer(message, scope, peer.tell)

    def _hello(self, peer: Peer, hello: Hello) -> None:
        if peer.hello is not None:
            raise ProtocolError("hello was said before")
        if hello.groups != GROUPS:
            raise ProtocolError(f"only one KV-cache group is served: groups={hello.groups} max={GROUPS}")
        if (hello.worker if hello.role == "worker" else hello.scheduler) is None:
            raise ProtocolError(f"{hello.role}: field required: role={hello.role}")
        if hello.rank >= (hello.world_size if hello.role == "worker" else 1):
            raise ProtocolError(f"rank out of bounds: rank={hello.rank} world_size={hello.world_size}")
        if hello.world_size >= MAX_PROCESSES:
            raise ProtocolError(
                f"world_size out of bounds: world_size={hello.world_size} max={MAX_PROCESSES - 1}: "
                "one daemon serves the processes of one node"
            )
        key = (hello.engine_id, hello.incarnation)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Group(key, hello.world_size, peer.credentials.uid)
        if not group.has_place(hello):
            self._refuse(peer, f"already attached: role={hello.role} rank={hello.rank}", final=False)
            self.connections.close(peer)
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
        if (why_not := self._no_place(group)) is not None:
            for peer in group.peers:
                self._refuse(peer, why_not, final=False)
            self._dissolve(group)
            return
        engine = group.engine()
        group.placed = True
        try:
            check_turns(engine.workers)
            self._namespaces.check(group.uid, engine.namespaces, shared=self.connections.access.share_namespaces)
        except ValueError as error:
            self._attached(group, error)
            return
        self._prepare(secrets.randbits(53) + 1, engine, partial(self._attached, group))

    def _no_place(self, group: Group) -> str | None:
        """Which bound keeps a complete group from being attached now; None: it may be."""
        places = Counter(other.uid for other in self._groups.values() if other.placed)
        if places.total() >= self.max_engines:
            return f"too many engines: max_engines={self.max_engines}"
        if places[group.uid] >= self.max_engines_per_uid:
            return f"too many engines of one user: uid={group.uid} max_engines_per_uid={self.max_engines_per_uid}"
        if (processes := self.connections.processes(group.uid)) + len(group.peers) > MAX_PROCESSES:
            return (
                f"too many processes of one user: uid={group.uid} processes={processes} wanted={len(group.peers)} "
                f"max={MAX_PROCESSES}: those count that ended here and did not read what they were handed"
            )
        return None

    def _attached(self, group: Group, memory: EngineMemory | Exception) -> None:
        if isinstance(memory, Exception):
            self._refuse_engine(group, memory)
            return
        if not group.complete or self._groups.get(group.key) is not group:  # someone left meanwhile
            self._release(memory)
            self._dissolve(group)
            return
        engine = group.engine()
        in_use = {name for epoch in self.epochs() for name in epoch.namespaces}
        share = self.connections.access.share_namespaces
        try:
            self._namespaces.claim(group.uid, engine.namespaces, shared=share, in_use=in_use)
            epoch = group.epoch = self._make_epoch(memory, engine)
        except (NamespaceTaken, StoreError) as error:  # a namespace: by another one that attached meanwhile
            self._release(memory)
            self._refuse_engine(group, error)
            return
        assert group.scheduler is not None
        if engine.scheduler.events:
            epoch.saver.tell = group.scheduler.tell
        self._watch(epoch.doorbell.fd)
        self._hand_over(group)

    def _refuse_engine(self, group: Group, error: Exception) -> None:
        self._log.error("engine.refused", engine=group.key[0], error=str(error))
        for peer in group.peers:
            self._refuse(peer, str(error), final=True)
        self._dissolve(group)

    def _hand_over(self, group: Group) -> None:
        """Send each process its memory; later to those for which the kernel has no room among descriptors in flight."""
        epoch = group.epoch
        assert epoch is not None
        try:
            for peer in group.peers:
                if not peer.handed:
                    attached, fds = group.memory_of(peer, epoch)
                    send_message(peer.sock, attached, fds)
                    peer.handed = True
            group.waits_to_be_handed = False
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # one of them died just now
                self._log.debug("peer.lost", engine=epoch.engine_id, error=str(error))
                self._dissolve(group)
            elif not group.waits_to_be_handed:
                group.waits_to_be_handed = True
                self._log.warning("engine.waiting", engine=epoch.engine_id, epoch=epoch.number, error=str(error))

    def _mapped(self, peer: Peer, message: Mapped) -> None:
        epoch = peer.group.epoch if peer.group is not None else None
        if epoch is None or message.epoch != epoch.number or peer.group is None:
            raise ProtocolError(f"mapped an epoch that is not current: epoch={message.epoch}")
        if peer.mapped is not None:
            raise ProtocolError(f"mapped was said before: epoch={message.epoch}")
        peer.mapped = message
        if (workers := peer.group.mapped()) is not None:
            epoch.activate(workers)
            self._log.info(
                "engine.attached", engine=epoch.engine_id, epoch=epoch.number, ranks=peer.group.world_size,
                slots=epoch.slot_count, save_slots=epoch.save_slots, block_bytes=epoch.block_bytes,
            )  # fmt: skip

    def _reset(self, peer: Peer, epoch: Epoch | None, message: Reset) -> None:
        if epoch is None:
            raise ProtocolError("reset before the engine is attached")

        def reply(ok: bool) -> None:
            peer.tell(ResetDone(reset_generation=message.reset_generation, ok=ok))

        epoch.reset(message.reset_generation, message.timeout_ms / 1e3, reply)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _refuse(self, peer: Peer, error: str, *, final: bool) -> None:
        pid, uid, _ = peer.credentials
        self._log.warning("peer.refused", pid=pid, uid=uid, error=error, final=final)
        peer.tell(Refused(error=error, final=final))

    def _drop(self, peer: Peer) -> None:
        group = peer.group
        self.connections.close(peer)
        if group is None:
            return
        if group.epoch is None:
            group.leave(peer)
            if not group.peers and not group.placed:  # a placed one keeps its place until its memory is given back
                self._groups.pop(group.key, None)
            return
        group.epoch.liveness.peer_is_gone()
        self._dissolve(group)

    def _dissolve(self, group: Group, ending: Ending = Ending.ENGINE_GONE) -> None:
        if self._groups.get(group.key) is group:  # its processes may be back already, as another group
            del self._groups[group.key]
        if group.epoch is not None:
            self._unwatch(group.epoch.doorbell.fd)
            group.epoch.end(ending)
            self.ended.append(group.epoch)
        for peer in group.peers:
            self.connections.close(peer)
