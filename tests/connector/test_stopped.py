"""A fetch that its engine stops while it goes on, against a fake daemon."""

from __future__ import annotations

import pytest

from kvprefetch.connector.request import hints
from kvprefetch.shmring.wire.records import FlagState, Outcome

from .fakes import BLOCK, MS, Engine, Request
from .waiting import NOTHING, PENDING, measured, step, visits_until_decided


def overtaken() -> tuple[Engine, Request]:
    """An engine that recomputes 40 blocks in 64 ms; nothing of them came in the first 48 ms of a request's wait."""
    engine = measured(max_running=64)
    request = engine.add("r", 40 * BLOCK + 1)
    engine.daemon.look_up("r", 40)
    assert engine.match(request) == PENDING
    engine.clock.advance_ms(55)
    engine.daemon.beat()
    engine.daemon.drain()
    engine.daemon.asks.clear()
    return engine, request


def test_a_fetch_that_recomputing_overtakes_is_stopped_and_what_is_under_way_loaded() -> None:
    engine, request = overtaken()
    assert engine.match(request) == PENDING
    engine.daemon.drain()
    assert [ask.stop for ask in engine.daemon.asks] == [True], "and it waits"
    for _ in range(2):
        step(engine)
        assert engine.match(request) == PENDING
    engine.daemon.drain()
    assert len(engine.daemon.asks) == 1, "once"
    engine.daemon.stage("r", 10, found=40)
    assert engine.match(request) == (10 * BLOCK, False)
    assert (engine.side.counters["stopped"], engine.side.counters["cut_short"]) == (1, 0)
    engine.side.finished(request)
    engine.daemon.drain()
    done = engine.daemon.dones[-1]
    assert done.missing == 40, "at the stop; ten came after it"
    assert done.cost_ns == pytest.approx(64 * MS, rel=0.1)


def test_a_stopped_fetch_with_nothing_under_way_is_recomputed_and_no_miss() -> None:
    engine, request = overtaken()
    assert engine.match(request) == PENDING
    engine.daemon.stage("r", 0, found=40)
    step(engine)
    assert engine.match(request) == NOTHING
    assert (engine.side.counters["recomputed"], engine.side.counters["misses"]) == (1, 0)
    engine.daemon.drain()
    assert engine.daemon.dones[-1].outcome == Outcome.RECOMPUTED


def test_a_stop_that_finds_no_room_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, request = overtaken()
    with monkeypatch.context() as full:
        full.setattr(hints, "stop", lambda handle, now_ns: False)
        assert engine.match(request) == PENDING
    step(engine)
    assert engine.match(request) == PENDING
    engine.daemon.drain()
    assert [ask.stop for ask in engine.daemon.asks] == [True]


def test_a_stopped_fetch_that_does_not_come_is_given_up_and_an_abort_gives_all_back() -> None:
    engine, request = overtaken()
    reply, visits = visits_until_decided(engine, request)
    assert reply == NOTHING
    assert 6 <= visits <= 10, "as long again"
    engine, request = overtaken()
    assert engine.match(request) == PENDING
    engine.side.finished(request)
    engine.daemon.drain()
    assert engine.daemon.flag("r").state == FlagState.CANCELLED


def test_a_stop_ends_with_its_hint() -> None:
    """Weights changed meanwhile: a new hint's fetch would go on in full, and recomputing overtakes that."""
    engine, request = overtaken()
    assert engine.match(request) == PENDING
    engine.daemon.move(engine.daemon.hint("r").flag, FlagState.EXPIRED, 0)
    step(engine)
    assert engine.match(request) == NOTHING
    assert engine.side.counters["on_demand_hints"] == 0


def test_a_claim_of_a_part_stops_its_fetch() -> None:
    engine = measured(wait_policy="best_effort")
    request = engine.add("r", 40 * BLOCK)
    engine.daemon.stage("r", 5, ready=False, found=30)
    assert engine.match(request) == (5 * BLOCK, False)
    engine.daemon.drain()
    assert [ask.stop for ask in engine.daemon.asks] == [True]


def test_a_part_that_was_claimed_in_vain_and_taken_back_is_no_miss() -> None:
    """The engine had no blocks for it in that pass, and a nearer request needed the room. The store has its blocks."""
    engine = measured(wait_policy="best_effort")
    request = engine.add("r", 40 * BLOCK)
    engine.daemon.stage("r", 5, ready=False, found=30)
    assert engine.match(request) == (5 * BLOCK, False)
    step(engine)
    engine.daemon.stage("r", 0, found=30)
    assert engine.match(request) == NOTHING
    assert (engine.side.counters["recomputed"], engine.side.counters["misses"]) == (1, 0)
    engine.daemon.drain()
    assert engine.daemon.dones[-1].outcome == Outcome.RECOMPUTED


def test_the_look_up_of_a_fetch_that_goes_on_says_nothing_of_what_is_stored() -> None:
    """What it found may be lost before it is fetched: such blocks are saved."""
    engine = Engine(wait_policy="best_effort", credits=range(16))
    request = engine.add("r", 8 * BLOCK + 1)
    engine.daemon.stage("r", 5, ready=False, found=8)
    assert engine.match(request) == (5 * BLOCK, False)
    engine.allocate(request, 5 * BLOCK)
    meta = engine.step([(request, 3 * BLOCK + 1)])
    assert sum(len(order.block_ids) for order in meta.saves) == 3
