"""The time counted as waiting for us: passes that would have admitted the request, and no queueing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvprefetch.shmring.wire.records import Outcome
from tests.support.clock import Clock

from .fakes import BLOCK, MS, Engine
from .real import RealEngine

PENDING = (None, False)
REQUESTS = 12
STEP_MS = 100


@pytest.fixture
def crowded(tmp_path: Path) -> RealEngine:
    """vLLM's scheduler with a place for every request and the tokens of one prompt a step, which takes 100 ms."""
    engine = RealEngine(tmp_path, seqs=16, blocks=256, budget=4 * BLOCK)

    def forward(worker: Any, output: Any) -> None:
        if output.total_num_scheduled_tokens:
            engine.clock.advance_ms(STEP_MS - 1)

    engine.forward = forward  # type: ignore[method-assign]
    return engine


def asked_about(engine: RealEngine, prompt: int, passes: int) -> list[str]:
    """Requests that come at once and are asked about in so many passes, a millisecond apart."""
    names = [f"r{number}" for number in range(REQUESTS)]
    for name in names:
        engine.add(name, prompt, out=1)
    for _ in range(passes):
        assert not engine.step().num_scheduled_tokens, "nobody has an answer yet"
    return names


def test_misses_that_queue_for_tokens_waited_for_their_look_up_alone(crowded: RealEngine) -> None:
    """The last one is admitted when all others were computed; its answer was there before the second pass."""
    names = asked_about(crowded, 4 * BLOCK, passes=1)
    for name in names:
        crowded.daemon.stage(name, 0)
    began = crowded.clock()
    crowded.run()
    assert crowded.clock() - began > (REQUESTS - 1) * STEP_MS * MS
    assert {done.outcome for done in crowded.daemon.dones} == {Outcome.MISS}
    assert [done.waited_ns for done in crowded.daemon.dones] == [1 * MS] * REQUESTS
    assert crowded.side.counters["waits"] == crowded.side.counters["misses"] == REQUESTS
    assert crowded.side.counters["wait_ns"] == REQUESTS * MS


def test_hits_that_queue_for_tokens_waited_until_the_engine_had_other_work(crowded: RealEngine) -> None:
    """Those behind the first are fetched while it computes: it hides them."""
    names = asked_about(crowded, 8 * BLOCK, passes=3)
    crowded.daemon.stage(names[0], 4)
    crowded.step()
    for number, name in enumerate(names[1:], 1):
        crowded.daemon.stage(name, 4, slots=range(4 * number, 4 * number + 4))
    crowded.run()
    dones = crowded.daemon.dones
    assert [done.outcome for done in dones] == [Outcome.LOADED] * REQUESTS
    assert [done.waited_ns for done in dones] == [3 * MS] * REQUESTS
    assert max(done.claimed_ns - done.asked_ns for done in dones) > (REQUESTS - 1) * STEP_MS * MS
    assert crowded.side.counters["wait_ns"] == 3 * REQUESTS * MS


def test_a_pass_that_asks_again_goes_on_and_one_that_does_not_ends_it() -> None:
    engine = Engine()
    request, other = engine.add("r", 3 * BLOCK), engine.add("other", 3 * BLOCK)
    for _ in range(2):
        assert engine.match(request) == PENDING
        engine.step(step_ms=5)
    engine.clock.advance_ms(1)
    engine.step([(other, 1)], step_ms=70)  # 11 ms after the first question
    engine.step([(other, 1)], step_ms=70)
    assert engine.match(request) == PENDING
    engine.step(step_ms=2)
    engine.daemon.stage("r", 2)
    assert engine.match(request) == (2 * BLOCK, False)
    assert engine.side.counters["wait_ns"] == 13 * MS
    assert engine.side.counters["waits"] == 1


@pytest.mark.parametrize(("passes", "waited"), [(0, 4), (1, 4), (2, 4)])
def test_an_abort_ends_the_wait(passes: int, waited: int) -> None:
    engine = Engine()
    request = engine.add("r", 3 * BLOCK)
    assert engine.match(request) == PENDING
    engine.step()
    engine.clock.advance_ms(4)
    for _ in range(passes):
        engine.step(step_ms=9)
    engine.side.finished(request)
    engine.daemon.drain()
    assert [(done.outcome, done.waited_ns) for done in engine.daemon.dones] == [(Outcome.ABORTED, waited * MS)]
    assert engine.side.counters["wait_ns"] == waited * MS


def test_a_look_at_the_flag_is_waiting_too() -> None:
    """An idle engine looks for 2 ms at its first visit, and is answered."""
    clock = Clock()
    clock.pause = lambda: clock.advance_ms(0.5)  # type: ignore[method-assign]
    engine = Engine(idle_wait_us=2000, wait_policy="timeout", clock=clock)
    request = engine.add("r", 40 * BLOCK)
    assert engine.match(request) == PENDING
    engine.side.finished(request)
    engine.daemon.drain()
    assert [done.waited_ns for done in engine.daemon.dones] == [2 * MS]
