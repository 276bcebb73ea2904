"""The parts of one epoch as they are made, and the two ways in which they reach the outside: a call, and a step.

The parts are pure: they take events and results with the time, and hand out what to do next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...shmring.wire.admin import Announce, Outcome
from ...shmring.wire.codec import Message
from ..config.model import Mode
from ..planning.planner import Planner
from ..planning.promotion import Promotions
from ..store.client import Store
from ..store.storage_nodes import Get
from ..telemetry.counters import Counters
from ..telemetry.logs import Log
from ..telemetry.metrics import Metrics
from ..telemetry.trace import Traces
from ..telemetry.waits import LostWaits
from ..work.calls import Call, Caller, Kind
from ..work.pools import Pools
from . import transfers
from .ahead import Ahead
from .channel import Channel
from .lookups import LookUps
from .memory import EngineInfo, EngineMemory
from .neighbours import NegativeCaches
from .orphaned import Orphaned
from .promoter import COPY_BYTES, Promoter
from .reasons import Histories, Reasons
from .saver import Saver

PUTS_PER_CHUNK = 4  # a put may have a quarter of a chunk on the slowest link
SAVING_AT_ONCE = 4  # a put takes at most one of so many parts of the save slots, so that slots come back early
Run = Callable[[], Any]
OnResult = Callable[[Any], None]
OnOverdue = Callable[[], None]


class Services(NamedTuple):
    """What the daemon lends to its epochs.

    `chunk_bytes`: of one store call; `disk_call_bytes`: the most of one that reads from disks.  `media`: look-ups ask
    where values lie.
    """

    store: Store
    pools: Pools
    log: Log
    metrics: Metrics
    clock_ns: Callable[[], int]
    chunk_bytes: int
    disk_call_bytes: int
    lease_ns: int
    media: bool
    histories: Histories
    negatives: NegativeCaches


class EpochParts(Caller):
    """The parts of one epoch. `send` reaches the engine's scheduler, once it is set."""

    def __init__(self, services: Services, memory: EngineMemory, engine: EngineInfo) -> None:
        super().__init__(services.log.bind(engine=engine.engine_id, epoch=memory.layout.epoch))
        self.engine, self.memory, self.number = engine, memory, memory.layout.epoch
        self._services, self._store, self._pools = services, services.store, services.pools
        self.since_ns = services.clock_ns()
        self.counters, self.waits = Counters(services.metrics), LostWaits()
        self.ranks = self._ranks(engine.scheduler.weights)
        self.channel = Channel(memory.control, memory.layout, engine.groups)
        self.channel.liveness.beat(self.since_ns)
        self.traces = Traces(memory.block_bytes, len(engine.groups))
        chunk_blocks = max(1, services.chunk_bytes // memory.block_bytes)
        part_bytes = sum(-(-size // 4096) * 4096 + 8192 for size in memory.staging.block_bytes)  # as a disk counts
        self.planner = Planner(
            memory.save_slots_from,
            self.channel,
            chunk_blocks=chunk_blocks,
            lost=memory.staging.lost,
            disk_chunk_blocks=min(chunk_blocks, services.disk_call_bytes // part_bytes),
            device_slots=range(memory.layout.slot_count, memory.layout.slot_bound),
        )
        self._negative = services.negatives.join(self.ranks.namespaces)
        self.groups = engine.groups
        self.look_ups = LookUps(
            self.planner.requests, self._negative, timeout_ns=self._pools.timeout_ns, lease_ns=services.lease_ns
        )
        save_slots = range(memory.save_slots_from, memory.layout.slot_count)
        self.reasons = Reasons(self._pools.rates, services.histories, engine.uid, self.ranks.namespaces)
        generation = engine.scheduler.reset_generation
        self.saver = Saver(save_slots, memory.staging.lost, self.reasons.stored, generation)
        self._put_blocks = (max(1, chunk_blocks // PUTS_PER_CHUNK), max(1, len(save_slots) // SAVING_AT_ONCE))
        self.channel.credits.grant(self.saver.next_grant(saving=True))
        room = memory.save_slots_from // len(engine.groups)  # a block of the prompt is one of each group at most
        self.ahead = Ahead(engine.groups.unit_tokens // engine.groups.hash_tokens, room, partial=engine.groups.partial)
        copies, copy_blocks = self.planner.blocks.copies, COPY_BYTES // memory.block_bytes
        self.promotions = Promotions(copies, self.planner.requests, self.channel, chunk_blocks=copy_blocks)
        self._promoter = Promoter(memory.device, self.promotions)
        self.orphaned = Orphaned()
        self._gets: dict[int, Get] = {}  # of the fetches that did not return, by the order's number
        self.heard_ns = 0  # when the last record came
        self._mode: Mode = "on"
        self._ended_ns = 0  # when it ended, until the log said that something keeps its memory
        self._replies: dict[int, tuple[Announce, Callable[[Outcome], None]]] = {}  # of announcements, by number
        self._announcements = 0
        self.send: Callable[[Message], None] = lambda _: None

    def _ranks(self, weights: str) -> transfers.RankLayout:
        """Return where the engine's blocks are, with the keys of these weights."""
        engine, staging = self.engine, self.memory.staging
        return transfers.RankLayout.of(engine.workers, staging, owner=engine.owner, weights=weights)

    @property
    def idle(self) -> bool:
        """No call touches this epoch's memory."""
        return self.running == 0

    @property
    def _saving(self) -> bool:
        return self._mode == "on"

    def _start(self, kind: Kind, run: Run, on_result: OnResult, on_overdue: OnOverdue | None = None) -> None:
        self._pools.start(Call(kind, run, on_result, on_overdue, self))
