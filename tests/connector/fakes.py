"""The other sides of the scheduler side, in one process: a daemon on real shared memory, vLLM's requests and steps."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.connector.attach.epoch import SchedulerEpoch
from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.connector.engine.geometry import Geometry
from kvprefetch.connector.identity.adapters import Adapters
from kvprefetch.connector.request.local_cache import LocalCache
from kvprefetch.connector.scheduler.scheduler import SchedulerSide
from kvprefetch.connector.words import config as configuration
from kvprefetch.connector.words.metadata import KVPrefetchMetadata, KVPrefetchWorkerMeta, RankWeights
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring._atomics import Words
from kvprefetch.shmring.credits import CreditGranter
from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.flags import Flag, FlagTable, pack, unpack
from kvprefetch.shmring.layout import Layout
from kvprefetch.shmring.liveness import Liveness, PeerState
from kvprefetch.shmring.ring import Consumer
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.attach import Absent, Attached, Stored
from kvprefetch.shmring.wire.records import FlagState, RecordKind
from tests.support import scheduler_checks
from tests.support.clock import Clock

from .reports import Blocks, reads_of, scheduled_output

BLOCK = 16
BLOCK_BYTES = 1024
MS = 1_000_000


def fails_with(check: Callable[[], object], patch: pytest.MonkeyPatch, *planted: Any, match: str | None = None) -> None:
    """The check holds, and fails once this attribute is planted: without its guard the promise does not hold."""
    check()
    patch.setattr(*planted)
    with pytest.raises(AssertionError, match=match):
        check()


class FakeDaemon:
    """The daemon's side of one epoch: reads the ring, moves flags when the test says so."""

    def __init__(self, clock: Clock, *, epoch: int = 1, flags: int = 16, slots: int = 64, ring: int = 1 << 16) -> None:
        self.clock = clock
        self.layout = Layout(epoch, ring, flags, flags, 64, 64, slots)
        self.segment = Segment.create(self.layout.total_bytes)
        self.layout.write(self.segment.buffer)
        self.words = Words(self.segment.buffer)
        self.flags = FlagTable(self.segment.buffer, self.words, self.layout)
        self.ring = Consumer(self.segment.buffer, self.words, self.layout)
        self.credits = CreditGranter(self.segment.buffer, self.words, self.layout)
        self.liveness = Liveness(self.words, consumer=True)
        self.liveness.set_state(PeerState.ACTIVE)
        self.beat()
        self.hints: list[records.Hint] = []
        self.asks: list[records.Ask] = []
        self.dones: list[records.Done] = []
        self.saved: list[records.Saved] = []
        self.used: list[records.Used] = []

    def beat(self) -> None:
        self.liveness.beat(self.clock())

    def epoch(self) -> SchedulerEpoch:
        attached = Attached(
            epoch=self.layout.epoch,
            segment_bytes=self.layout.total_bytes,
            slot_count=self.layout.slot_count,
            slot_bytes=0,
        )
        epoch = SchedulerEpoch.map(attached, [os.dup(self.segment.fd), Doorbell.create().fd])
        exchange = epoch.flags.exchange

        def checked(index: int, expected: int, desired: int) -> bool:
            before, after = unpack(expected), unpack(desired)
            assert after.state in scheduler_checks.TRANSITIONS.get(FlagState(before.state), ()), (before, after)
            return exchange(index, expected, desired)

        epoch.flags.exchange = checked  # type: ignore[method-assign]
        return epoch

    def drain(self) -> None:
        """Take all records, and free the flags that were given up."""
        while (record := self.ring.peek()) is not None:
            if record.kind == RecordKind.HINT:
                hint = records.decode_hint(record.payload)
                self.flags.lend(hint.flag, hint.pages)
                self.hints.append(hint)
            elif record.kind == RecordKind.ASK:
                self.asks.append(records.decode_ask(record.payload))
            elif record.kind == RecordKind.DONE:
                self.dones.append(records.decode_done(record.payload))
            elif record.kind == RecordKind.USED:
                self.used.append(records.decode_used(record.payload))
            else:
                self.saved.append(records.decode_saved(record.payload))
            self.ring.advance()

    def free(self) -> None:
        """Set free what the engine gave up."""
        for index in range(self.layout.flag_count):
            flag = self.flags.flag(index)
            if flag.state in (FlagState.RELEASED, FlagState.CANCELLED):
                self.move(index, FlagState.FREE, 0)

    def hint(self, request_id: str) -> records.Hint:
        """The latest hint of a request."""
        self.drain()
        return next(hint for hint in reversed(self.hints) if hint.request_id == request_id)

    def flag(self, request_id: str) -> Flag:
        return self.flags.flag(self.hint(request_id).flag)

    def move(self, index: int, state: FlagState, count: int) -> None:
        word = self.flags.load(index)
        assert self.flags.exchange(index, word, pack(unpack(word).generation, state, count))

    def stage(
        self, request_id: str, count: int, *, slots: Sequence[int] | None = None, ready: bool = True, found: int = -1
    ) -> records.Hint:
        """Publish blocks [local_blocks, count) of the request's latest hint."""
        hint = self.hint(request_id)
        taken = list(slots) if slots is not None else list(range(count - hint.local_blocks))
        self.flags.write_slots(hint.flag, 0, taken)
        self.flags.set_found(hint.flag, count if found < 0 else found)
        self.move(hint.flag, FlagState.READY if ready else FlagState.HINTED, count)
        return hint

    def look_up(self, request_id: str, found: int) -> None:
        """Say how many leading blocks the store holds; nothing is staged yet."""
        self.flags.set_found(self.hint(request_id).flag, found)

    def unreturned(self) -> list[int]:
        """Flags that are neither free nor given up: leaks, when nothing is going on."""
        gone = (FlagState.FREE, FlagState.RELEASED, FlagState.CANCELLED)
        return [i for i in range(self.layout.flag_count) if self.flags.flag(i).state not in gone]


@dataclass
class FakeLink:
    """The link without its thread."""

    epoch: SchedulerEpoch | None
    confirmed_reset: int = 0
    confirms: bool = True
    detached: list[str] = field(default_factory=list)
    resets: list[tuple[int, str]] = field(default_factory=list)  # generations and weights
    stored: deque[Stored] = field(default_factory=deque)
    absent: deque[Absent] = field(default_factory=deque)

    def start(self) -> None: ...
    def close(self) -> None: ...
    def detach(self, epoch: Any, reason: str) -> None:
        self.detached.append(reason)
        self.epoch = None

    def send_reset(self, generation: int, weights: str) -> bool:
        if self.epoch is None:
            return False
        self.resets.append((generation, weights))
        if self.confirms:
            self.confirmed_reset = generation
        return True


class Request:
    """The connector's view of vllm.v1.request.Request."""

    def __init__(self, request_id: str, tokens: int, *, salt: str = "", ratio: int = 1) -> None:
        self.request_id = request_id
        self.num_tokens = self.num_prompt_tokens = tokens
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.status = SimpleNamespace(name="WAITING")
        self.resumable = False
        self.skip_reading_prefix_cache = False
        self.use_structured_output = False
        self.priority = 0
        self.trace_headers: dict[str, str] | None = None
        self.lora_request: Any = None
        self.cache_salt: str | None = None
        self.mm_features: list[Any] = []
        self.prompt_embeds: Any = None
        self.prompt_is_token_ids: list[bool] | None = None
        self.session_id: str | None = None
        self.kv_transfer_params: object = None
        self.kv_hints: object = None
        self._salt, self._ratio = salt or request_id, ratio

    @property
    def block_hashes(self) -> list[bytes]:
        unit = BLOCK // self._ratio
        return [hashlib.sha256(f"{self._salt}-{i}".encode()).digest() for i in range(self.num_tokens // unit)]

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.num_tokens))

    def digests(self, start: int, stop: int) -> list[bytes]:
        return self.block_hashes[self._ratio - 1 :: self._ratio][start:stop]

    def names(self, start: int, stop: int) -> list[bytes]:
        return [digest + b"\0" for digest in self.digests(start, stop)]


def one_group(ratio: int = 1) -> Groups:
    """A group of full attention with so many digests of the prompt in a block."""
    return Groups((Group(Kind.FULL, BLOCK),), BLOCK // ratio)


GEOMETRY = Geometry(
    groups=one_group(),
    world_size=1,
    block_bytes=BLOCK_BYTES,
    max_blocks=64,
    max_running=16,
    loads=True,
    saves=True,
    spec_kinds=(("full_attention", None),),
    lockstep=False,
)


class FakeCache(LocalCache):
    """The engine's own prefix cache, as the test fills it."""

    def __init__(self) -> None:
        self.hits: dict[str, int] = {}  # request id -> local tokens
        self.count = 0
        self.looks = 0  # at what is local of a request
        self.names: dict[int, bytes] = {}  # block id -> digest and group

    def tokens(self, request: Any) -> int:
        self.looks += 1
        return self.hits.get(request.request_id, 0)

    def guess(self, request: Any, most: int) -> int | None:
        return min(most, self.hits.get(request.request_id, 0) // BLOCK)

    def blocks(self) -> int:
        return self.count

    def holds(self, block_id: int, name: bytes) -> bool:
        return self.names.get(block_id) == name

    def find(self, name: bytes) -> int | None:
        return next((block for block, each in self.names.items() if each == name), None)


def block_ids(request: Request) -> list[int]:
    """Return the ids of all its blocks in a model with one group: 100 + index."""
    return [100 + i for i in range((request.num_tokens + BLOCK - 1) // BLOCK)]


class Engine:
    """A scheduler side with a fake daemon, a fake link, and vLLM's calling order.

    `options`: of FakeDaemon, of Geometry, of Adapters, and the connector's own settings; `credits`: granted save slots.
    """

    def __init__(
        self, *, publish: bool = False, clock: Clock | None = None, credits: Sequence[int] = (), **options: Any
    ) -> None:
        def taken(names: Iterable[str]) -> dict[str, Any]:
            return {name: options.pop(name) for name in names if name in options}

        self.clock = clock or Clock()
        self.daemon = FakeDaemon(self.clock, **taken(("flags", "slots", "ring")))
        self.daemon.credits.grant(list(credits))
        self.link = FakeLink(self.daemon.epoch())
        self.cache = FakeCache()
        geometry = replace(GEOMETRY, **taken(GEOMETRY.__dataclass_fields__))
        known = taken(("sure", "late", "towers"))
        self.ranks = geometry.world_size
        # With a bound alone, the clock's steps do not decide when a wait ends.
        settings = {"socket": "/nowhere", "wait_policy": "timeout", "spin_us": 0, "idle_wait_us": 0, **options}
        config = configuration.load(settings)
        link: Any = self.link
        adapters = Adapters(geometry.world_size, **known)
        self.side = SchedulerSide(config, geometry, link, clock=self.clock, publish=publish, adapters=adapters)
        self.side.cache = self.side.early.cache = self.cache
        # Hooks that do more than to call the scheduler side.
        self.hooks = KVPrefetchConnector.__new__(KVPrefetchConnector)
        self.hooks.scheduler_side = self.side

    def add(self, request_id: str, tokens: int, *, local: int = 0, staged: int | None = None, **fields: Any) -> Request:
        """A request arrives; the blocks up to `staged` of its hint are there."""
        request = Request(request_id, tokens, **{k: fields.pop(k) for k in ("salt", "ratio") if k in fields})
        for name, value in fields.items():
            setattr(request, name, value)
        self.cache.hits[request_id] = local
        self.side.arrived(request)
        if staged is not None:
            self.daemon.stage(request_id, staged)
        return request

    def admitted(self, request_id: str, tokens: int, **fields: Any) -> Request:
        """A request arrives, and is admitted without a load."""
        request = self.add(request_id, tokens, **fields)
        self.admit(request)
        return request

    def admit(self, request: Request) -> None:
        """The request reaches the head of the queue and is admitted without a load."""
        while self.match(request)[0] is None:
            self.daemon.stage(request.request_id, 0, found=0)
        self.allocate(request, 0)

    def take(self, request: Request, tokens: int) -> list[int]:
        """So many tokens are loaded before the forward, into blocks that are allocated now."""
        assert self.match(request) == (tokens, False)
        return self.allocate(request, tokens)

    def match(self, request: Request, local: int | None = None) -> tuple[int | None, bool]:
        return self.side.match(request, self.cache.hits[request.request_id] if local is None else local)

    def allocate(self, request: Request, tokens: int, *, local: int | None = None) -> list[int]:
        """Blocks for the whole request."""
        ids = block_ids(request)
        self.side.allocated(request, Blocks(ids), tokens)
        request.num_computed_tokens = (self.cache.hits[request.request_id] if local is None else local) + tokens
        return ids

    def step(
        self,
        scheduled: Iterable[tuple[Request, int]] = (),
        *,
        step_ms: float = 0.0,
        tables: tuple[list[int], ...] = (),
        offers: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
        ends: bool = True,
    ) -> KVPrefetchMetadata:
        """build_connector_meta, then what vLLM does after it; the step takes `step_ms`, and `ends` when this returns.

        `tables`: the blocks of each request in each group; `offers`: as in scheduled_output.
        """
        pairs = list(scheduled)
        blocks = {request.request_id: tables or (block_ids(request),) for request, _ in pairs}
        output = scheduled_output(pairs, blocks, offers)
        meta = self.hooks.build_connector_meta(output)
        scheduler_checks.check(self.side)
        self.clock.advance_ms(step_ms)
        for request, tokens in pairs:
            request.num_computed_tokens += tokens
        if ends:
            self.hooks.get_kv_connector_stats()
        return meta

    def acknowledge(
        self,
        meta: KVPrefetchMetadata,
        *,
        failed: Iterable[int] = (),
        failed_loads: Sequence[int] = (),
        ranks: int | None = None,
    ) -> None:
        loads, saves = [load.load_id for load in meta.loads], [save.save_id for save in meta.saves]
        for _ in range(self.ranks if ranks is None else ranks):
            self.side.outputs(
                KVPrefetchWorkerMeta(dict.fromkeys(loads, 1), dict.fromkeys(saves, 1), set(failed), set(failed_loads)),
                failed_blocks=failed_loads,
            )

    def reset(self, digest: bytes = b"weights") -> None:
        """A reset of the cache, and what all ranks say in their first step after it."""
        assert self.side.reset()
        self.report(*[digest] * self.ranks)

    def report(self, *digests: bytes, before: bytes = b"", first_rank: int = 0) -> None:
        """Ranks have these digests of their weights; b"" of one that was updated since its last digest."""
        number = self.side.resets.step.number
        of_ranks = {rank: RankWeights(number, each, before) for rank, each in enumerate(digests, first_rank)}
        self.side.outputs(KVPrefetchWorkerMeta(weights=of_ranks))

    def read(self, adapter: Any, *contents: str) -> None:
        """A step has ended in which each rank read the adapter, with this content; one content: all have read it."""
        ranks = contents if len(contents) > 1 else contents * self.ranks
        self.side.outputs(reads_of(adapter, *ranks))

    def preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        request.num_computed_tokens = 0
