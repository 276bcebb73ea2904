"""One attached engine: its segments, its ring's records turned into planner events, its orders turned into store jobs.

Everything here runs on the main loop.  What arrives in the ring is untrusted: a bad record is counted and skipped, a
corrupt segment ends this session and no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..shmring import protocol
from ..shmring._atomics import Words
from ..shmring.credits import CreditGranter
from ..shmring.doorbell import Doorbell
from ..shmring.flags import FlagTable, pack, unpack
from ..shmring.layout import Layout, power_of_two_at_least
from ..shmring.liveness import Liveness, PeerState
from ..shmring.protocol import FlagState, Hello, ProtocolError, RecordKind
from ..shmring.ring import Consumer, Record
from ..shmring.segment import Segment
from . import transfers
from .config import DaemonConfig
from .logs import Log
from .planner import Fetched, Key, Order, Planner, Request
from .pools import Pools
from .staging import HostStaging, slots_for
from .store import Store
from .timeline import Timeline

MAX_TABLE_BYTES = 16 << 20
SAVE_PAUSE_NS = (100_000_000, 2_000_000_000)
SAVE_TRIES = 8  # about ten seconds of a full store


@dataclass
class Counters:
    """What this session did, for the log and for auditors."""

    hints: int = 0
    bad_records: int = 0
    hit_blocks: int = 0
    fetched_blocks: int = 0
    failed_blocks: int = 0
    saved_blocks: int = 0
    present_blocks: int = 0
    lost_saves: int = 0


@dataclass
class _SaveJob:
    """Blocks on their way into the store; `blocks` are those still to put."""

    saved: protocol.Saved
    blocks: list[tuple[bytes, int]]
    stored: int = 0
    present: int = 0
    failed: int = 0
    tries: int = 0


class _Flags:
    """The planner's port to the completion flags."""

    def __init__(self, table: FlagTable) -> None:
        self._table = table

    def publish(self, key: Key, start: int, slots: Any, count: int, final: bool) -> bool:
        flag, generation = key
        self._table.write_slots(flag, start, slots)
        state = FlagState.READY if final else FlagState.HINTED
        return self._move(key, (FlagState.HINTED,), pack(generation, state, count))

    def expire(self, key: Key) -> bool:
        return self._move(key, (FlagState.HINTED, FlagState.READY), pack(key[1], FlagState.EXPIRED, 0))

    def free(self, key: Key) -> bool:
        """RELEASED or CANCELLED -> FREE: nothing of it is pinned any more."""
        return self._move(key, (FlagState.RELEASED, FlagState.CANCELLED), pack(key[1], FlagState.FREE, 0))

    def _move(self, key: Key, states: tuple[FlagState, ...], desired: int) -> bool:
        flag, generation = key
        while True:
            word = self._table.load(flag)
            seen = unpack(word)
            if seen.generation != generation or seen.state not in states:
                return False
            if self._table.exchange(flag, word, desired):
                return True


class EngineSession:
    """One epoch of one engine incarnation, from the moment all its processes said hello until the last one is gone."""

    def __init__(
        self, config: DaemonConfig, epoch: int, scheduler: Hello, workers: list[Hello], store: Store, pools: Pools,
        log: Log, clock_ns: Callable[[], int], *, tiers: bool,
    ) -> None:  # fmt: skip
        shapes = [worker.worker for worker in workers]
        wants = scheduler.scheduler
        assert wants is not None
        block_bytes = [shape.block_bytes[0] for shape in shapes if shape is not None]
        self.engine_id = scheduler.engine_id
        self.epoch = epoch
        self.block_bytes = sum(block_bytes)
        self.slot_count = slots_for(config.staging, block_bytes)
        save_slots = min(self.slot_count - 1, max(1, int(self.slot_count * config.save_share))) if wants.saves else 0
        self.save_slots = save_slots
        self.layout = Layout(
            ring_bytes=max(config.hint_ring, power_of_two_at_least(4 * wants.max_hint_bytes)),
            flag_count=max(16, min(1024, MAX_TABLE_BYTES // (4 * wants.max_blocks))),
            table_entries=wants.max_blocks,
            credit_entries=power_of_two_at_least(max(1, save_slots)),
            slot_count=self.slot_count,
            epoch=epoch,
        )
        self._store, self._pools, self._clock_ns, self._tiers = store, pools, clock_ns, tiers
        self._log = log.bind(engine=self.engine_id, epoch=epoch)
        self.counters = Counters()
        self.staging = HostStaging(self.slot_count, block_bytes)
        try:
            self.control = Segment.create(self.layout.total_bytes)
        except BaseException:
            self.staging.close()
            raise
        self.layout.write(self.control.buffer)
        self.words = Words(self.control.buffer)
        self.doorbell = Doorbell.create()
        self.ring = Consumer(self.control.buffer, self.words, self.layout)
        self.table = FlagTable(self.control.buffer, self.words, self.layout)
        self.liveness = Liveness(self.words, consumer=True)
        self.liveness.beat(clock_ns())
        self._flags = _Flags(self.table)
        fetch_slots = self.slot_count - save_slots
        self.planner = Planner(fetch_slots, self._flags, chunk_blocks=config.chunk // self.block_bytes)
        self._credits = CreditGranter(self.control.buffer, self.words, self.layout)
        self._credits.grant(list(range(fetch_slots, self.slot_count)))
        self._outstanding_saves = set(range(fetch_slots, self.slot_count))  # granted, not yet back
        self._save_jobs: deque[_SaveJob] = deque()
        self._saving = False
        self._save_not_before_ns = 0
        self._save_pause_ns = SAVE_PAUSE_NS[0]
        self._timelines: dict[Key, Timeline] = {}
        self.reset_generation = 0
        self._resets: deque[Callable[[bool], None]] = deque()
        self._reset_timeout_s = 0.0
        self._jobs = 0
        self._registered = False
        self.closing = False
        prefixes = tuple(shape.key_prefix[0] for shape in shapes if shape is not None)
        self.shape = transfers.Shape(prefixes, self.staging)

    def register_staging(self) -> None:
        """Make the staging known to an open store (RDMA needs it; once per opened store)."""
        for address, length in self.staging.areas():
            self._store.register(address, length)
        self._registered = True

    # --- intake -----------------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """All processes mapped the epoch: hints are welcome."""
        self.liveness.set_state(PeerState.ACTIVE)

    def drain(self, limit: int) -> int:
        """Handle up to `limit` records; how many there were. Raises SegmentCorrupt."""
        for count in range(limit):
            record = self.ring.peek()
            if record is None:
                return count
            try:
                self._handle(record)
            except ProtocolError as error:
                self.counters.bad_records += 1
                self._log.warning("record.bad", error=str(error), count=self.counters.bad_records)
            self.ring.advance()
        return limit

    def _handle(self, record: Record) -> None:
        if record.kind == RecordKind.HINT:
            self._hint(protocol.decode_hint(record.payload))
        elif record.kind == RecordKind.ASK:
            ask = protocol.decode_ask(record.payload)
            if (timeline := self._timelines.get((ask.flag, ask.generation))) is not None:
                timeline.asked_ns = ask.asked_ns
            self.planner.ask((ask.flag, ask.generation))
        elif record.kind == RecordKind.DONE:
            self._done(protocol.decode_done(record.payload))
        elif record.kind == RecordKind.SAVED:
            self._saved(protocol.decode_saved(record.payload))
        else:
            raise ProtocolError(f"unknown record kind: kind={record.kind}")

    def _hint(self, hint: protocol.Hint) -> None:
        if hint.flag >= self.layout.flag_count or hint.blocks > self.layout.table_entries:
            raise ProtocolError(
                f"hint out of bounds: flag={hint.flag} max={self.layout.flag_count - 1} "
                f"blocks={hint.blocks} max={self.layout.table_entries}"
            )
        key = (hint.flag, hint.generation)
        seen = unpack(self.table.load(hint.flag))
        if seen.generation != hint.generation or key in self.planner.requests:
            raise ProtocolError(f"hint for another use of the flag: flag={hint.flag} generation={hint.generation}")
        if seen.state != FlagState.HINTED:  # cancelled before we looked
            self._flags.free(key)
            return
        self.counters.hints += 1
        now = self._clock_ns()
        request = self.planner.hint(
            key, bytes(hint.hashes), hint.hash_bytes, hint.blocks, hint.local_blocks, hint.priority
        )
        self._timelines[key] = Timeline(hint, now)
        if self._resets:  # keys of the old weights may still be there: a miss
            self.planner.looked_up(key, request.local)
            return
        digests = [request.digest(block) for block in range(request.local, request.blocks)]
        job = partial(transfers.look_up, self._store, self.shape, digests)
        self._start(self._pools.look_up, job, partial(self._looked_up, key, self.reset_generation), None)

    def _looked_up(self, key: Key, reset_generation: int, run: int | None) -> None:
        request = self.planner.requests.get(key)
        if request is None:
            return
        if reset_generation != self.reset_generation:
            run = 0
        found = request.local + (run or 0)
        timeline = self._timelines[key]
        timeline.looked_up_ns = self._clock_ns()
        timeline.store_unavailable = run is None
        timeline.found_blocks = found
        self.counters.hit_blocks += run or 0
        self.table.set_found(key[0], found)
        self.planner.looked_up(key, found)

    def _done(self, done: protocol.Done) -> None:
        key = (done.flag, done.generation)
        if done.flag >= self.layout.flag_count:
            raise ProtocolError(f"flag out of bounds: flag={done.flag} max={self.layout.flag_count - 1}")
        state = unpack(self.table.load(done.flag))
        if state.generation == done.generation and state.state in (FlagState.RELEASED, FlagState.CANCELLED):
            self._finish(key, done)

    def _finish(self, key: Key, done: protocol.Done | None) -> None:
        request = self.planner.finish(key)
        timeline = self._timelines.pop(key, None)
        self._flags.free(key)
        if request is not None and timeline is not None:
            self._log.info("request.done", **timeline.fields(request, done, self.block_bytes))

    def scan(self, now_ns: int) -> None:
        """Find what a full ring did not say: flags given up without a nudge. Called a few times a second."""
        for key in list(self.planner.requests):
            flag = unpack(self.table.load(key[0]))
            if flag.generation != key[1] or flag.state in (FlagState.RELEASED, FlagState.CANCELLED, FlagState.FREE):
                self._finish(key, None)
        self._next_save(now_ns)

    # --- fetching ---------------------------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Start one fetch if there is one to start; False when there is none."""
        if self.closing or not self.planner.has_work:
            return False
        order, revoked = self.planner.next_order()
        for request in revoked:
            self._revoked(request, "revoked")
        if order is None:
            return False
        blocks = [(block.digest, block.slot) for block in order.blocks]
        job = partial(transfers.fetch, self._store, self.shape, blocks, tiers=self._tiers)
        self._start(self._pools.fetch, job, partial(self._fetched, order), [Fetched(False)] * len(blocks))
        return True

    def _fetched(self, order: Order, results: list[Fetched]) -> None:
        good = sum(result.ok for result in results)
        self.counters.fetched_blocks += good
        self.counters.failed_blocks += len(results) - good
        self.planner.fetched(order.number, results, self._clock_ns())

    def _revoked(self, request: Request, outcome: str) -> None:
        timeline = self._timelines.pop(request.key, None)
        if timeline is not None:
            fields = timeline.fields(request, None, self.block_bytes)
            self._log.info("request.done", **{**fields, "outcome": outcome})

    # --- saving -----------------------------------------------------------------------------------------------------

    def _saved(self, saved: protocol.Saved) -> None:
        if len(set(saved.slots)) != len(saved.slots) or not self._outstanding_saves.issuperset(saved.slots):
            raise ProtocolError(f"slots were not granted: slots={saved.slots[:8]}")
        self._outstanding_saves.difference_update(saved.slots)
        if saved.dropped or saved.reset_generation < self.reset_generation:
            self.counters.lost_saves += 0 if saved.dropped else len(saved.slots)
            self._grant(saved.slots)
            return
        self._save_jobs.append(_SaveJob(saved, list(zip(saved.hashes, saved.slots, strict=True))))
        self._next_save(self._clock_ns())

    def _next_save(self, now_ns: int) -> None:
        """One save job at a time per engine; after the store ran out of space, not before its pause is over."""
        if self._saving or self.closing or not self._save_jobs or now_ns < self._save_not_before_ns:
            return
        self._saving = True
        job = self._save_jobs.popleft()
        work = partial(transfers.save, self._store, self.shape, job.blocks)
        lost = transfers.SaveResult(0, 0, len(job.blocks), [])
        self._start(self._pools.save, work, partial(self._stored, job), lost)

    def _stored(self, job: _SaveJob, result: transfers.SaveResult) -> None:
        self._saving = False
        job.stored += result.stored
        job.present += result.present
        job.failed += result.failed
        now = self._clock_ns()
        job.tries += 1
        if result.again and job.tries < SAVE_TRIES and not self._resets:
            # Its slots stay taken, so a full store slows saving down through the credits, and nothing else.
            job.blocks = result.again
            self._save_jobs.appendleft(job)
            self._save_not_before_ns = now + self._save_pause_ns
            self._save_pause_ns = min(2 * self._save_pause_ns, SAVE_PAUSE_NS[1])
        else:
            job.failed += len(result.again)
            self._save_pause_ns = SAVE_PAUSE_NS[0]
            self._save_done(job)
        if self._resets:
            self._remove()
        self._next_save(now)

    def _save_done(self, job: _SaveJob) -> None:
        self.counters.saved_blocks += job.stored
        self.counters.present_blocks += job.present
        self.counters.lost_saves += job.failed
        self._log.info(
            "save.done", save_id=job.saved.save_id, stored_blocks=job.stored, present_blocks=job.present,
            failed_blocks=job.failed, tries=job.tries,
        )  # fmt: skip
        self._grant(job.saved.slots)

    def _grant(self, slots: list[int]) -> None:
        self._outstanding_saves.update(slots)
        self._credits.grant(slots)

    # --- reset ------------------------------------------------------------------------------------------------------

    def reset(self, reset_generation: int, timeout_s: float, reply: Callable[[bool], None]) -> None:
        """Void everything staged, hinted or being saved before this generation, remove the keys, then reply."""
        self.reset_generation = max(self.reset_generation, reset_generation)
        for request in self.planner.reset():
            self._revoked(request, "reset")
        while self._save_jobs:
            job = self._save_jobs.popleft()
            self.counters.lost_saves += len(job.blocks)
            self._grant(job.saved.slots)
        self._reset_timeout_s = timeout_s
        self._resets.append(reply)
        if not self._saving and len(self._resets) == 1:
            self._remove()

    def _remove(self) -> None:
        # On the save thread, after every put of the old generation: a put cannot bring a removed key back.
        self._saving = True
        job = partial(transfers.remove_all, self._store, self.shape, self._reset_timeout_s)
        self._start(self._pools.save, job, self._removed, False)

    def _removed(self, ok: bool) -> None:
        self._saving = False
        self._log.info("store.reset", confirmed=ok, reset_generation=self.reset_generation)
        self._resets.popleft()(ok)
        if self._resets:
            self._remove()
        self._next_save(self._clock_ns())

    # --- life -------------------------------------------------------------------------------------------------------

    def _start(
        self, submit: Callable[..., None], job: Callable[[], Any], done: Callable[[Any], None], failed: Any
    ) -> None:
        """Run a store job; while any is running the staging stays mapped and registered.

        `failed` stands for the result when the job raised: one faulty call must not take other requests with it.
        """
        self._jobs += 1

        def finished(future: Future[Any]) -> None:
            self._jobs -= 1
            if (error := future.exception()) is not None:
                self._log.error("job.failed", error=repr(error))
            if not self.closing:
                done(failed if error is not None else future.result())

        submit(job, finished)

    @property
    def idle(self) -> bool:
        """No store call touches this session's memory."""
        return self._jobs == 0

    def gauges(self) -> dict[str, int]:
        """Slots, pins, requests and credits, as an auditor wants them."""
        return {
            **self.planner.gauges(),
            "save_slots": self.save_slots,
            "save_slots_out": self.save_slots - len(self._outstanding_saves),
            "saves_queued": len(self._save_jobs),
        }

    def end(self) -> None:
        """No new work; the segments stay until idle. The engine reads CLOSING as gone."""
        self.closing = True
        self.liveness.set_state(PeerState.CLOSING)

    def close(self) -> None:
        """Free everything; only when idle and after the last process of the engine is gone."""
        if self._registered:
            for address, _ in self.staging.areas():
                self._store.unregister(address)
        self._log.info("engine.detached", **vars(self.counters), **self.gauges())
        self.staging.close()
        # Their views would keep the control segment mapped.
        del self.ring, self.table, self._flags, self._credits, self.liveness, self.planner
        self.words.release()
        self.control.close()
        self.doorbell.close()
