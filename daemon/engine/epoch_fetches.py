"""The fetches of one epoch, and who hears how one ended. Everything here runs on the main loop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

from ..planning.requests import Failure, Key, Order
from ..planning.runs import Lane
from ..store.errors import ErrorClass
from ..store.storage_nodes import Get
from ..telemetry.logs import threshold
from ..work.calls import FETCHES, Call, Caller
from . import transfers
from .epoch_parts import EpochParts
from .reasons import failure

_LANES = tuple(lane.name.lower() for lane in Lane)


class Fetched(NamedTuple):
    """The end of a fetch: what became of each block of its order. `good`: blocks that arrived."""

    order: Order
    outcome: Sequence[ErrorClass]
    arrived: Sequence[bool]
    good: int
    good_bytes: int
    asked_ns: int
    now_ns: int


class Fetches:
    """Starts fetches, and hands the end of each to its receivers."""

    def __init__(self, parts: EpochParts, caller: Caller) -> None:
        self._parts, self._services, self._caller = parts, parts.services, caller
        self._gets: dict[int, Get] = {}  # of the fetches that did not return, by the order's number

    def start(self, order: Order) -> None:
        """Start the store call of an order."""
        get = self._gets[order.number] = Get()
        blocks = list(zip(order.digests, order.slots, strict=True))
        run = partial(transfers.fetch, self._services.store, self._parts.ranks, blocks, get=get)
        now = self._services.clock_ns()
        on_result, on_overdue = partial(self._ended, order, now), partial(self._overdue, order, get, now)
        self._services.pools.start(Call(FETCHES[order.lane], run, on_result, on_overdue, self._caller))

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
        good_bytes = good * self._parts.memory.block_bytes
        fetched = Fetched(order, outcome, arrived, good, good_bytes, asked_ns, now)
        for receive in (self._count, self._remember, self._plan, self._pace):
            receive(fetched)

    def _count(self, fetched: Fetched) -> None:
        order, outcome, _, good, good_bytes, asked_ns, now_ns = fetched
        log, counters, lane = self._parts.log, self._parts.counters, _LANES[order.lane]
        if threshold.debug:  # a line that is dropped would cost as much as the planner
            duration_ms = round((now_ns - asked_ns) / 1e6, 3)
            log.debug("fetch.done", blocks=len(outcome), good_blocks=good, bytes=good_bytes, duration_ms=duration_ms)
        counters.observe("fetch_seconds", (now_ns - asked_ns) / 1e9, lane)
        counters.fetched_blocks += good
        counters.add("fetched_bytes", good_bytes, lane)
        if good < len(outcome):
            counters.add("failed_blocks", len(outcome) - good, lane)
            if corrupt := outcome.count(ErrorClass.CORRUPT):
                log.warning("store.corrupt", blocks=corrupt)
            if lost := outcome.count(ErrorClass.UNDER_WAY):
                log.warning("slots.lost", call="fetch", blocks=lost)

    def _remember(self, fetched: Fetched) -> None:
        """Remember which values are bad."""
        bad, digests, outcome = self._parts.bad_values, fetched.order.digests, fetched.outcome
        if fetched.good == len(outcome):
            bad.forget(digests)
            return
        bad.forget(list(compress(digests, fetched.arrived)))
        for digest, each in zip(digests, outcome, strict=True):
            if each in (ErrorClass.FOREIGN, ErrorClass.CORRUPT):
                bad.add(digest, fetched.now_ns, asked_ns=fetched.asked_ns)

    def _plan(self, fetched: Fetched) -> None:
        whole = fetched.good == len(fetched.outcome)
        failed = None if whole else failure(fetched.outcome, self._services.store.aside)
        self._parts.planner.fetched(fetched.order.number, fetched.arrived, fetched.now_ns, failed)

    def _pace(self, fetched: Fetched) -> None:
        """Measure the link."""
        order, _, _, _, good_bytes, asked_ns, now_ns = fetched
        pools, lane = self._services.pools, order.lane
        pools.link_share.loaded(good_bytes)
        meter = pools.rates.fetches[lane]
        meter.add(good_bytes)
        pools.sizes[lane].fetched(good_bytes, now_ns - asked_ns, meter.total(now_ns))

    def _overdue(self, order: Order, get: Get, asked_ns: int) -> None:
        now = self._services.clock_ns()
        get.late = True
        self._parts.log.warning("call.overdue", call="fetch", blocks=len(order.slots), owners=get.nodes)
        for digest in order.digests:
            self._parts.bad_values.add(digest, now, asked_ns=asked_ns)
        self._parts.planner.overdue(order.number, now, Failure("overdue", get.nodes))
