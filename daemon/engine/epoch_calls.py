"""What the parts of one epoch want done next, carried out: flags, store and device calls, and their results handed in.

Everything here runs on the main loop.  Only the epoch reads the clock and reaches flags, store, log and counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

from ...kv.prompts import Prompt
from ..planning.requests import Broken, Failure, Key, Order, Request, TakenBack
from ..planning.runs import Lane
from ..store.errors import ErrorClass
from ..store.storage_nodes import Get
from ..telemetry.logs import threshold
from ..telemetry.metrics import ANNOUNCED_RESULTS
from ..work.calls import FETCHES, Kind
from . import transfers
from .epoch_parts import EpochParts
from .lookups import Answer, Batch, Lost
from .promoter import DeviceJob
from .reasons import failure
from .saver import Put

_LANES = tuple(lane.name.lower() for lane in Lane)


class EpochCalls(EpochParts):
    """The calls that the parts of one epoch want."""

    def _carry_on(self) -> None:
        """Carry out what the parts want done now; the loop asks for fetches (`start_fetch`)."""
        self.contain(self._do_all, None)

    def _do_all(self) -> None:
        if self.closing:
            self._publish()
            return
        now = self._services.clock_ns()
        self._look_up_next(now)
        self._publish()
        self._copy()
        if slots := self.saver.next_grant(saving=self._saving):
            self.channel.credits.grant(slots)
        while self._hint_ahead(now):
            self._look_up_next(now)
            self._publish()
        self._reply()

    def _publish(self) -> None:
        """Enter in flags and slot tables what the planner published or took back."""
        while (change := self.planner.next_change()) is not None:
            if isinstance(change, Broken):
                self._broken(change)
                continue
            if change.request.announced is not None:
                if not isinstance(change, TakenBack) and change.final:
                    self.planner.finish(change.request.key)
                    self.ahead.ended(change.request)
                continue
            if isinstance(change, TakenBack):
                self.traces.answered(change.request.key, 0, None)
                continue
            if change.final:
                now, key = self._services.clock_ns(), change.request.key
                self.traces.answered(key, now, self.reasons.work(self.traces.lane(key), now))
            slots = self.promotions.published(change.request, change.start, change.slots)
            if not self.channel.publish(change, slots):
                self.planner.refused(change.request)

    def _broken(self, change: Broken) -> None:
        """Look for the next shorter prefix of a request that lost chosen blocks."""
        request, now = change.request, self._services.clock_ns()
        if self.planner.requests.get(request.key) is request:
            self._look_up(request, now, again=True)
            self._look_up_next(now)

    # --- look-ups ---------------------------------------------------------------------------------------------------

    def _look_up(self, request: Request, now_ns: int, *, again: bool = False) -> None:
        """Find out which blocks of a request there are."""
        answer = self.look_ups.add(request, now_ns, answering=self._store.answering, again=again)
        if answer is not None:
            self._answer([answer], now_ns)

    def _look_up_next(self, now_ns: int) -> None:
        if not self._store.answering:
            self._answer(self.look_ups.give_up(now_ns), now_ns)
        elif (batch := self.look_ups.next_batch(now_ns)) is not None:
            digests = [question.digests for question in batch.questions]
            media = self._services.media and not batch.renewal
            self._ask_store(digests, partial(self._looked_up, batch), media=media)

    def _ask_store(
        self, questions: Sequence[Sequence[bytes]], on_answer: Callable[[Any], None], *, media: bool
    ) -> None:
        """Ask the store; `on_answer` gets None when it cannot say in time, and once more when the call returns."""

        def overdue() -> None:
            self._log.warning("call.overdue", call="look_up", blocks=sum(map(len, questions)))
            self._store.suspect("look_up")
            on_answer(None)

        run = partial(transfers.look_up, self._store, self.ranks, questions, media=media)
        self._start(Kind.LOOK_UP, run, on_answer, overdue)

    def _looked_up(self, batch: Batch, result: list[transfers.Found] | BaseException | None) -> None:
        found = None if isinstance(result, BaseException) else result
        now = self._services.clock_ns()
        self._answer(self.look_ups.answered(batch.number, found, now), now)
        self._carry_on()

    def _answer(self, answers: Sequence[Answer | Lost], now_ns: int) -> None:
        self.planner.block_ns = [each.ns_per_byte * self.memory.block_bytes for each in self._pools.sizes]
        for answer in answers:
            request = answer.request
            if isinstance(answer, Lost):
                self.planner.lost(request, answer.block)
                continue
            choice = self.planner.choose(request) if self._mode == "on" else request.prompt.choose()
            if self._mode != "on":
                self.planner.fetch_nothing(request)
            if request.announced is not None:
                self.ahead.looked_up(request, choice.blocks, unavailable=answer.unavailable)
                continue
            self.channel.table.set_found(request.key[0], choice.blocks)
            if answer.again:
                continue
            missing = None if answer.unavailable else self.reasons.missing(choice.missing, self._store.aside)
            disk = sum(choice.on_disk[request.issued :])
            work = self.reasons.work(Lane(2 * disk > choice.entries - request.issued), now_ns)
            self.traces.looked_up(request, choice.blocks, now_ns, missing, work)
            staged, disk = map(request.prompt.in_blocks, (request.issued, disk))
            memory = choice.blocks - request.prompt.local_blocks - staged - disk
            for medium, count in (("staging", staged), ("memory", memory), ("disk", disk)):
                self.counters.add("hit_blocks", count, medium)

    # --- fetching ---------------------------------------------------------------------------------------------------

    def start_fetch(self, lane: Lane, *, ahead: bool = False) -> bool:
        """Start one fetch of this lane for requests; False if there is none to start, or no room for it.

        `ahead`: for announced requests, once no engine has one for a hinted one to start in this lane.
        """
        if self.closing or not self.planner.wants(lane) or not self._pools.fetch_room(lane, self):
            return False
        most = self._pools.sizes[lane].blocks(self.memory.block_bytes) if lane is Lane.MEMORY else None
        order = self.contain(partial(self.planner.next_order, ahead=ahead), None, lane, most)
        if not ahead:
            self.reasons.room(lane, self._services.clock_ns(), starved=order is None and self.planner.starved(lane))
        self.contain(self._publish, None)
        if order is not None:
            self._fetch(order)
        return order is not None

    def _fetch(self, order: Order) -> None:
        get = self._gets[order.number] = Get()
        blocks = list(zip(order.digests, order.slots, strict=True))
        run = partial(transfers.fetch, self._store, self.ranks, blocks, get=get)
        on_result = partial(self._fetched, order, self._services.clock_ns())
        self._start(FETCHES[order.lane], run, on_result, partial(self._fetch_overdue, order, get))

    def _stop(self, key: Key) -> None:
        """Order nothing more for this request, and drop its calls that have not begun, up to one that has."""
        for number in self.planner.stop(key):
            get = self._gets[number]
            if get.begun:
                break
            get.dropped = True
            self.planner.drop(number)

    def _fetched(self, order: Order, started_ns: int, result: list[ErrorClass] | BaseException) -> None:
        outcome = [ErrorClass.BUG] * len(order.slots) if isinstance(result, BaseException) else result
        arrived = [each is ErrorClass.OK for each in outcome]
        now, good, lane = self._services.clock_ns(), sum(arrived), _LANES[order.lane]
        get = self._gets.pop(order.number)
        if get.dropped and not get.begun:  # no failure, nor a time of a fetch
            self.planner.fetched(order.number, arrived, now)
            self._carry_on()
            return
        good_bytes, duration_ns = good * self.memory.block_bytes, now - started_ns
        if threshold.debug:  # a line that is dropped would cost as much as the planner
            self._log.debug(
                "fetch.done",
                blocks=len(outcome),
                good_blocks=good,
                bytes=good_bytes,
                duration_ms=round(duration_ns / 1e6, 3),
            )
        self.counters.observe("fetch_seconds", duration_ns / 1e9, lane)
        self.counters.fetched_blocks += good
        self.counters.add("fetched_bytes", good_bytes, lane)
        self._negative.forget(order.digests if good == len(outcome) else list(compress(order.digests, arrived)))
        if good < len(outcome):
            self._failed(order, outcome, now, started_ns)
        failed = None if good == len(outcome) else failure(outcome, self._store.aside)
        self.planner.fetched(order.number, arrived, now, failed)
        self._pools.limits[order.lane].completed(good_bytes, now, waiting=self.planner.wants(order.lane))
        self._pools.link_share.loaded(good_bytes)
        meter = self._pools.rates.fetches[order.lane]
        meter.add(good_bytes)
        self._pools.sizes[order.lane].fetched(good_bytes, duration_ns, meter.total(now))
        self._carry_on()

    def _failed(self, order: Order, outcome: Sequence[ErrorClass], now_ns: int, asked_ns: int) -> None:
        """Count, log and remember the blocks that did not arrive."""
        if corrupt := outcome.count(ErrorClass.CORRUPT):
            self._log.warning("store.corrupt", blocks=corrupt)
        if lost := outcome.count(ErrorClass.UNDER_WAY):
            self._log.warning("slots.lost", call="fetch", blocks=lost)
        for digest, each in zip(order.digests, outcome, strict=True):
            if each not in (ErrorClass.OK, ErrorClass.TRANSIENT):
                lasting = each in (ErrorClass.FOREIGN, ErrorClass.CORRUPT)
                self._negative.add(digest, now_ns, asked_ns=asked_ns, lasting=lasting)
        self.counters.add("failed_blocks", len(outcome) - outcome.count(ErrorClass.OK), _LANES[order.lane])

    def _fetch_overdue(self, order: Order, get: Get) -> None:
        now = self._services.clock_ns()
        get.late = True
        self._log.warning("call.overdue", call="fetch", blocks=len(order.slots), owners=get.nodes)
        for digest in order.digests:
            self._negative.add(digest, now, lasting=True)
        self.planner.overdue(order.number, now, Failure("overdue", get.nodes))
        self._carry_on()

    # --- announcements ----------------------------------------------------------------------------------------------

    def _hint_ahead(self, now_ns: int) -> bool:
        """Plan announced prompts; False if none waits to be planned."""
        hinted = False
        while (wanted := self.ahead.next_wanted(now_ns)) is not None:
            prompt = self._prompt(wanted.hashes, range(wanted.blocks))
            request = self.planner.hint(wanted.key, prompt, wanted.priority, wanted.due_ns, wanted.announced)
            self._look_up(request, now_ns)
            hinted = True
        return hinted

    def _prompt(self, hashes: bytes | memoryview, blocks: range) -> Prompt:
        planned = self.planner.blocks
        room = planned.disk_slots - planned.lost  # wherever they come from
        return Prompt(self.groups, hashes, blocks, room=room, staged=planned.holds)

    def _reply(self) -> None:
        """Say what became of announcements, and write a line about each one that is over."""
        while (told := self.ahead.next_outcome()) is not None:
            number, outcome = told
            order, reply = self._replies[number]
            reply(outcome)
            if not outcome.last:
                continue
            del self._replies[number]
            self.counters.add("announcements", 1, outcome.outcome)
            if outcome.outcome != "rejected":  # each costs its caller a line, and the log none
                counts = {result: getattr(outcome, result) for result in ANNOUNCED_RESULTS}
                for result, count in counts.items():
                    self.counters.add("announced_blocks", count, result)
                blocks = {f"{result}_blocks": count for result, count in counts.items()}
                self._log.info("announcement.done", name=order.name, outcome=outcome.outcome, **blocks)

    # --- saving -----------------------------------------------------------------------------------------------------

    def start_save(self) -> bool:
        """Start the put that waits; False if there is none, no room for it, or loads go first."""
        now = self._services.clock_ns()
        if self.closing or not self.saver.waiting(now) or not self._pools.save_room(self):
            return False
        link, (least, most) = self._pools.link_share, self._put_blocks
        blocks = min(most, max(least, link.put_bytes // self.memory.block_bytes)) if link.open(now) else 0
        if (put := self.saver.next_put(blocks)) is not None:
            link.started(len(put.blocks) * self.memory.block_bytes, now)
            run = partial(transfers.save, self._store, self.ranks, put.blocks, locate=self.engine.scheduler.events)
            self._start(Kind.SAVE, run, partial(self._stored, put, now), partial(self._put_overdue, put))
        return put is not None

    def _put_overdue(self, put: Put) -> None:
        """Log an overdue put. No other put starts until it returns."""
        self._log.warning("call.overdue", call="save", blocks=len(put.blocks))

    def _stored(self, put: Put, started_ns: int, result: transfers.SaveResult | BaseException) -> None:
        if isinstance(result, BaseException):
            result = transfers.SaveResult(0, 0, len(put.blocks), [])
        now, size = self._services.clock_ns(), self.memory.block_bytes
        self._pools.link_share.ended(len(put.blocks) * size, result.stored * size, now - started_ns)
        self._pools.rates.saves.add(result.stored * size)
        if result.lost:
            self._log.warning("slots.lost", call="save", blocks=result.lost)
        left = {digest for digest, _ in result.again}
        there = [digest for digest, _ in put.blocks if digest not in left]
        self._services.negatives.stored(self._negative, there, now)
        self._count_puts(self.saver.stored(put, result, now, saving=self._saving))
        self._carry_on()

    def _count_puts(self, ended: Sequence[Put]) -> None:
        for put in ended:
            self.counters.add("saved_blocks", put.stored)
            self.counters.add("saved_again_blocks", put.stored_before)
            self.counters.add("present_blocks", put.present)
            self.counters.add("lost_saves", put.failed)
            if not (save := put.save).puts:
                self._log.info(
                    "save.done",
                    save_id=save.save_id,
                    stored_blocks=save.stored,
                    present_blocks=save.present,
                    failed_blocks=save.failed,
                    tries=save.tries,
                )
            if self.engine.scheduler.events:
                self.send(put.notice)

    # --- the device -------------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        while self.memory.device is not None:
            job = self.contain(self._promoter.next_job, None)
            if job is None:
                return
            on_result = partial(self._device_done, job, self._services.clock_ns())
            self._start(Kind.COPY, job.run, on_result, partial(self._device_overdue, job))

    def _device_done(self, job: DeviceJob, started_ns: int, result: str | BaseException) -> None:
        error = "the job failed" if isinstance(result, BaseException) else result
        off = self.contain(self._promoter.done, "", job, error)
        if job.order is not None:
            blocks = len(job.order.slots)
            self.counters.add("promoted_blocks", 0 if error else blocks)
            duration_ms = round((self._services.clock_ns() - started_ns) / 1e6, 3)
            self._log.debug("copy.done", blocks=blocks, duration_ms=duration_ms)
        elif job.kind == "pin" and error:
            self._log.warning("device.unpinned", error=error)
        elif job.kind == "open" and self._promoter.ready and self.memory.device is not None:
            self._log.info("device.ready", device_slots=self.memory.device.slots)
        self._device_off(off)
        self._carry_on()

    def _device_overdue(self, job: DeviceJob) -> None:
        if job.order is not None:
            self._log.warning("call.overdue", call="copy", blocks=len(job.order.slots))
        self._device_off(self.contain(self._promoter.overdue, "", job))

    def _device_off(self, error: str) -> None:
        if error:
            self._log.warning("device.off", error=error)
