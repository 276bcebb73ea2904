"""One attached engine: its life, and the records of its ring, which become events of its parts.

Everything here runs on the main loop.  What arrives in the ring is untrusted: the epoch counts and skips a bad record,
and a corrupt segment ends this epoch and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Concatenate, ParamSpec

from ...shmring.liveness import PeerState
from ...shmring.ring import Record
from ...shmring.wire import records
from ...shmring.wire.admin import Announce
from ...shmring.wire.attach import Mapped, Reset, ResetDone
from ...shmring.wire.checks import Mode
from ...shmring.wire.records import NO_SESSION, FlagState, ProtocolError, RecordKind
from ..planning.holdings import RUNS
from ..planning.requests import Key, Request
from ..planning.runs import Lane
from ..telemetry.events import Ending
from ..telemetry.trace import Trace
from ..work.calls import Call, CallKind
from .epoch_calls import EpochCalls, Hear
from .epoch_fetches import Fetches
from .epoch_parts import EpochParts, Services
from .memory import EngineInfo, EngineMemory

LAST_NS = 100_000_000  # for the records at the end of an epoch: all that an honest engine can have on the way
P = ParamSpec("P")


def event(method: Callable[Concatenate[Epoch, P], None]) -> Callable[Concatenate[Epoch, P], None]:
    """Let the epoch carry on after this method."""

    @wraps(method)
    def taken(self: Epoch, /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.take(partial(method, self, *args, **kwargs), None)

    return taken


class Epoch(EpochCalls):
    """One epoch of one engine incarnation, from the moment all its processes said hello until the last one is gone.

    Records and results arrive through `take`, and methods that are an `event` too.  Then the epoch carries on.
    """

    def __init__(self, services: Services, memory: EngineMemory, engine: EngineInfo) -> None:
        super().__init__(parts := EpochParts(services, memory, engine))
        self._fetches = Fetches(parts, self)
        self.engine, self.memory, self.number = engine, memory, memory.layout.epoch
        self.planner, self.saver, self.channel = parts.planner, parts.saver, parts.channel
        self.counters = parts.counters
        self.since_ns = services.clock_ns()
        self.heard_ns = 0  # when the last record came
        self._ended_ns = 0  # when it ended, until the log said that something keeps its memory
        self.channel.liveness.beat(self.since_ns)
        self.channel.credits.grant(self.saver.next_grant())

    @property
    def use_again_ms(self) -> int:
        """Return after which time the engine says again that it uses a prefix: a bit later than the daemon asks."""
        return max(1, self._services.config.lease_ns * 11 // 20_000_000)

    @property
    def idle(self) -> bool:
        """No call touches this epoch's memory."""
        return self.running == 0

    # --- life -------------------------------------------------------------------------------------------------------

    @event
    def activate(self, workers: Sequence[Mapped]) -> None:
        """All processes mapped the epoch, and the workers say how: hints are welcome."""
        self.device_off(self.memory.device_error)
        self.device_off(self.parts.promoter.start(workers))
        self.channel.liveness.set_state(PeerState.ACTIVE)

    @event
    def switch(self, mode: Mode) -> None:
        """Say what becomes of hints and of blocks to save from now on; requests already planned go on."""
        self.parts.mode = mode
        if mode != "on":
            self.parts.ahead.stop(f"nothing is staged for this engine now: mode={mode}")

    @property
    def mode(self) -> str:
        """What is done for this engine: the daemon's mode, or the part of it that the engine's role has."""
        part = {(True, False): "loads only", (False, True): "saves only", (False, False): "shadow"}
        wants = self.engine.scheduler.loads, self.engine.scheduler.saves
        return part.get(wants, "on") if self.parts.mode == "on" else self.parts.mode

    def gauges(self) -> dict[str, int]:
        """Count slots, pins, requests and credits, as an auditor wants them."""
        parts = self.parts
        ahead = {"announcements_open": parts.ahead.count, "blocks_ahead": parts.ahead.blocks}
        ahead["sessions"] = len(parts.sessions)
        return {**self.planner.gauges(), **ahead, **self.saver.gauges(), **parts.promotions.gauges()}

    def numbers(self) -> dict[str, int]:
        """Return gauges and counters together, for the log, the snapshot and the status."""
        counts = self.counters.counts
        counts["hints_dropped"] = self.channel.ring.dropped
        for lane in Lane:
            counts["wasted_bytes", lane.name.lower()] = self.planner.blocks.wasted[lane] * self.memory.block_bytes
        counts["kept_blocks"] = self.parts.look_ups.leases.blocks
        self.counters.publish()
        return {**self.gauges(), **self.counters.totals()}

    @event
    def tick(self, now_ns: int) -> None:
        """Do what nothing else brings, a few times a second."""
        if self.closing:
            if self._ended_ns and now_ns - self._ended_ns > self._services.pools.timeout_ns:
                self._ended_ns = 0
                self._log.warning("engine.held", in_flight=self.running)
            return
        self.channel.liveness.beat(now_ns)
        parts = self.parts
        if late := parts.look_ups.tick(now_ns):
            self.answer(late, now_ns)
        if self.planner.requests or self.channel.lent:
            self._tick_requests(now_ns)
        parts.sessions.forget_outdated(now_ns)
        for key in parts.ahead.expired(now_ns):
            self.planner.stop(key)

    def _tick_requests(self, now_ns: int) -> None:
        # A record that waits in the ring may say how a request ended.
        for key in self.channel.orphans() if not self.channel.ring.waiting else ():
            self._finish(key, Ending.UNREPORTED)
        for key in self.channel.forsaken(now_ns):
            if (request := self.planner.finish(key)) is not None:
                self._write(request, Ending.FORSAKEN)
        self.planner.tick()
        for lane in Lane:
            if self._services.pools.exhausted(lane, self):
                self.planner.give_up(lane)

    def end(self, ending: Ending) -> None:
        """Take no new work; the segments stay until idle. The engine reads CLOSING as gone.

        The records that it pushed last still count, so that a request that ended before the engine did is written as
        it ended; the others end as `ending` says.
        """
        self.closing, self._ended_ns = True, self._services.clock_ns()
        parts = self.parts
        self.channel.liveness.set_state(PeerState.CLOSING)
        self.contain(parts.ahead.stop, None, "the engine is gone")
        self.contain(self.reply, None, len(parts.ahead.outcomes))
        if not self.broken:
            self.drain(self._ended_ns + LAST_NS)
        if (device := self.memory.device) is not None:
            self.contain(parts.promotions.close, None)
            device.hang_up()
            self._services.pools.start(Call(CallKind.COPY, device.close, lambda _: None, None, self))
        if self.broken:
            ending = Ending.ENGINE_CORRUPT if self.corrupt is not None else Ending.DAEMON_FAULT
        for request in [each for each in self.planner.requests.values() if each.announced is None]:
            self.contain(self._write, None, request, ending)
        self.contain(self.planner.blocks.waste_rest, None)

    def close(self) -> None:
        """Let go of `memory`, which the caller frees then (memory.release); only when idle and ended."""
        self.contain(self._write_end, None)
        self.channel.close()

    def _write_end(self) -> None:
        self.counters.counts["kept_bytes"] = self.memory.staging.kept_bytes
        self._log.info("engine.detached", **self.numbers())

    # --- intake -----------------------------------------------------------------------------------------------------

    def drain(self, until_ns: int) -> int:
        """Handle records until then, one at least, and then say what is owed since an earlier turn of the loop.

        Return how many records there were.
        """
        return self.take(self._drain, 0, until_ns)

    def _drain(self, until_ns: int) -> int:
        owed, ring, count, clock_ns = self.owes, self.channel.ring, 0, self._services.clock_ns
        while (count == 0 or clock_ns() < until_ns) and (record := ring.peek()) is not None:
            count += 1
            try:
                self._handle(record)
            except ProtocolError as error:
                self.counters.counts["bad_records"] += 1
                self._log.warning("record.bad", error=str(error), count=int(self.counters["bad_records"]))
            ring.advance()
        if count:
            self.heard_ns = clock_ns()
        if owed:
            self.reply()
        return count

    def _handle(self, record: Record) -> None:
        if record.kind == RecordKind.HINT:
            self._hint(records.decode_hint(record.payload))
        elif record.kind == RecordKind.ASK:
            ask = records.decode_ask(record.payload)
            key = (ask.flag, ask.generation)
            if ask.stop:
                self._fetches.stop(key)
            elif (request := self.planner.requests.get(key)) is not None and not request.asked:
                if request.trace is not None:
                    request.trace.asked_ns = ask.asked_ns
                self.planner.ask(key)
                self.parts.look_ups.asked(request)
        elif record.kind == RecordKind.DONE:
            self._done(records.decode_done(record.payload))
        elif record.kind == RecordKind.SAVED:
            saved = records.decode_saved(record.payload)
            self.channel.check_saved(saved)
            if failed := self.saver.saved(saved, saving=self.parts.mode == "on"):
                self.count_puts(failed)
        elif record.kind == RecordKind.USED:
            used = records.decode_used(record.payload)
            self.channel.check_used(used)
            self.used(used.hashes, used.hash_bytes, used.blocks, self._services.clock_ns())
        else:
            raise ProtocolError(f"unknown record kind: kind={record.kind}")

    def _hint(self, hint: records.Hint) -> None:
        self.channel.check_hint(hint)
        key = (hint.flag, hint.generation)
        seen = self.channel.table.flag(hint.flag)
        if seen.generation != hint.generation:
            raise ProtocolError(f"hint for another use of the flag: flag={hint.flag} generation={hint.generation}")
        self.channel.lend(hint)
        self.counters.counts["hints"] += 1
        now = self._services.clock_ns()
        prompt = self.prompt(hint.hashes, range(hint.local_blocks, hint.blocks))
        request = self.planner.hint(key, prompt, hint.priority, hint.arrival_ns)
        ahead, gap_ns = self.parts.ahead, None
        met = ahead.arrived(hint.hashes, hint.hash_bytes, hint.local_blocks) if ahead.known else None
        if hint.session != NO_SESSION and self._services.config.sessions == "on" and self.parts.mode == "on":
            gap_ns = self.session_came(hint, now)
        self.parts.sessions.used_blocks += hint.blocks - hint.local_blocks
        told = hint._replace(hashes=b"", pages=())
        request.trace = Trace(told, now, len(self.engine.groups), met, gap_ns, found_blocks=hint.local_blocks)
        self.counters.metrics.made["push_to_seen_seconds"].observe(max(0, now - hint.arrival_ns) / 1e9)
        # Cancelled before we looked, read after the end, or switched off: nothing to look up.
        if seen.state != FlagState.HINTED or self.closing or self.parts.mode == "off":
            self.planner.holdings.show_nothing(request)
        else:
            self.look_up(request, now)
        if hint.local_blocks and not self.closing:
            self.used(hint.hashes, hint.hash_bytes, hint.local_blocks, now)

    def _done(self, done: records.Done) -> None:
        self.channel.check_done(done)
        flag = self.channel.table.flag(done.flag)
        if flag.generation == done.generation and flag.state in (FlagState.RELEASED, FlagState.CANCELLED):
            self._finish((done.flag, done.generation), Ending[done.outcome.name], done)

    def _finish(self, key: Key, ending: Ending, done: records.Done | None = None) -> None:
        loaded = [range(done.loaded_from, done.loaded_from + done.loaded_blocks)] if done is not None else []
        if (request := self.planner.requests.get(key)) is not None:
            loaded = [each for some in loaded for each in request.prompt.loaded(some)]
            if self.memory.device is not None:
                self._count_device(request, loaded)
        self.planner.finish(key, *loaded)
        if request is not None:
            self._write(request, ending, done)
        self.channel.free(key)  # last: the engine may use the flag again at once

    def _count_device(self, request: Request, loaded: Sequence[range]) -> None:
        named = [range(each.start, min(each.stop, request.published)) for each in loaded]
        count = sum(self.channel.on_device(request.key, each) for each in named if each)
        self.counters.counts["device_blocks"] += count

    def _write(self, request: Request, ending: Ending, done: records.Done | None = None) -> None:
        """Count and log a request that ended, once."""
        now, trace = self._services.clock_ns(), request.trace
        if trace is None:
            return
        request.trace, adopted_ns = None, self.channel.table.adopted_ns(request.key[0])
        work = trace.after or self.parts.reasons.work(trace.before.lane, now)
        line = trace.fields(request, ending, done, self.memory.block_bytes, now, work, adopted_ns)
        self.parts.recent.append((now, line))
        self.counters.request_done(line)
        self._log.info("request.done", **line)

    # --- orders from outside ----------------------------------------------------------------------------------------

    def start_fetch(self, lane: Lane, *, ahead: bool = False) -> bool:
        """Start one fetch of this lane for requests; False if there is none to start, or no room for it.

        `ahead`: for announced requests, once no engine has one for a hinted one to start in this lane.
        """
        return self.contain(self._start_fetch, False, lane, ahead)

    def _start_fetch(self, lane: Lane, ahead: bool) -> bool:
        pools = self._services.pools
        if self.closing or not self.planner.ready[lane] or not pools.fetch_room(lane, self):
            return False
        most = pools.sizes[lane].blocks(self.memory.block_bytes) if lane is Lane.MEMORY else None
        order = self.planner.next_order(lane, most, ahead=ahead)
        if not ahead:
            starved = order is None and self.planner.starved(lane)
            self.parts.reasons.note_room(lane, self._services.clock_ns(), starved=starved)
        holdings = self.planner.holdings
        if holdings.owes or holdings.changes:
            self.publish()
        holdings.room = RUNS
        self.owes = self.owes or holdings.owes
        if order is not None:
            self._fetches.start(order)
        return order is not None

    def start_save(self) -> bool:
        """Start the put that waits; False if there is none, no room for it, or loads go first."""
        return not self.closing and self.contain(self._start_save, False)

    @event
    def announce(self, order: Announce, hashes: bytes, reply: Hear) -> None:
        """Stage a prompt that no request wants yet; `reply` gets what becomes of it, more than once."""
        self._announce(order, hashes, reply)

    @event
    def reset(self, reset: Reset) -> None:
        """Void everything staged, hinted or being saved; from now on the engine's keys name other weights."""
        parts = self.parts
        parts.ranks = parts.ranks_of(reset.weights)
        parts.bad_values.clear(self._services.clock_ns())
        parts.index_due_ns = 0
        parts.lacked.clear()
        lost = self.saver.reset(reset.reset_generation)
        parts.ahead.reset()
        parts.sessions.clear()
        parts.look_ups.leases.clear()
        for request in self.planner.reset():
            self._write(request, Ending.RESET)
        parts.send(ResetDone(reset_generation=reset.reset_generation))
        self.count_puts(lost)  # after the answer: a full socket drops the notices behind it
        self._log.info("engine.reset", reset_generation=reset.reset_generation, weights=reset.weights)
