"""One attached engine: its memory, its liveness, and the records of its ring turned into events of its parts.

Everything here runs on the main loop.  What arrives in the ring is untrusted: a bad record is counted and skipped, a
corrupt segment ends this epoch and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...shmring._atomics import Words
from ...shmring.credits import CreditGranter
from ...shmring.flags import FlagTable
from ...shmring.liveness import Liveness, PeerState
from ...shmring.ring import Consumer, Record
from ...shmring.wire import records
from ...shmring.wire.admin import MAX_WARM_DIGESTS, Report, Warm
from ...shmring.wire.attach import Mapped
from ...shmring.wire.codec import Message
from ...shmring.wire.records import FlagState, ProtocolError, RecordKind
from ..config.model import Mode
from ..planning.negative import NegativeCache
from ..planning.planner import Key, Lane, Planner, Request
from ..store.client import Store
from ..telemetry.counters import WARM_RESULTS, Counters
from ..telemetry.events import Ending
from ..telemetry.logs import Log
from ..telemetry.trace import Traces
from ..work.calls import Call, Caller, Kind
from ..work.pools import Pools
from . import transfers
from .fetcher import Fetcher
from .flags import EpochFlags
from .lookups import LookUps, Question
from .memory import EngineInfo, EngineMemory
from .orphaned import Untold
from .promoter import Promoter
from .saver import Saver
from .warming import Warming, about

LAST_RECORDS = 4096  # read at the end of an epoch: all that an honest engine can have on the way, and no flood
PUTS_PER_CHUNK = 4  # a load that comes while a put is in flight waits for a quarter of a chunk at most


class Epoch:
    """One epoch of one engine incarnation, from the moment all its processes said hello until the last one is gone.

    `chunk_bytes`: of one store call; `disk_call_bytes`: the most of one that reads from disks.  `media`: look-ups ask
    where values lie.
    """

    def __init__(
        self, memory: EngineMemory, engine: EngineInfo, store: Store, pools: Pools, log: Log,
        clock_ns: Callable[[], int], *, chunk_bytes: int, media: bool, disk_call_bytes: int, lease_ns: int,
    ) -> None:  # fmt: skip
        self.engine_id, self.namespaces = engine.engine_id, frozenset(engine.namespaces)
        self.memory, self.layout, self.staging, self.control = memory, memory.layout, memory.staging, memory.control
        self.number, self.slot_count, self.save_slots = self.layout.epoch, self.layout.slot_count, memory.save_slots
        self.block_bytes = sum(self.staging.block_bytes)
        self.removal_ms = store.removal_ms
        self._store, self._pools, self._clock_ns, self._media = store, pools, clock_ns, media
        self._log = log.bind(engine=self.engine_id, epoch=self.number)
        self.totals = Counters()
        self.shape = transfers.RankLayout.of(engine.workers, self.staging)
        self.words = Words(self.control.buffer)
        self.doorbell = memory.doorbell
        self.ring = Consumer(self.control.buffer, self.words, self.layout)
        self.table = FlagTable(self.control.buffer, self.words, self.layout)
        self.liveness = Liveness(self.words, consumer=True)
        self.liveness.beat(clock_ns())
        self._flags = EpochFlags(self.table, self._disk_blocks)
        self._mode: Mode = "on"
        self.calls = Caller(self._log)
        self.traces = Traces(self.totals, self._log, self.block_bytes, clock_ns)
        chunk_blocks = max(1, chunk_bytes // self.block_bytes)
        part_bytes = sum(-(-size // 4096) * 4096 + 8192 for size in self.staging.block_bytes)  # as a disk tier counts
        self.planner = Planner(
            memory.save_slots_from, self._flags, chunk_blocks=chunk_blocks,
            disk_chunk_blocks=min(chunk_blocks, disk_call_bytes // part_bytes), lost=self.staging.lost,
        )  # fmt: skip
        self._negative = NegativeCache()
        self.look_ups = LookUps(
            self, self.planner.requests, self._negative, timeout_ns=pools.timeout_ns, lease_ns=lease_ns
        )
        self._untold = Untold(self.table)
        self._ended_ns = 0  # when it ended, until held() said that it is not over
        self.saver = Saver(
            store, self.shape, CreditGranter(self.control.buffer, self.words, self.layout),
            range(memory.save_slots_from, self.slot_count), self._save, self._log, clock_ns,
            job_blocks=chunk_blocks // PUTS_PER_CHUNK, counters=self.totals,
            loading=lambda: pools.fetches_in_flight > 0 or self.planner.has_work, stored=self._negative.stored,
        )  # fmt: skip
        self.warming = Warming(
            self.planner, self._negative, about(engine, self.number), self.totals.warmed_blocks, clock_ns,
            answering=self.answering, look_up=self._look_up,
        )  # fmt: skip
        self.promoter = self._flags.tier = Promoter(
            memory.device, self.table, self.planner.requests, pools, self.calls, self.totals, self._log, clock_ns,
            first_slot=self.slot_count, block_bytes=self.block_bytes,
        )  # fmt: skip
        self._fetcher = Fetcher(
            self.planner, self.warming, store, self.shape, pools, self.calls, self._negative, self.totals,
            self._log, clock_ns, returned=self.saver.next,
        )  # fmt: skip

    def register_staging(self) -> None:
        """Make it known to the store. Raises StoreError, StoreUnavailable."""
        self.staging.register(self._store)

    # --- intake -----------------------------------------------------------------------------------------------------

    def activate(self, workers: Sequence[Mapped]) -> None:
        """All processes mapped the epoch, the workers as they say here: hints are welcome."""
        if self.memory.device_error:
            self._log.warning("device.off", error=self.memory.device_error)
        self.promoter.start(workers)
        self.liveness.set_state(PeerState.ACTIVE)

    def drain(self, limit: int) -> int:
        """Handle up to `limit` records; how many there were."""
        return self.calls.contain(self._drain, 0, limit)

    def _drain(self, limit: int) -> int:
        count = 0
        while count < limit and (record := self.ring.peek()) is not None:
            count += 1
            try:
                self._handle(record)
            except ProtocolError as error:
                self.totals.bad_records += 1
                self._log.warning("record.bad", error=str(error), count=self.totals.bad_records)
            self.ring.advance()
        if not self.closing:
            self.look_ups.next(self._clock_ns())
            self.promoter.pump()
        return count

    def _handle(self, record: Record) -> None:
        if record.kind == RecordKind.HINT:
            self._hint(records.decode_hint(record.payload))
        elif record.kind == RecordKind.ASK:
            ask = records.decode_ask(record.payload)
            key = (ask.flag, ask.generation)
            if (request := self.planner.requests.get(key)) is not None and not request.asked:
                self.traces.asked(key, ask.asked_ns)
                self.planner.ask(key)
                self.promoter.asked(key)
                self.look_ups.asked(request)
        elif record.kind == RecordKind.DONE:
            self._done(records.decode_done(record.payload))
        elif record.kind == RecordKind.SAVED:
            if self.closing:
                return
            self.saver.saved(records.decode_saved(record.payload))
        else:
            raise ProtocolError(f"unknown record kind: kind={record.kind}")

    def _hint(self, hint: records.Hint) -> None:
        if hint.flag >= self.layout.flag_count or hint.blocks > self.layout.table_entries:
            raise ProtocolError(
                f"hint out of bounds: flag={hint.flag} max={self.layout.flag_count - 1} "
                f"blocks={hint.blocks} max={self.layout.table_entries}"
            )
        key = (hint.flag, hint.generation)
        seen = self.table.flag(hint.flag)
        if seen.generation != hint.generation or key in self.planner.requests:
            raise ProtocolError(f"hint for another use of the flag: flag={hint.flag} generation={hint.generation}")
        if len(self.planner.requests) >= self.layout.flag_count:
            raise ProtocolError(
                f"more hints than flags: hints={len(self.planner.requests)} max={self.layout.flag_count}"
            )
        self.totals.hints += 1
        now = self._clock_ns()
        request = self.planner.hint(
            key, bytes(hint.hashes), hint.hash_bytes, hint.blocks, hint.local_blocks, hint.priority
        )
        self.traces.begin(key, hint, now)
        self.totals.push_to_seen.observe(max(0, now - hint.arrival_ns) / 1e9)
        # Cancelled before we looked, read after the end, keys of old weights may still be there, or switched
        # off: nothing to look up.
        if seen.state != FlagState.HINTED or self.closing or self.saver.resetting or self._mode == "off":
            self.planner.looked_up(key, request.local)
            return
        self.look_ups.add(request, now)

    def _done(self, done: records.Done) -> None:
        key = (done.flag, done.generation)
        if done.flag >= self.layout.flag_count:
            raise ProtocolError(f"flag out of bounds: flag={done.flag} max={self.layout.flag_count - 1}")
        if done.loaded_from + done.loaded_blocks > self.layout.table_entries:
            raise ProtocolError(
                f"loaded blocks out of bounds: from={done.loaded_from} blocks={done.loaded_blocks} "
                f"max={self.layout.table_entries}"
            )
        state = self.table.flag(done.flag)
        if state.generation == done.generation and state.state in (FlagState.RELEASED, FlagState.CANCELLED):
            self._finish(key, Ending[done.outcome.name], done)

    def _finish(self, key: Key, ending: Ending, done: records.Done | None = None) -> None:
        loaded = range(done.loaded_from, done.loaded_from + done.loaded_blocks) if done is not None else range(0)
        self._untold.told(key)
        request = self.planner.finish(key, loaded)
        self.promoter.loaded(key, len(loaded))
        self._flags.free(key)
        if request is not None:
            self.traces.write(request, ending, done)

    def switch(self, mode: Mode) -> None:
        """What becomes of hints from now on, and of blocks to save; requests already planned go on."""
        self._mode = mode
        self.saver.switch(mode == "on")

    def scan(self) -> None:
        """Find what a full ring did not say: flags given up without a nudge. Called a few times a second."""
        self.calls.contain(self._scan, None)

    def _scan(self) -> None:
        now = self._clock_ns()
        for key in self._untold.found(self.planner.requests):
            self._finish(key, Ending.UNTOLD)
        self.look_ups.tick(now)
        self.planner.tick()
        self.warming.tick()
        if (counts := self.warming.tell()) is not None:
            self._log.info("warm.done", **{f"{result}_blocks": counts[result] for result in WARM_RESULTS})
        self.promoter.tick()
        for lane in Lane:
            if self._pools.exhausted(lane, self.calls):
                self.planner.give_up(lane)
        self._count_waste()
        self.saver.next()

    def _count_waste(self) -> None:
        for lane in Lane:
            self.totals.wasted_bytes[lane.name.lower()] = self.planner.blocks.wasted[lane] * self.block_bytes

    # --- what look-ups are told and ask for (lookups.Ports) ---------------------------------------------------------

    def answering(self) -> bool:
        return self._store.answering

    def ask_store(self, number: int, questions: Sequence[Question]) -> None:
        generation = self.saver.generation

        def done(answers: list[transfers.Found] | None) -> None:
            # Keys of the old weights were asked for: a miss.
            void = generation != self.saver.generation
            self.look_ups.answered(number, [(0, b"")] * len(questions) if void else answers, self._clock_ns())

        self._look_up([question.digests for question in questions], done)

    def found(self, request: Request, blocks: int, on_disk: bytes, *, unavailable: bool) -> None:
        self.traces.looked_up(request.key, blocks, self._clock_ns(), unavailable=unavailable)
        staged, disk = request.issued - request.local, sum(on_disk)
        self.totals.hit_blocks.update(staging=staged, memory=blocks - request.local - staged - disk, disk=disk)
        self.table.set_found(request.key[0], blocks)
        self.planner.looked_up(request.key, blocks if self._mode == "on" else request.local, on_disk)

    def renewed(self, request: Request, blocks: int, on_disk: bytes) -> None:
        self.planner.looked_up(request.key, blocks, on_disk)

    def _look_up(
        self, questions: Sequence[Sequence[bytes]], done: Callable[[list[transfers.Found] | None], None]
    ) -> None:
        """Call back with what the store has; with None when it cannot say, or has not in time (and once more then)."""

        def overdue() -> None:
            self._log.warning("call.overdue", call="look_up", blocks=sum(map(len, questions)))
            self._store.suspect("look_up")
            done(None)

        job = partial(transfers.look_up, self._store, self.shape, questions, media=self._media)

        def result(answers: list[transfers.Found] | BaseException | None) -> None:
            done(None if isinstance(answers, BaseException) else answers)

        self._pools.start(Call(Kind.LOOK_UP, job, result, overdue, self.calls))

    def _save(
        self, job: Callable[[], Any], done: Callable[[Any], None], failed: Any,
        overdue: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        def result(value: Any) -> None:
            done(failed if isinstance(value, BaseException) else value)

        self._pools.start(Call(Kind.SAVE, job, result, overdue, self.calls))

    # --- fetching ---------------------------------------------------------------------------------------------------

    def pump(self, lane: Lane) -> bool:
        """Start one fetch of this lane if there is one to start, and room for it; False when there is none."""
        return not self.closing and self.calls.contain(self._fetcher.pump, False, lane)

    def pump_ahead(self, lane: Lane) -> bool:
        """Start a fetch of what is staged ahead, when no engine has one for a request to start in this lane."""
        return not self.closing and self._fetcher.pump_ahead(lane)

    def warm(self, order: Warm, reply: Callable[[Message], None]) -> None:
        """Stage blocks ahead. Raises ProtocolError for an order that is too large."""
        if (count := sum(map(len, order.chains))) > MAX_WARM_DIGESTS:
            raise ProtocolError(f"too many hashes in one order: hashes={count} max={MAX_WARM_DIGESTS}")
        off = "" if self._mode == "on" else f"mode is {self._mode}"
        if why := "its weights change" if self.saver.resetting else off:
            reply(Report(ok=False, text=f"nothing is staged for this engine now: {why}"))
        else:
            self.warming.add(order, reply)

    def _disk_blocks(self, key: Key) -> int | None:
        """For the engine's statistics: one fetched again counts once; where media are not asked for, all is memory."""
        request = self.planner.requests.get(key)
        return None if request is None else min(request.disk_blocks, request.blocks - request.local)

    # --- reset ------------------------------------------------------------------------------------------------------

    def reset(self, generation: int, timeout_s: float, reply: Callable[[bool], None]) -> None:
        """Void everything staged, hinted or being saved before this generation, remove the keys, then reply."""
        self.saver.reset(generation, timeout_s, reply)
        self._negative.clear()
        self.warming.stop("its weights changed")
        for request in self.calls.contain(self.planner.reset, list[Request]()):
            self.traces.write(request, Ending.RESET)
        self.promoter.reset()

    # --- life -------------------------------------------------------------------------------------------------------

    @property
    def closing(self) -> bool:
        """It takes no new work."""
        return self.calls.closing

    @property
    def corrupt(self) -> str | None:
        """What was found wrong with the engine's memory; the owner ends the epoch."""
        return self.calls.corrupt

    @property
    def idle(self) -> bool:
        """No store call touches this epoch's memory."""
        return self.calls.running == 0

    def gauges(self) -> dict[str, int]:
        """Slots, pins, requests and credits, as an auditor wants them."""
        return {**self.planner.gauges(), **self.saver.gauges(), **self.promoter.gauges()}

    def account(self) -> dict[str, int]:
        """Gauges and counters together, for the log, the board and whoever asks."""
        self.totals.dropped_hints = max(self.totals.dropped_hints, self.ring.dropped)
        return {**self.gauges(), **self.totals.totals()}

    def end(self, ending: Ending) -> None:
        """No new work; the segments stay until idle. The engine reads CLOSING as gone.

        What it said last is still read, so that a request that ended before the engine did is told as it ended; the
        others end as `ending` says.
        """
        self.calls.closing = True
        self._ended_ns = self._clock_ns()
        self.warming.stop("the engine is gone")
        self.liveness.set_state(PeerState.CLOSING)
        self.drain(LAST_RECORDS)
        self.promoter.end()
        for request in list(self.planner.requests.values()):
            self.traces.write(request, Ending.ENGINE_CORRUPT if self.corrupt is not None else ending)
        self.planner.end()
        self._count_waste()

    def held(self, now_ns: int) -> None:
        """It ended and is not idle: past the deadline of calls, say once what keeps its memory."""
        if self._ended_ns and now_ns - self._ended_ns > self._pools.timeout_ns:
            self._ended_ns = 0
            self._log.warning("engine.held", in_flight=self.calls.running)

    def close(self) -> None:
        """Let go of `memory`, which its owner frees then (memory.release); only when idle and ended."""
        self.totals.kept_bytes = self.staging.kept_bytes
        self._log.info("engine.detached", **self.account())
        # Their views would keep the control segment mapped.
        del self.ring, self.table, self._flags, self.liveness, self.planner, self.saver, self.look_ups, self._fetcher
        del self.warming, self.promoter, self._untold
        self.words.release()
