"""The fetches of one engine: the planner's orders turned into store jobs, and what became of them told to it.

Everything here runs on the main loop but the jobs themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..planning.negative import NegativeCache
from ..planning.planner import Lane, Order, Planner
from ..store.client import Store
from ..store.errors import ErrorClass
from ..store.storage_nodes import Get
from ..telemetry.counters import Counters
from ..telemetry.logs import Log
from ..work.calls import FETCHES, Call, Caller
from ..work.pools import Pools
from . import transfers
from .warming import Warming


class Fetcher:
    """Starts a lane's next fetch, for requests or ahead of them. `returned` hears of every fetch's end."""

    def __init__(
        self, planner: Planner, warming: Warming, store: Store, shape: transfers.RankLayout, pools: Pools,
        caller: Caller, negative: NegativeCache, totals: Counters, log: Log, clock_ns: Callable[[], int],
        *, returned: Callable[[], None],
    ) -> None:  # fmt: skip
        self._planner, self._warming = planner, warming
        self._store, self._shape, self._pools, self._caller = store, shape, pools, caller
        self._negative = negative
        self._totals, self._log, self._clock_ns = totals, log, clock_ns
        self._returned = returned
        self._block_bytes = sum(shape.staging.block_bytes)

    def pump(self, lane: Lane) -> bool:
        """Start one fetch of this lane if there is one to start, and room for it; False when there is none."""
        if not (self._planner.wants(lane) and self._pools.fetch_room(lane, self._caller)):
            return False
        if (order := self._planner.next_order(lane)) is None:
            return False
        self._start(order)
        return True

    def pump_ahead(self, lane: Lane) -> bool:
        """As pump, for what no request wants yet."""
        if not self._pools.fetch_room(lane, self._caller) or (order := self._warming.next_order(lane)) is None:
            return False
        self._start(order)
        return True

    def _start(self, order: Order) -> None:
        blocks = list(zip(order.digests, order.slots, strict=True))
        get = Get()
        job = partial(transfers.fetch, self._store, self._shape, blocks, get=get)
        done, overdue = partial(self._fetched, order, self._clock_ns()), partial(self._overdue, order, get)
        self._pools.start(Call(FETCHES[order.lane], job, done, overdue, self._caller))

    def _fetched(self, order: Order, started_ns: int, result: list[ErrorClass] | BaseException) -> None:
        outcome = [ErrorClass.BUG] * len(order.slots) if isinstance(result, BaseException) else result
        good = outcome.count(ErrorClass.OK)
        now = self._clock_ns()
        self._log.debug(
            "fetch.done", blocks=len(outcome), good_blocks=good, bytes=good * self._block_bytes,
            duration_ms=round((now - started_ns) / 1e6, 3),
        )  # fmt: skip
        if corrupt := outcome.count(ErrorClass.CORRUPT):
            self._log.warning("store.corrupt", blocks=corrupt)
        if lost := outcome.count(ErrorClass.UNDER_WAY):
            self._log.warning("slots.lost", call="fetch", blocks=lost)
        disk = order.lane is Lane.DISK
        (self._totals.fetch_disk if disk else self._totals.fetch_memory).observe((now - started_ns) / 1e9)
        self._totals.fetched_blocks += good
        self._totals.fetched_bytes[order.lane.name.lower()] += good * self._block_bytes
        self._totals.failed_blocks[order.lane.name.lower()] += len(outcome) - good
        for digest, each in zip(order.digests, outcome, strict=True):
            if each is ErrorClass.OK:
                self._negative.forget(digest)
            elif each is not ErrorClass.TRANSIENT:
                self._negative.add(digest, now, lasting=each in (ErrorClass.FOREIGN, ErrorClass.CORRUPT))
        self._planner.fetched(order.number, [each is ErrorClass.OK for each in outcome], now)
        self._warming.fetched(order, good)
        waiting = self._planner.wants(order.lane)
        self._pools.limits[order.lane].completed(good * self._block_bytes, now, waiting=waiting)
        self._returned()

    def _overdue(self, order: Order, get: Get) -> None:
        now = self._clock_ns()
        get.late = True
        self._log.warning("call.overdue", call="fetch", blocks=len(order.slots), owners=get.nodes)
        for digest in order.digests:
            self._negative.add(digest, now, lasting=True)
        self._planner.overdue(order.number, now)
        self._warming.fetched(order, 0)
