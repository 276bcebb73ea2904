"""The handshake of engines: their processes are grouped, get the memory of an epoch, and map it.

Each process (scheduler and each worker) has one connection. Once the scheduler and every worker of one incarnation have
said hello, the engine gets a new epoch and each process its segments. The epoch is active once all have mapped them.
The first end of file ends the epoch for all of them: they say hello again and get a new one.
"""

from __future__ import annotations

import errno
import secrets
import select
from collections import Counter

from ...shmring.wire.attach import Hello, Mapped, Notice, Reset
from ...shmring.wire.codec import send_message
from ...shmring.wire.records import ProtocolError
from ..engine.epoch import Epoch
from ..engine.memory import EngineInfo, EngineMemory, groups_of
from ..engine.transfers import check_replicas
from ..store.errors import StoreError
from ..telemetry.events import Ending
from .access import NOT_ALLOWED
from .connections import MAX_PROCESSES, Connections
from .epochs import Epochs, Shared
from .group import NAMED, EngineGroup, Peer, Stage


class Handshake:
    """Keeps the processes of each engine in a group, and attaches complete groups as far as the configuration allows.

    An incomplete group holds nothing but its connections, which have bounds of their own.
    """

    def __init__(self, shared: Shared, epochs: Epochs, connections: Connections, epoll: select.epoll) -> None:
        self._shared, self._epochs, self._connections, self._epoll = shared, epochs, connections, epoll
        self._log = shared.log
        self._groups: dict[tuple[str, str], EngineGroup] = {}
        self.reserving: dict[int, EngineGroup] = {}  # by the number of the epoch

    def hello(self, peer: Peer, hello: Hello) -> None:
        """Add a process to its engine's group. Raises ProtocolError."""
        if peer.hello is not None:
            raise ProtocolError("a second hello on one connection")
        _check(hello)
        key = (hello.engine_id, hello.incarnation)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = EngineGroup(key, hello.world_size, peer.credentials.uid)
        if group.placed or (hello.role, hello.rank) in group.members:
            self._connections.refuse(peer, f"already attached: role={hello.role} rank={hello.rank}", final=False)
            self._connections.close(peer)
            return
        group.join(peer, hello)
        pid = peer.credentials.pid
        self._log.info(
            "peer.hello", engine=hello.engine_id, role=hello.role, rank=hello.rank, pid=pid, version=hello.version
        )
        if group.complete:
            self._attach(group)

    def mapped(self, peer: Peer, message: Mapped) -> None:
        """Note that a process mapped its memory, and activate the epoch once all have. Raises ProtocolError."""
        epoch = peer.group.epoch if peer.group is not None else None
        if epoch is None or message.epoch != epoch.number or peer.group is None:
            raise ProtocolError(f"mapped an epoch that is not current: epoch={message.epoch}")
        if peer.mapped is not None:
            raise ProtocolError(f"mapped was sent before: epoch={message.epoch}")
        peer.mapped = message
        if (workers := peer.group.mapped()) is not None:
            epoch.activate(workers)
            pids = [each.credentials.pid for each in peer.group.peers]
            self._shared.refusals.attached(peer.group.uid, peer.group.key[0], pids)
            self._log.info(
                "engine.attached",
                engine=epoch.engine.engine_id,
                epoch=epoch.number,
                ranks=peer.group.world_size,
                kv_groups=len(epoch.engine.groups),
                slots=epoch.memory.layout.slot_count,
                save_slots=epoch.memory.save_slots,
                block_bytes=epoch.memory.block_bytes,
                page_bytes=epoch.memory.staging.page_bytes,
            )

    def reset(self, peer: Peer, message: Reset) -> None:
        """Give the keys of the peer's engine other weights. Raises ProtocolError."""
        if peer.group is None or peer.group.scheduler is not peer or peer.group.epoch is None:
            raise ProtocolError("only the scheduler of an attached engine may reset it")
        peer.group.epoch.reset(message)

    def left(self, peer: Peer) -> None:
        """Remove a process from its group after its connection closed, and end the group's epoch."""
        group = peer.group
        if group is None:
            return
        if group.epoch is not None:
            group.epoch.channel.liveness.peer_is_gone()
            self._dissolve(group, Ending.ENGINE_GONE)
            return
        group.leave(peer)
        self._epochs.reservations.withdraw(group.number)
        if not group.peers and not group.placed:  # a placed one keeps its place until its memory is given back
            self._groups.pop(group.key, None)

    def has_engines(self) -> bool:
        return bool(self._groups)

    def end(self, epoch: Epoch, ending: Ending) -> None:
        """End an epoch from our side: the processes see the end of file and come back."""
        for group in list(self._groups.values()):
            if group.epoch is epoch:
                self._dissolve(group, ending)

    def carry_on(self) -> None:
        """Attach the engines whose memory is there by now."""
        while (reserved := self._epochs.reservations.next_done()) is not None:
            self._reserved(self.reserving.pop(reserved.number), reserved.memory)

    def tick(self, now_ns: int) -> None:
        """Hand over memory that waits for descriptors, and report engines that wait for too long."""
        for group in [group for group in self._groups.values() if group.waits_to_be_handed]:
            self._hand_over(group)
        waiting = [group for group in self._groups.values() if group.members and not group.attached]
        for group in waiting:
            if group.becomes_overdue(now_ns):
                self._report(group)
        self._shared.waiting = [
            {
                "engine": group.key[0],
                "uid": group.uid,
                "pid": group.peers[0].credentials.pid,
                "waits_for": group.waits_for() + self._others(group),
                "for_s": (now_ns - group.since_ns) // 1_000_000_000,
                "overdue": int(group.overdue),
            }
            for group in waiting
        ]

    def end_all(self, ending: Ending) -> None:
        """End all epochs, and send the processes of engines away that have none yet."""
        for group in list(self._groups.values()):
            self._dissolve(group, ending)

    def _attach(self, group: EngineGroup) -> None:
        """Reserve the memory of a complete group, or refuse it."""
        if why_not := self._no_place(group):
            for peer in group.peers:
                self._connections.refuse(peer, why_not, final=False)
            self._dissolve(group, Ending.ENGINE_GONE)
            return
        engine = group.engine()
        group.placed = True
        try:
            check_replicas(engine.workers, len(engine.groups))
            self._check_keys(group, engine)
        except ValueError as error:
            self._refuse_engine(group, error)
            return
        group.number = secrets.randbits(53) + 1
        self.reserving[group.number] = group
        self._epochs.reservations.want(group.number, self._shared.config, engine)
        self.carry_on()

    def _check_keys(self, group: EngineGroup, engine: EngineInfo) -> None:
        """Raise ValueError for an engine whose keys name no user where each key has to."""
        assert group.scheduler is not None
        operator = self._connections.access.scope(group.scheduler.credentials) is None
        if engine.scheduler.upstream_keys and self._shared.config.namespaces != "shared" and not operator:
            raise ValueError(
                f'key_format="vllm" has keys that name no user: uid={group.uid} namespaces="per_user": to let all '
                "users of this store read and replace each other's KV, set namespaces = \"shared\" in the daemon's "
                "configuration; else leave key_format out"
            )

    def _no_place(self, group: EngineGroup) -> str:
        """Return the bound that keeps a complete group from being attached now; "" where it may be."""
        config = self._shared.config
        places = Counter(other.uid for other in self._groups.values() if other.placed)
        if places.total() >= config.max_engines:
            return f"too many engines: max_engines={config.max_engines}"
        if places[group.uid] >= config.max_engines_per_uid:
            return f"too many engines of one user: uid={group.uid} max_engines_per_uid={config.max_engines_per_uid}"
        if (processes := self._connections.processes(group.uid)) + len(group.peers) > MAX_PROCESSES:
            return (
                f"too many processes of one user: uid={group.uid} processes={processes} wanted={len(group.peers)} "
                f"max={MAX_PROCESSES}: a process that ended counts until it has read its descriptors"
            )
        return ""

    def _reserved(self, group: EngineGroup, memory: EngineMemory | BaseException) -> None:
        """Make the epoch on its memory, and hand it over; or refuse the engine."""
        if not group.complete or self._groups.get(group.key) is not group:
            # A process left meanwhile, and withdrew the wish: Reservations has freed the memory.
            self._dissolve(group, Ending.ENGINE_GONE)
            return
        if isinstance(memory, BaseException):
            self._refuse_engine(group, memory)
            return
        assert group.scheduler is not None
        if not self._connections.access.may_attach(group.scheduler.credentials):  # since a reload
            self._epochs.reservations.free(memory)
            self._refuse_engine(group, ValueError(f"uid={group.uid} {NOT_ALLOWED}"))
            return
        epoch = group.epoch = self._epochs.attach(memory, group.engine())
        epoch.parts.send = group.scheduler.send
        self._epoll.register(epoch.memory.doorbell.fd, select.EPOLLIN)
        self._hand_over(group)

    def _hand_over(self, group: EngineGroup) -> None:
        """Send each process its memory; `tick` tries again where the kernel takes no more descriptors in flight."""
        epoch = group.epoch
        assert epoch is not None
        try:
            for peer in group.peers:
                if not peer.handed:
                    attached, fds = group.memory_of(peer, epoch)
                    send_message(peer.sock, attached, fds)
                    peer.handed = True
            group.waits_to_be_handed = False
            if epoch.memory.device is not None:
                epoch.memory.device.hang_up()
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # one of them died just now
                self._log.debug("peer.gone", engine=epoch.engine.engine_id, error=str(error))
                self._dissolve(group, Ending.ENGINE_GONE)
            elif not group.waits_to_be_handed:
                group.waits_to_be_handed = True
                self._log.warning("engine.waiting", engine=epoch.engine.engine_id, epoch=epoch.number, error=str(error))

    def _report(self, group: EngineGroup) -> None:
        """Say in both logs what an engine waits for."""
        stage, ranks, others = group.stage, group.world_size, self._others(group)
        told = group.members[min(group.members)]  # its scheduler, or else its first worker
        if stage not in (Stage.SCHEDULER, Stage.RANKS):
            error = f"it waits for {group.waits_for()}{others}"
            self._log.warning("engine.waiting", engine=group.key[0], error=error)
            told.send(Notice(text=f"not attached to this daemon for 30 s: {error}. Nothing is loaded or saved before"))
            return
        come = sum(role == "worker" for role, _ in group.members)
        missing = group.late() if stage is Stage.RANKS else "scheduler"
        extra = {"others": others.removeprefix("; ")} if others else {}
        self._log.warning("engine.incomplete", engine=group.key[0], come=come, ranks=ranks, missing=missing, **extra)
        named = f"rank {missing}" if stage is Stage.RANKS else stage.value
        text = (
            f"{come} of {ranks} ranks have attached to this daemon, missing: {named}{others}. Nothing is loaded or "
            "saved before all have. Look for `kvprefetch` in what those ranks log; all need this node and this socket"
        )
        told.send(Notice(text=text))

    def _others(self, group: EngineGroup) -> str:
        """Name the processes that said hello for the same engine, as of another start; "" where there are none."""
        groups = [each for each in self._groups.values() if each.key[0] == group.key[0] and each.uid == group.uid]
        found = [peer for each in groups if each is not group for peer in each.peers]
        named = ", ".join(f"{peer.hello.role} {peer.credentials.pid}" for peer in found[:NAMED] if peer.hello)
        return f"; of another start of this engine are here, by pid: {named}" if named else ""

    def _refuse_engine(self, group: EngineGroup, error: BaseException) -> None:
        for peer in group.peers:
            self._connections.refuse(peer, str(error), final=True, ours=isinstance(error, StoreError))
        self._dissolve(group, Ending.ENGINE_GONE)

    def _dissolve(self, group: EngineGroup, ending: Ending) -> None:
        if self._groups.get(group.key) is group:  # its processes may be back already, as another group
            del self._groups[group.key]
        if group.epoch is not None:
            self._epoll.unregister(group.epoch.memory.doorbell.fd)
            self._epochs.end(group.epoch, ending)
        self._epochs.reservations.withdraw(group.number)
        for peer in group.peers:
            self._connections.close(peer)


def _check(hello: Hello) -> None:
    """Raise ProtocolError for a hello that contradicts itself or that this daemon cannot serve."""
    if (hello.worker if hello.role == "worker" else hello.scheduler) is None:
        raise ProtocolError(f"{hello.role}: field required: role={hello.role}")
    if hello.scheduler is not None:
        try:
            groups_of(hello.scheduler).check()
        except ValueError as error:
            raise ProtocolError(str(error)) from None
    if hello.rank >= (hello.world_size if hello.role == "worker" else 1):
        raise ProtocolError(f"rank out of bounds: rank={hello.rank} world_size={hello.world_size}")
    if hello.world_size >= MAX_PROCESSES:
        raise ProtocolError(
            f"world_size out of bounds: world_size={hello.world_size} max={MAX_PROCESSES - 1}: "
            "one daemon serves the processes of one node"
        )
