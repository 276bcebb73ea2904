"""The fetches of one epoch, and what their ends say of the link. Everything here runs on the main loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress

from ..planning.requests import Failure, Key, Order
from ..planning.runs import Lane
from ..store.errors import ErrorClass
from ..store.storage_nodes import Get
from ..telemetry.logs import threshold
from ..work.calls import FETCHES, Call, EngineCalls
from . import transfers
from .epoch_parts import EpochParts
from .reasons import failure

_LANES = tuple(lane.name.lower() for lane in Lane)


class Fetches:
    def __init__(self, parts: EpochParts, engine: EngineCalls) -> None:
        self._parts, self._services, self._engine = parts, parts.services, engine
        self._gets: dict[int, Get] = {}  # of the fetches that did not return, by the order's number

    def start(self, order: Order) -> None:
        get = self._gets[order.number] = Get()
        blocks = list(zip(order.digests, order.slots, strict=True))
        run = partial(transfers.fetch, self._services.store, self._parts.ranks, blocks, get=get)
        now = self._services.clock_ns()
        on_result, on_overdue = partial(self._ended, order, now), partial(self._overdue, order, get, now)
        self._services.pools.start(Call(FETCHES[order.lane], run, on_result, on_overdue, self._engine))

    def stop(self, key: Key) -> None:
        """Order nothing more for this request, and drop its calls that have not begun, up to one that has."""
        for number in self._parts.planner.stop(key):
            get = self._gets[number]
            if get.begun:
                break
            get.dropped = True
            self._parts.planner.drop(number)

    def _ended(self, order: Order, asked_ns: int, result: list[ErrorClass] | BaseException) -> None:
        outcome = [ErrorClass.BUG] * len(order.slots) if isinstance(result, BaseException) else result
        arrived, now = [each is ErrorClass.OK for each in outcome], self._services.clock_ns()
        get, good = self._gets.pop(order.number), sum(arrived)
        if get.dropped and not get.begun:  # no failure, nor a time of a fetch
            self._parts.planner.fetched(order.number, arrived, now)
            return
        moved, duration_ns = good * self._parts.memory.block_bytes, now - asked_ns
        self._count(order, outcome, good, moved, duration_ns)
        bad = self._parts.bad_values
        if bad.until:
            bad.forget(order.digests if good == len(outcome) else list(compress(order.digests, arrived)))
        for digest, each in zip(order.digests, outcome, strict=True) if good < len(outcome) else ():
            if each in (ErrorClass.FOREIGN, ErrorClass.CORRUPT, ErrorClass.UNREADABLE):
                bad.add(digest, now, asked_ns=asked_ns)
        failed = None if good == len(outcome) else failure(outcome, self._services.store.aside)
        self._parts.planner.fetched(order.number, arrived, now, failed)
        pools = self._services.pools
        pools.link_share.loaded(moved)
        meter = pools.rates.fetches[order.lane]
        meter.add(moved)
        pools.sizes[order.lane].fetched(moved, duration_ns, meter.total(now))

    def _count(self, order: Order, outcome: Sequence[ErrorClass], good: int, moved: int, duration_ns: int) -> None:
        """Count the blocks of a fetch: those that are `good`, of so many bytes, and the others."""
        log, counters, lane = self._parts.log, self._parts.counters, _LANES[order.lane]
        if threshold.debug:  # a line that is dropped would cost as much as the planner
            duration_ms = round(duration_ns / 1e6, 3)
            log.debug("fetch.done", blocks=len(outcome), good_blocks=good, bytes=moved, duration_ms=duration_ms)
        counters.metrics.made["fetch_seconds"].labels(lane).observe(duration_ns / 1e9)
        counters.fetched_blocks += good
        counters.counts["fetched_bytes", lane] += moved
        if good < len(outcome):
            counters.counts["failed_blocks", lane] += len(outcome) - good
            if corrupt := outcome.count(ErrorClass.CORRUPT):
                log.warning("store.corrupt", blocks=corrupt)
            if gone := outcome.count(ErrorClass.UNDER_WAY):
                log.warning("slots.quarantined", call="fetch", blocks=gone)

    def _overdue(self, order: Order, get: Get, asked_ns: int) -> None:
        now = self._services.clock_ns()
        get.late = True
        self._parts.log.warning("call.overdue", call="fetch", blocks=len(order.slots), owners=get.nodes)
        for digest in order.digests:
            self._parts.bad_values.add(digest, now, asked_ns=asked_ns)
        self._parts.planner.overdue(order.number, now, Failure("overdue", get.nodes))
