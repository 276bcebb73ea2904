"""Fetches without a store: what is started, and what of their outcome is counted, remembered and told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import structlog

from kvprefetch.daemon.engine.fetcher import Fetcher
from kvprefetch.daemon.planning.negative import LASTING_NS, MISS_NS, NegativeCache
from kvprefetch.daemon.planning.planner import Lane, Order, Planner
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.telemetry.counters import Counters
from kvprefetch.daemon.work.calls import FETCHES, Call, Caller
from tests.daemon.planning.support import FlagsModel, digests, hint

BLOCK_BYTES = 64


class Setup:
    """A fetcher whose calls end as the test says; `ahead`: what may be staged ahead; `room`: whether a lane has any."""

    def __init__(self) -> None:
        self.now = 1_000_000_000
        self.calls: list[Call] = []
        self.staged_ahead: list[int] = []
        self.ahead: Order | None = None
        self.room = True
        self.returned = 0
        self.totals, self.negative = Counters(), NegativeCache()
        self.planner = Planner(8, FlagsModel(), chunk_blocks=8)
        log = structlog.get_logger()
        pools: Any = SimpleNamespace(
            start=self.calls.append,
            fetch_room=lambda lane, caller: self.room,
            limits=tuple(SimpleNamespace(completed=lambda *_, waiting: None) for _ in Lane),
        )
        warming: Any = SimpleNamespace(
            next_order=lambda lane: self.ahead, fetched=lambda order, good: self.staged_ahead.append(good)
        )
        shape: Any = SimpleNamespace(staging=SimpleNamespace(block_bytes=[BLOCK_BYTES // 2] * 2))
        store: Any = None
        self.fetcher = Fetcher(
            self.planner, warming, store, shape, pools, Caller(log), self.negative, self.totals, log, lambda: self.now,
            returned=self._returned,
        )  # fmt: skip

    def _returned(self) -> None:
        self.returned += 1

    def want(self, *names: str, disk: bool = False) -> None:
        key = hint(self.planner, len(self.planner.requests) + 1, *names)
        self.planner.looked_up(key, len(names), bytes([disk]) * len(names))

    def end(self, outcome: list[ErrorClass] | Exception) -> None:
        self.calls.pop().finish(outcome)

    def known(self, name: str) -> bool:
        """Whether this block is a known miss now."""
        return self.negative.first([digests(name)], self.now) == 0


def test_what_a_fetch_brought_and_missed_is_counted_by_its_lane() -> None:
    setup = Setup()
    setup.want("a", "b", "c")
    setup.want("x", "y", disk=True)
    for lane, outcome in ((Lane.MEMORY, "OK OK MISS"), (Lane.DISK, "OK MISS")):
        assert setup.fetcher.pump(lane)
        assert setup.calls[-1].kind is FETCHES[lane]
        assert not setup.fetcher.pump(lane), "nothing else is wanted"
        setup.now += 20_000_000
        setup.end([ErrorClass[name] for name in outcome.split()])
    totals = setup.totals
    assert totals.fetched_blocks == 3
    assert totals.fetched_bytes == {"memory": 2 * BLOCK_BYTES, "disk": BLOCK_BYTES}
    assert totals.failed_blocks == {"memory": 1, "disk": 1}
    assert (totals.fetch_memory.sum_s, totals.fetch_disk.sum_s) == (0.02, 0.02)
    assert setup.returned == 2
    assert [request.fetched_blocks for request in setup.planner.requests.values()] == [2, 1]


def test_what_cannot_be_had_is_left_alone_for_as_long_as_its_kind_lasts() -> None:
    """Docs: a known miss 1 s, a foreign, corrupt or hanging object 30 s; a store that fails says nothing of a block."""
    setup = Setup()
    kinds = {"m": ErrorClass.MISS, "f": ErrorClass.FOREIGN, "c": ErrorClass.CORRUPT, "t": ErrorClass.TRANSIENT}
    setup.want(*kinds)
    setup.fetcher.pump(Lane.MEMORY)
    setup.end(list(kinds.values()))
    assert [setup.known(name) for name in "mfct"] == [True, True, True, False]
    setup.now += MISS_NS
    assert [setup.known(name) for name in "mfct"] == [False, True, True, False]
    setup.now += LASTING_NS - MISS_NS
    assert not any(setup.known(name) for name in "mfct")


def test_a_fetch_past_its_deadline_is_a_lasting_miss_until_it_arrives_after_all() -> None:
    setup = Setup()
    setup.want("a", "b")
    setup.fetcher.pump(Lane.MEMORY)
    setup.calls[-1].give_up()
    assert setup.planner.gauges()["slots_stuck"] == 2
    setup.now += MISS_NS
    assert setup.known("a")
    assert setup.known("b")
    setup.end([ErrorClass.OK, ErrorClass.TRANSIENT])
    assert not setup.known("a")
    assert setup.known("b")
    assert setup.planner.gauges()["slots_stuck"] == 0
    assert setup.staged_ahead == [0, 1]


def test_a_fetch_that_raises_fails_its_own_blocks_only() -> None:
    setup = Setup()
    setup.want("a", "b")
    setup.fetcher.pump(Lane.MEMORY)
    setup.end(RuntimeError("planted"))
    assert setup.totals.failed_blocks == {"memory": 2}
    assert setup.planner.gauges()["orders"] == 0
    setup.want("c")
    assert setup.fetcher.pump(Lane.MEMORY)


def test_what_is_staged_ahead_needs_room_too() -> None:
    setup = Setup()
    assert not setup.fetcher.pump_ahead(Lane.MEMORY)
    setup.ahead = setup.planner.warm([digests("a")], Lane.MEMORY, "run")
    setup.room = False
    assert not setup.fetcher.pump_ahead(Lane.MEMORY)
    setup.want("b")
    assert not setup.fetcher.pump(Lane.MEMORY)
    assert setup.calls == []
    setup.room = True
    assert setup.fetcher.pump_ahead(Lane.MEMORY)
    setup.end([ErrorClass.OK])
    assert setup.staged_ahead == [1]


def test_whoever_loses_its_room_to_a_fetch_fetches_again_behind_it() -> None:
    setup = Setup()
    setup.want(*"abcdefgh")
    [loser] = setup.planner.requests.values()
    setup.fetcher.pump(Lane.MEMORY)
    setup.end([ErrorClass.OK] * 8)
    setup.want("x")
    setup.planner.ask((2, 1))
    assert setup.fetcher.pump(Lane.MEMORY)
    assert loser.taken_back == 1
    setup.end([ErrorClass.OK])
    setup.planner.finish((2, 1))
    assert setup.fetcher.pump(Lane.MEMORY)
    setup.end([ErrorClass.OK])
    assert (loser.ready, loser.final, loser.fetched_blocks) == (8, True, 9)
