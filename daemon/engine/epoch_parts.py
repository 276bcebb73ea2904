"""The parts of one epoch, as they are made: events and results in, with the time; what to do next out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...shmring.wire.checks import Mode
from ...shmring.wire.codec import Message
from ..config.model import DaemonConfig
from ..planning.bad_values import BadValues
from ..planning.blocks import MAX_RUN
from ..planning.planner import Planner
from ..planning.promotion import Promotions
from ..store.client import Store
from ..store.disk import DISK_BUFFER_BYTES
from ..telemetry.counters import Counters
from ..telemetry.logs import Log
from ..telemetry.metrics import Metrics
from ..telemetry.trace import Lacked
from ..work.pools import Pools
from . import transfers
from .ahead import Ahead
from .channel import Channel
from .leases import Leases
from .lookups import LookUps
from .memory import EngineInfo, EngineMemory
from .promoter import COPY_BYTES, Promoter
from .reasons import Reasons
from .saver import Saver
from .sessions import Sessions

PUTS_PER_CHUNK = 4  # a put may have a quarter of a chunk on the slowest link
RECENT = 256  # ended requests that are remembered
SAVING_AT_ONCE = 4  # a put takes at most one of so many parts of the save slots, so that slots come back early


@dataclass(eq=False)
class Services:
    """What the daemon lends to its epochs. A reload replaces `config`.

    `full_until_ns`: until then no lease is renewed for what engines hold, as the store refused a put for want of room.
    """

    config: DaemonConfig
    store: Store
    pools: Pools
    log: Log
    metrics: Metrics
    clock_ns: Callable[[], int]

    def __post_init__(self) -> None:
        self.full_until_ns = 0


class EpochParts:
    """What one epoch has. `mode`: what the daemon does for the engine; `send` reaches its scheduler, once set."""

    def __init__(self, services: Services, memory: EngineMemory, engine: EngineInfo) -> None:
        self.services, self.memory, self.engine, config = services, memory, engine, services.config
        self.log = services.log.bind(engine=engine.engine_id, epoch=memory.layout.epoch)
        self.counters = Counters(services.metrics)
        self.mode: Mode = "on"
        self.send: Callable[[Message], object] = lambda _: None
        self.ranks = self.ranks_of(engine.scheduler.weights)
        self.channel = Channel(memory.control, memory.layout, engine.groups)
        self.lacked: deque[Lacked] = deque(maxlen=1024)  # not in the log, which has no names
        self.recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=RECENT)  # (when, request.done), for `top`
        chunk_blocks = max(1, min(MAX_RUN, config.chunk // memory.block_bytes))
        part_bytes = sum(-(-size // 4096) * 4096 + 8192 for size in memory.staging.block_bytes)  # as a disk counts
        self.planner = Planner(
            memory.save_slots_from,
            self.channel,
            chunk_blocks=chunk_blocks,
            quarantined=memory.staging.quarantined,
            disk_chunk_blocks=min(chunk_blocks, max(1, DISK_BUFFER_BYTES // config.fetch_threads // part_bytes)),
            device_slots=range(memory.layout.slot_count, memory.layout.slot_bound),
        )
        self.bad_values = BadValues()
        self.sessions, requests = Sessions(engine.groups), self.planner.requests
        leases, timeout_ns = Leases(config.lease_ns, requests, self.sessions), services.pools.timeout_ns
        shards = max(map(len, self.ranks.shards))
        self.look_ups = LookUps(requests, self.bad_values, leases, timeout_ns=timeout_ns, shards=shards)
        save_slots = range(memory.save_slots_from, memory.layout.slot_count)
        self.reasons = Reasons(services.pools.rates)
        self.index_due_ns = 0  # when the user's index next has this engine's namespace written (index.py)
        self.saver = Saver(save_slots, memory.staging.quarantined, engine.scheduler.reset_generation)
        self.put_blocks = (max(1, chunk_blocks // PUTS_PER_CHUNK), max(1, len(save_slots) // SAVING_AT_ONCE))
        room = memory.save_slots_from // len(engine.groups)  # a block of the prompt is one of each group at most
        self.ahead = Ahead(engine.groups, room)
        copies, copy_blocks = self.planner.blocks.copies, COPY_BYTES // memory.block_bytes
        self.promotions = Promotions(copies, self.planner.requests, self.channel, chunk_blocks=copy_blocks)
        self.promoter = Promoter(memory.device, self.promotions)

    def ranks_of(self, weights: str) -> transfers.RankLayout:
        """Return where the engine's blocks are, with the keys of these weights."""
        engine, staging = self.engine, self.memory.staging
        return transfers.RankLayout.of(engine.workers, staging, owner=engine.owner, weights=weights)
