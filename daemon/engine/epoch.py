"""One attached engine: its life, and the records of its ring, which become events of its parts.

Everything here runs on the main loop.  What arrives in the ring is untrusted: the epoch counts and skips a bad record,
and a corrupt segment ends this epoch and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...shmring.liveness import PeerState
from ...shmring.ring import Record
from ...shmring.wire import records
from ...shmring.wire.admin import Announce, Outcome
from ...shmring.wire.attach import Mapped, Reset, ResetDone
from ...shmring.wire.records import FlagState, ProtocolError, RecordKind
from ..config.model import Mode
from ..planning.requests import Key, Request
from ..planning.runs import Lane
from ..telemetry.events import Ending
from ..work.calls import Kind
from .epoch_calls import EpochCalls

LAST_NS = 100_000_000  # for the records at the end of an epoch: all that an honest engine can have on the way


class Epoch(EpochCalls):
    """One epoch of one engine incarnation, from the moment all its processes said hello until the last one is gone."""

    # --- life -------------------------------------------------------------------------------------------------------

    def activate(self, workers: Sequence[Mapped]) -> None:
        """All processes mapped the epoch, and the workers say how: hints are welcome."""
        self._device_off(self.memory.device_error)
        self._device_off(self.contain(self._promoter.start, "", workers))
        self.channel.liveness.set_state(PeerState.ACTIVE)
        self._carry_on()

    def switch(self, mode: Mode) -> None:
        """Say what becomes of hints and of blocks to save from now on; requests already planned go on."""
        self._mode = mode
        self._carry_on()

    @property
    def mode(self) -> str:
        """What is done for this engine: the daemon's mode, or the part of it that the engine's role has."""
        part = {(True, False): "loads only", (False, True): "saves only", (False, False): "shadow"}
        wants = self.engine.scheduler.loads, self.engine.scheduler.saves
        return part.get(wants, "on") if self._mode == "on" else self._mode

    def gauges(self) -> dict[str, int]:
        """Count slots, pins, requests and credits, as an auditor wants them."""
        ahead = {"announcements_open": self.ahead.count, "blocks_ahead": self.ahead.blocks}
        return {**self.planner.gauges(), **ahead, **self.saver.gauges(), **self.promotions.gauges()}

    def numbers(self) -> dict[str, int]:
        """Return gauges and counters together, for the log, the snapshot and the status."""
        self.counters.reach("hints_dropped", self.channel.ring.dropped)
        return {**self.gauges(), **self.counters.totals()}

    def tick(self, now_ns: int) -> None:
        """Do what no event brings, a few times a second."""
        if self.closing:
            if self._ended_ns and now_ns - self._ended_ns > self._pools.timeout_ns:
                self._ended_ns = 0
                self._log.warning("engine.held", in_flight=self.running)
            return
        self.channel.liveness.beat(now_ns)
        self.contain(self._tick, None, now_ns)
        self._carry_on()

    def _tick(self, now_ns: int) -> None:
        # A record that waits in the ring may say how a request ended.
        for key in self.orphaned.next_keys(self.planner.requests) if not self.channel.ring.waiting else ():
            hinted = self.planner.requests[key].announced is None
            if hinted and self.orphaned.seen(key, given_up=self.channel.given_up(key)):
                self._finish(key, Ending.UNTOLD)
        self._answer(self.look_ups.tick(now_ns), now_ns)
        self.planner.tick()
        for key in self.ahead.late(now_ns):
            self.planner.stop(key)
        if (lost := self.waits.tick(now_ns)) is not None:
            self._log.warning("wait.lost", **lost)
        for lane in Lane:
            if self._pools.exhausted(lane, self):
                self.planner.give_up(lane)
        self._count_waste()

    def end(self, ending: Ending) -> None:
        """Take no new work; the segments stay until idle. The engine reads CLOSING as gone.

        The records that it pushed last still count, so that a request that ended before the engine did is written as
        it ended; the others end as `ending` says.
        """
        self.closing = True
        self._ended_ns = self._services.clock_ns()
        self.ahead.stop("the engine is gone")
        self._reply()
        self.channel.liveness.set_state(PeerState.CLOSING)
        self.drain(self._ended_ns + LAST_NS)
        if (device := self.memory.device) is not None:
            self.contain(self.promotions.close, None)
            device.hang_up()
            self._start(Kind.COPY, device.close, lambda _: None)
        for request in [each for each in self.planner.requests.values() if each.announced is None]:
            self._write(request, Ending.ENGINE_CORRUPT if self.corrupt is not None else ending)
        self.planner.blocks.waste_rest()
        self._count_waste()

    def close(self) -> None:
        """Let go of `memory`, which the caller frees then (memory.release); only when idle and ended."""
        self.counters.reach("kept_bytes", self.memory.staging.kept_bytes)
        self._services.negatives.leave(self._negative)
        self._log.info("engine.detached", **self.numbers())
        self.channel.close()

    def _count_waste(self) -> None:
        for lane in Lane:
            wasted = self.planner.blocks.wasted[lane] * self.memory.block_bytes
            self.counters.reach("wasted_bytes", wasted, lane.name.lower())

    # --- intake -----------------------------------------------------------------------------------------------------

    def drain(self, until_ns: int) -> int:
        """Handle records until then, one at least; return how many there were."""
        if count := self.contain(self._drain, 0, until_ns):
            self.heard_ns = self._services.clock_ns()
            self._carry_on()
        return count

    def _drain(self, until_ns: int) -> int:
        ring, count, clock_ns = self.channel.ring, 0, self._services.clock_ns
        while (count == 0 or clock_ns() < until_ns) and (record := ring.peek()) is not None:
            count += 1
            try:
                self._handle(record)
            except ProtocolError as error:
                self.counters.add("bad_records")
                self._log.warning("record.bad", error=str(error), count=int(self.counters["bad_records"]))
            ring.advance()
        return count

    def _handle(self, record: Record) -> None:
        if record.kind == RecordKind.HINT:
            self._hint(records.decode_hint(record.payload))
        elif record.kind == RecordKind.ASK:
            ask = records.decode_ask(record.payload)
            key = (ask.flag, ask.generation)
            if ask.stop:
                self._stop(key)
            elif (request := self.planner.requests.get(key)) is not None and not request.asked:
                self.traces.asked(key, ask.asked_ns)
                self.planner.ask(key)
                self.look_ups.asked(request)
        elif record.kind == RecordKind.DONE:
            self._done(records.decode_done(record.payload))
        elif record.kind == RecordKind.SAVED:
            if not self.closing:
                saved = records.decode_saved(record.payload)
                self.channel.check_saved(saved)
                self._count_puts(self.saver.saved(saved, saving=self._saving))
        else:
            raise ProtocolError(f"unknown record kind: kind={record.kind}")

    def _hint(self, hint: records.Hint) -> None:
        self.channel.check_hint(hint)
        key = (hint.flag, hint.generation)
        seen = self.channel.table.flag(hint.flag)
        if seen.generation != hint.generation:
            raise ProtocolError(f"hint for another use of the flag: flag={hint.flag} generation={hint.generation}")
        self.channel.lend(hint)
        self.counters.add("hints")
        now = self._services.clock_ns()
        prompt = self._prompt(hint.hashes, range(hint.local_blocks, hint.blocks))
        request = self.planner.hint(key, prompt, hint.priority, hint.arrival_ns)
        self.traces.begin(key, hint, now, self.ahead.arrived(hint.hashes, hint.hash_bytes))
        self.counters.observe("push_to_seen_seconds", max(0, now - hint.arrival_ns) / 1e9)
        # Cancelled before we looked, read after the end, or switched off: nothing to look up.
        if seen.state != FlagState.HINTED or self.closing or self._mode == "off":
            self.planner.fetch_nothing(request)
        else:
            self._look_up(request, now)

    def _done(self, done: records.Done) -> None:
        self.channel.check_done(done)
        flag = self.channel.table.flag(done.flag)
        if flag.generation == done.generation and flag.state in (FlagState.RELEASED, FlagState.CANCELLED):
            self._finish((done.flag, done.generation), Ending[done.outcome.name], done)

    def _finish(self, key: Key, ending: Ending, done: records.Done | None = None) -> None:
        loaded = [range(done.loaded_from, done.loaded_from + done.loaded_blocks)] if done is not None else []
        self.orphaned.ended(key)
        if (request := self.planner.requests.get(key)) is not None:
            loaded = [each for some in loaded for each in request.prompt.loaded(some)]
            self._count_device(request, loaded)
        self.planner.finish(key, *loaded)
        self.channel.free(key)
        if request is not None:
            self._write(request, ending, done)

    def _count_device(self, request: Request, loaded: Sequence[range]) -> None:
        """Count the blocks that the engine loaded from device slots."""
        named = [range(each.start, min(each.stop, request.published)) for each in loaded]
        if self.memory.device is not None:
            count = sum(self.channel.on_device(request.key, each) for each in named if each)
            self.counters.add("device_blocks", count)

    def _write(self, request: Request, ending: Ending, done: records.Done | None = None) -> None:
        """Count and log a request that ended, once."""
        now = self._services.clock_ns()
        work = self.reasons.work(self.traces.lane(request.key), now)
        if (line := self.traces.end(request, ending, done, now, work)) is not None:
            self.counters.request_done(line)
            self.waits.add(line)
            self._log.info("request.done", **line)

    # --- orders from outside ----------------------------------------------------------------------------------------

    def announce(self, order: Announce, hashes: bytes, reply: Callable[[Outcome], None]) -> None:
        """Stage a prompt that no request wants yet; `reply` gets what becomes of it, more than once."""
        self._announcements += 1
        self._replies[self._announcements] = order, reply
        self.ahead.add(self._announcements, order, hashes, self._services.clock_ns())
        if self._mode != "on":
            self.ahead.stop(f"nothing is staged for this engine now: mode={self._mode}")
        self._carry_on()

    def reset(self, reset: Reset) -> None:
        """Void everything staged, hinted or being saved; from now on the engine's keys name other weights."""
        now = self._services.clock_ns()
        self.ranks = self._ranks(reset.weights)
        self._services.negatives.move(self._negative, self.ranks.namespaces)
        self._negative.clear(now)
        self.reasons.moved(self.ranks.namespaces)
        self._count_puts(self.saver.reset(reset.reset_generation, self.reasons.stored))
        self.ahead.stop("its weights changed")
        for request in self.contain(self.planner.reset, list[Request]()):
            self._write(request, Ending.RESET)
        self.send(ResetDone(reset_generation=reset.reset_generation))
        self._log.info("engine.reset", reset_generation=reset.reset_generation, weights=reset.weights)
        self._carry_on()
