"""What the parts of one epoch want done next, carried out: flags, store and device calls, and their results handed in.

Everything here runs on the main loop.  Only the epoch reads the clock and reaches flags, store, log and counters.
Whether a part has something to do is an attribute that its events write: to look at it costs no call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ...kv.prompts import Prompt, names_of_prefix
from ...shmring.wire import admin, attach
from ...shmring.wire.admin import Announce, AnnounceStep
from ...shmring.wire.records import Hint
from ..planning.holdings import RUNS
from ..planning.requests import Broken, Request, TakenBack
from ..planning.runs import Lane
from ..telemetry.metrics import ANNOUNCED_RESULTS
from ..work.calls import Call, CallKind, EngineCalls
from . import index, transfers
from .epoch_parts import EpochParts
from .lookups import Batch, GoneBlocks, LookedUp, Lost
from .promoter import DeviceJob
from .saver import Put
from .sessions import Chain, Due

OnResult = Callable[[Any], None]
Hear = Callable[[AnnounceStep], bool | None]  # True: it has to be said again
REPLIES = 4  # in a turn of the loop: each costs some 60 us, and hundreds may be due at once


class EpochCalls(EngineCalls):
    """The calls that the parts of one epoch want, but fetches."""

    def __init__(self, parts: EpochParts) -> None:
        super().__init__(parts.log)
        self.parts, self._services = parts, parts.services
        self._replies: dict[int, tuple[Announce, Hear]] = {}  # of announcements, by number
        self._announcements = 0

    def carry_on(self) -> None:
        """Carry out what the parts want done now; the loop asks for fetches and puts."""
        if self.closing:
            if not self.broken:
                self.publish()
            self.reply()
            return
        parts, now = self.parts, self._services.clock_ns()
        saver, ahead, look_ups, holdings = parts.saver, parts.ahead, parts.look_ups, parts.planner.holdings
        if look_ups.flight is None and (look_ups.queue or look_ups.leases.due(now)):
            self._look_up_next(now)
        if holdings.owes or holdings.changes:
            self.publish()
        holdings.room = RUNS
        if parts.promoter.on:
            self._copy()
        if saver.given_up:
            self.count_puts(saver.ended())
        if saver.returned and parts.mode == "on":
            parts.channel.credits.grant(saver.next_grant())
        if (due := parts.sessions.due) and due[0][0] <= now:
            self._announce_sessions(now)
        while ahead.waiting and self._hint_ahead(now):
            self._look_up_next(now)
            self.publish()
        owes = bool(ahead.outcomes or saver.given_up) or holdings.owes
        self.owes = owes or (not self._services.store.answering and look_ups.waiting)

    def _start(self, kind: CallKind, run: Callable[[], Any], on_result: OnResult, overdue: Callable[[], None]) -> None:
        self._services.pools.start(Call(kind, run, on_result, overdue, self))

    def publish(self) -> None:
        """Enter in flags and slot tables what the planner published or took back."""
        parts, holdings = self.parts, self.parts.planner.holdings
        if holdings.owes:
            holdings.settle()
        while holdings.changes:
            change = holdings.changes.popleft()
            request = change.request
            if isinstance(change, Broken):
                self._broken(request)
            elif request.announced is not None:
                if not isinstance(change, TakenBack) and change.final:
                    parts.planner.finish(request.key)
                    parts.ahead.ended(request)
            elif isinstance(change, TakenBack):
                if (trace := request.trace) is not None:
                    trace.answered_ns, trace.after = 0, None
            else:
                if change.final and (trace := request.trace) is not None:
                    trace.answered_ns = now = self._services.clock_ns()
                    trace.after = parts.reasons.work(trace.before.lane, now)
                slots = change.slots
                if parts.promotions.on:
                    slots = parts.promotions.published(request, change.start, slots)
                if not parts.channel.publish(change, slots):
                    request.final = True  # the engine claimed or dropped it before, and nothing more is fetched
        holdings.room = RUNS

    def _broken(self, request: Request) -> None:
        """Look for the next shorter prefix of a request that lost chosen blocks."""
        if self.parts.planner.requests.get(request.key) is request:
            now = self._services.clock_ns()
            self.look_up(request, now, again=True)
            self._look_up_next(now)

    # --- look-ups ---------------------------------------------------------------------------------------------------

    def look_up(self, request: Request, now_ns: int, *, again: bool = False) -> None:
        """Find out which blocks of a request there are."""
        answer = self.parts.look_ups.add(request, now_ns, answering=self._services.store.answering, again=again)
        if answer is not None:
            self.answer([answer], now_ns)

    def _look_up_next(self, now_ns: int) -> None:
        if not self._services.store.answering:
            self.answer(self.parts.look_ups.give_up(now_ns), now_ns)
            return
        parts, look_ups = self.parts, self.parts.look_ups
        keep = parts.mode == "on" and now_ns >= self._services.full_until_ns
        if (batch := look_ups.next_batch(now_ns, keep=keep)) is not None:
            store, config = self._services.store, self._services.config
            media = not batch.parts and (config.disk is not None or config.mooncake_config is not None)
            run = partial(transfers.look_up, store, parts.ranks, batch.digests, media=media)
            self._start(CallKind.LOOK_UP, run, partial(self._looked_up, batch), partial(self._look_up_overdue, batch))

    def _look_up_overdue(self, batch: Batch) -> None:
        blocks = sum(map(len, batch.digests))
        self.parts.log.warning("call.overdue", call="look_up", blocks=blocks)
        self._services.store.suspect("look_up")
        self._looked_up(batch, None)

    def _looked_up(self, batch: Batch, result: list[transfers.Found] | BaseException | None) -> None:
        found, now = None if isinstance(result, BaseException) else result, self._services.clock_ns()
        self.answer(self.parts.look_ups.answered(batch, found, now), now)

    def used(self, hashes: bytes, hash_bytes: int, blocks: int, now_ns: int) -> None:
        """A request uses so many leading blocks of the engine's own cache: have the store keep them, too."""
        if self.parts.mode == "on" and self._services.store.answering:
            leases, groups = self.parts.look_ups.leases, self.parts.engine.groups
            stop = groups.digests(blocks) * hash_bytes
            prefix = hashes[stop - hash_bytes : stop]
            if now_ns >= self._services.full_until_ns and not leases.lately(prefix, now_ns):
                names = names_of_prefix(groups, hashes, hash_bytes, blocks)
                leases.use(names, hash_bytes + 1, now_ns, prefix=prefix)

    def _used_staged(self, request: Request, now_ns: int) -> None:
        """A request uses blocks that were in staging when it was looked up, without a question to the store."""
        if request.announced is None and now_ns >= self._services.full_until_ns and self._services.store.answering:
            leases, size = self.parts.look_ups.leases, request.prompt.name_bytes
            if not leases.lately(prefix := request.digest(request.issued - 1), now_ns):
                leases.use(request.names[: request.issued * size], size, now_ns, prefix=prefix)

    def _tell_absent(self, names: Sequence[bytes]) -> None:
        """Have the engine save these blocks again, if they are in its cache, and nobody is saving them."""
        parts = self.parts
        if parts.engine.scheduler.saves and parts.mode == "on":
            putting = parts.saver.putting()
            absent = [name for name in names if name not in putting]
            for start in range(0, len(absent), attach.MAX_ABSENT):
                some = absent[start : start + attach.MAX_ABSENT]
                message = attach.Absent(
                    epoch=parts.memory.layout.epoch,
                    reset_generation=parts.saver.generation,
                    saved_records=parts.saver.records,
                    name_bytes=len(some[0]),
                    names=b"".join(some).hex(),
                )
                parts.send(message)

    def answer(self, answers: Sequence[LookedUp | Lost | GoneBlocks], now_ns: int) -> None:
        """Take what look-ups found out."""
        parts, sizes = self.parts, self._services.pools.sizes
        counts, holdings = parts.counters.counts, parts.planner.holdings
        parts.planner.block_ns = [each.ns_per_byte * parts.memory.block_bytes for each in sizes]
        for answer in answers:
            if isinstance(answer, GoneBlocks):
                self._tell_absent(answer.names)
                continue
            request = answer.request
            if isinstance(answer, Lost):
                parts.planner.absent(request, answer.block)
                continue
            choice = parts.planner.choose(request) if parts.mode == "on" else request.prompt.choose()
            if parts.mode != "on":
                holdings.show_nothing(request)
            if request.announced is not None:
                parts.ahead.looked_up(request, choice.blocks, unavailable=answer.unavailable)
                continue
            parts.channel.table.set_found(request.key[0], choice.blocks)
            if answer.again:
                continue
            if request.issued:
                self._used_staged(request, now_ns)
            disk = sum(choice.on_disk[request.issued :])
            trace, local = request.trace, request.prompt.local_blocks
            trace.looked_up_ns, trace.found_blocks, trace.unavailable = now_ns, choice.blocks, answer.unavailable
            if choice.missing and not answer.unavailable:
                parts.lacked.append((trace.hint.request_id, choice.blocks, choice.missing))
            trace.before = parts.reasons.work(Lane(2 * disk > choice.entries - request.issued), now_ns)
            trace.staged_blocks = local + (request.prompt.in_blocks(request.ready) if request.ready else 0)
            staged, disk = (request.prompt.in_blocks(each) if each else 0 for each in (request.issued, disk))
            counts["hit_blocks", "staging"] += staged
            counts["hit_blocks", "disk"] += disk
            counts["hit_blocks", "memory"] += max(0, choice.blocks - local - staged - disk)

    # --- announcements ----------------------------------------------------------------------------------------------

    def _announce(self, order: Announce, hashes: bytes, reply: Hear) -> None:
        """Stage a prompt that no request wants yet; `reply` gets what becomes of it.

        An `order` that names a session is for the newest prompt of that.
        """
        if order.session:
            if (chain := self.parts.sessions.chain(bytes.fromhex(order.session))) is None:
                on = self._services.config.sessions == "on"
                reason = "no request of this session came lately" if on else "the daemon's sessions are off"
                reply(AnnounceStep(number=order.number, outcome="missing", reason=reason))
                return
            hashes, size = chain.hashes, chain.hash_bytes
            order = order.model_copy(update={"hashes": len(hashes) // size, "hash_bytes": size})
        self._announcements += 1
        self._replies[self._announcements] = order, reply
        ahead, mode = self.parts.ahead, self.parts.mode
        ahead.add(self._announcements, order, hashes, self._services.clock_ns())
        if mode != "on":
            ahead.stop(f"nothing is staged for this engine now: mode={mode}")

    def session_came(self, hint: Hint, now_ns: int) -> int | None:
        """Take a hint of a session's request; return how long (ns) after the session's last one it came."""
        parts = self.parts
        chain, block_ns = Chain(hint.hashes, hint.hash_bytes), parts.planner.block_ns[Lane.MEMORY]
        block_ns *= len(parts.engine.groups)
        gap_ns, outdated = parts.sessions.arrived(hint.session, chain, hint.local_blocks, now_ns, block_ns)
        parts.look_ups.leases.keep(hint.session, now_ns)
        for number in outdated:
            parts.ahead.expire(number)
        return gap_ns

    def _announce_sessions(self, now_ns: int) -> None:
        """Announce the prompts of sessions that are about to come back."""
        parts, sessions = self.parts, self.parts.sessions
        free_blocks = parts.planner.blocks.free // len(parts.engine.groups)
        while parts.mode == "on":
            number = self._announcements + 1
            if (due := sessions.next_due(now_ns, free_blocks, number)) is None:
                return
            free_blocks = 0  # for the next ones, until it is known how much this one takes
            order = Announce(
                caller=admin.Caller(uid=0, groups=[]),
                number=number,
                name="session",
                engine=parts.engine.engine_id,
                epoch=parts.memory.layout.epoch,
                session=due.session.hex(),
                expected_ms=due.expected_ms,
                ttl_ms=due.ttl_ms,
            )
            self._announce(order, b"", partial(self._session_told, due))

    def _session_told(self, due: Due, outcome: AnnounceStep) -> None:
        self.parts.sessions.told(due, self._services.clock_ns(), outcome)

    def _hint_ahead(self, now_ns: int) -> bool:
        """Plan announced prompts; False if none waits to be planned."""
        hinted = False
        while (wanted := self.parts.ahead.next_wanted(now_ns)) is not None:
            prompt, planner = self.prompt(wanted.hashes, range(wanted.blocks)), self.parts.planner
            request = planner.hint(wanted.key, prompt, wanted.priority, wanted.due_ns, wanted.announced)
            self.look_up(request, now_ns)
            hinted = True
        return hinted

    def prompt(self, hashes: bytes, blocks: range) -> Prompt:
        """Return what is known of the prompt with these hashes, whose `blocks` may be loaded."""
        planned = self.parts.planner.blocks
        room = planned.slot_count - planned.quarantined
        return Prompt(self.parts.engine.groups, hashes, blocks, room=room, staged=planned.holds)

    def reply(self, most: int = REPLIES) -> None:
        """Say what became of announcements, and write a line about each one that is over."""
        parts, outcomes = self.parts, self.parts.ahead.outcomes
        for _ in range(min(most, len(outcomes))):
            number, outcome = outcomes.popleft()
            order, reply = self._replies[number]
            if reply(outcome):
                outcomes.appendleft((number, outcome))
                return
            if not outcome.last:
                continue
            del self._replies[number]
            tally = parts.counters.counts
            tally["announcements", outcome.outcome] += 1
            if outcome.outcome != "rejected":  # each costs its caller a line, and the log none
                counts = {result: getattr(outcome, result) for result in ANNOUNCED_RESULTS}
                for result, count in counts.items():
                    tally["announced_blocks", result] += count
                blocks = {f"{result}_blocks": count for result, count in counts.items()}
                parts.log.info("announcement.done", name=order.name, outcome=outcome.outcome, **blocks)

    # --- saving -----------------------------------------------------------------------------------------------------

    def _start_save(self) -> bool:
        """Start the put that waits; False if there is none, no room for it, or loads go first."""
        parts, pools, now = self.parts, self._services.pools, self._services.clock_ns()
        if not parts.saver.waiting(now) or not pools.save_room(self):
            return False
        link, size, (least, most) = pools.link_share, parts.memory.block_bytes, parts.put_blocks
        blocks = min(most, max(least, link.put_bytes // size)) if link.open(now) else 0
        if (put := parts.saver.next_put(blocks)) is not None:
            link.started(len(put.blocks) * size, now)
            locate = parts.engine.scheduler.events
            run = partial(transfers.save, self._services.store, parts.ranks, put.blocks, locate=locate)
            self._start(CallKind.SAVE, run, partial(self._stored, put, now), partial(self._put_overdue, put))
        return put is not None

    def _put_overdue(self, put: Put) -> None:
        """Log an overdue put. No other put starts until it returns."""
        self.parts.log.warning("call.overdue", call="save", blocks=len(put.blocks))

    def _stored(self, put: Put, started_ns: int, result: transfers.SaveResult | BaseException) -> None:
        if isinstance(result, BaseException):
            result = transfers.SaveResult(0, 0, len(put.blocks), [])
        parts, pools, now = self.parts, self._services.pools, self._services.clock_ns()
        size = parts.memory.block_bytes
        pools.link_share.ended(len(put.blocks) * size, result.stored * size, now - started_ns)
        pools.rates.saves.add(result.stored * size)
        if result.quarantined:
            parts.log.warning("slots.quarantined", call="save", blocks=result.quarantined)
        parts.look_ups.leases.put([name for name, _ in put.blocks])
        if result.stored + result.present and now >= parts.index_due_ns:
            parts.index_due_ns = now + index.RENEW_NS
            if (entry := index.entry_of(parts.engine, parts.ranks.prefixes[0][0])) is not None:
                run = partial(entry.write, self._services.store, parts.engine.owner)
                pools.start(Call(CallKind.SAVE, run, lambda _: None))
        if result.again:  # a store that is full of leases finds room once some of them end
            self._services.full_until_ns = now + self._services.config.lease_ns
        self.count_puts(parts.saver.stored(put, result, now, saving=parts.mode == "on"))

    def count_puts(self, ended: Sequence[Put]) -> None:
        """Count the puts that have ended, and log the saves that have."""
        parts, counts = self.parts, self.parts.counters.counts
        for put in ended:
            counts["saved_blocks"] += put.stored
            counts["present_blocks"] += put.present
            counts["failed_saves"] += put.failed
            if put.last:
                save = put.save
                parts.log.info(
                    "save.done",
                    save_id=save.save_id,
                    stored_blocks=save.stored,
                    present_blocks=save.present,
                    failed_blocks=save.failed,
                    tries=save.tries,
                )
            if parts.engine.scheduler.events:
                parts.send(put.notice)

    # --- the device -------------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        while (job := self.parts.promoter.next_job()) is not None:
            on_result = partial(self._device_done, job, self._services.clock_ns())
            self._start(CallKind.COPY, job.run, on_result, partial(self._device_overdue, job))

    def _device_done(self, job: DeviceJob, started_ns: int, result: str | BaseException) -> None:
        parts, error = self.parts, "the job failed" if isinstance(result, BaseException) else result
        off = parts.promoter.done(job, error)
        if job.order is not None:
            blocks = len(job.order.slots)
            parts.counters.counts["promoted_blocks"] += 0 if error else blocks
            duration_ms = round((self._services.clock_ns() - started_ns) / 1e6, 3)
            parts.log.debug("copy.done", blocks=blocks, duration_ms=duration_ms)
        elif job.kind == "pin" and error:
            parts.log.warning("device.unpinned", error=error)
        elif job.kind == "open" and parts.promoter.ready:
            parts.log.info("device.ready", device_slots=parts.memory.layout.device_slots)
        self.device_off(off)

    def _device_overdue(self, job: DeviceJob) -> None:
        if job.order is not None:
            self.parts.log.warning("call.overdue", call="copy", blocks=len(job.order.slots))
        self.device_off(self.parts.promoter.overdue(job))

    def device_off(self, error: str) -> None:
        """Log why there is no device cache any more, if there is a reason."""
        if error:
            self.parts.log.warning("device.off", error=error)
