"""Waiting while the step under way runs: as long as that costs nobody anything, and not at all where it would."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvprefetch.connector.engine.steps import StepTimes
from kvprefetch.connector.request.policy import COPIED_IN_NS
from kvprefetch.connector.request.slack import LAUNCH_NS, PAUSED_STEPS, SHARE, Slack
from kvprefetch.shmring.wire.records import FlagState
from tests.support.clock import Clock

from .fakes import BLOCK, BLOCK_BYTES, MS, Engine, Request
from .real import RealEngine

STEP_MS = 400
PENDING = (None, False)
Make = Callable[..., RealEngine]


class RealClock(Clock):
    """As everywhere else; what waits in C knows no other."""

    def __call__(self) -> int:
        return time.monotonic_ns()

    now_ns = __call__


def running(*, policy: str = "wait", **options: Any) -> tuple[Engine, Request]:
    """An engine a step of which is under way, as the scheduler plans the next one; a request that is hinted at."""
    engine = Engine(wait_policy=policy, **{"clock": RealClock(), "ahead": True, **options})
    steps = engine.side.steps
    steps.decode_ns = STEP_MS * MS
    other = engine.admitted("other", 2 * BLOCK)
    engine.step([(other, 1)], ends=False)
    return engine, engine.add("r", 4 * BLOCK + 1)


def timed(ask: Callable[[], object]) -> tuple[object, float]:
    begun = time.monotonic()
    return ask(), time.monotonic() - begun


def test_a_fetch_that_ends_while_the_step_runs_is_loaded_in_this_pass() -> None:
    engine, request = running()
    hint = engine.daemon.hint("r")
    turns, stop = [0], threading.Event()

    def others() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    def stage() -> None:
        time.sleep(0.05)
        engine.daemon.flags.write_slots(hint.flag, 0, range(4))
        engine.daemon.flags.set_found(hint.flag, 4)
        engine.daemon.move(hint.flag, FlagState.READY, 4)

    threads = [threading.Thread(target=each) for each in (others, stage)]
    for each in threads:
        each.start()
    before, waited_ns = turns[0], engine.side.counters["wait_ns"]
    answer, took = timed(lambda: engine.match(request))
    moved = turns[0] - before
    stop.set()
    for each in threads:
        each.join()
    assert answer == (4 * BLOCK, False)
    assert took > 0.04
    assert moved > 5, "tokens of other requests leave meanwhile: the wait keeps no GIL"
    assert engine.side.counters["slack_ns"] > 40 * MS
    assert engine.side.counters["wait_ns"] == waited_ns, "nobody waited for it"
    engine.daemon.drain()
    assert [ask.flag for ask in engine.daemon.asks][-1:] == [hint.flag]


def test_the_wait_ends_before_the_step_does() -> None:
    engine, request = running()
    answer, took = timed(lambda: engine.match(request))
    assert answer == PENDING
    assert took < SHARE * STEP_MS / 1e3 + 0.1
    again = engine.add("again", 4 * BLOCK + 1)
    assert timed(lambda: engine.match(again))[1] < 0.1, "all of a pass together"


NOT_AHEAD: dict[str, dict[str, Any]] = {
    "synchronous scheduling": {"ahead": False},
    "data parallel in lockstep": {"lockstep": True},
    "best effort": {"policy": "best_effort"},
}


@pytest.mark.parametrize("options", NOT_AHEAD.values(), ids=NOT_AHEAD)
def test_an_engine_that_is_not_ahead_of_its_device_does_not_wait(options: dict[str, Any]) -> None:
    engine, request = running(**options)
    assert timed(lambda: engine.match(request))[1] < 0.1
    assert engine.side.counters["slack_ns"] == 0


@pytest.mark.parametrize("whose", ["its own", "a running request's"])
def test_with_a_grammar_the_scheduler_is_not_ahead(whose: str) -> None:
    engine, request = running()
    if whose == "its own":
        request.use_structured_output = True
    else:
        other = engine.side.requests["other"].request
        other.use_structured_output = True
        engine.allocate(other, 0)
    assert timed(lambda: engine.match(request))[1] < 0.1
    assert engine.side.counters["slack_ns"] == 0


def test_a_request_that_runs_is_not_asked_for_its_grammar_again() -> None:
    """The cost of a pass does not grow with the requests that run."""
    engine, request = running()
    del engine.side.requests["other"].request.use_structured_output
    assert engine.match(request) == PENDING


def test_without_a_step_in_flight_the_device_would_wait() -> None:
    engine, request = running()
    engine.side.step_ended()
    assert timed(lambda: engine.match(request))[1] < 0.1
    engine.step(ends=False)  # of nothing
    assert engine.side.slack.until_ns(engine.side.requests["r"], 0) == 0
    fresh = Engine(clock=RealClock(), wait_policy="wait", ahead=True)
    request = fresh.add("r", 4 * BLOCK + 1)
    assert timed(lambda: fresh.match(request))[1] < 0.1


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({"in_flight": 2}, True),
        ({"in_flight": 1}, False),
        ({"in_flight": 2, "multi": True}, False),
        ({"in_flight": 2, "multi": True, "first": True}, False),
    ],
    ids=["asynchronous", "synchronous", "behind another child", "before another child"],
)
def test_vllms_configuration_says_whether_the_scheduler_is_ahead(make: Make, options: Any, ahead: bool) -> None:
    assert make(**options).side.slack.allowed is ahead


# --- the rule ---------------------------------------------------------------------------------------------------------


def slack_of(steps: StepTimes) -> tuple[Slack, Any]:
    state = SimpleNamespace(request=SimpleNamespace(use_structured_output=False))
    return Slack(steps, allowed=True, overlap=True), state


def test_a_step_under_way_began_when_the_one_before_it_ended() -> None:
    steps = StepTimes()
    slack, state = slack_of(steps)
    steps.decode_ns = 50.0 * MS
    assert slack.until_ns(state, 0) == 0
    steps.began(1000 * MS, 0, executed=True)
    assert slack.until_ns(state, 0) == 1000 * MS + SHARE * 50 * MS - LAUNCH_NS
    steps.began(1010 * MS, 0, executed=True)
    steps.ended(1050 * MS)
    assert slack.until_ns(state, 0) == 1050 * MS + SHARE * steps.decode_ns - LAUNCH_NS
    steps.ended(1100 * MS)
    assert slack.until_ns(state, 0) == 0
    steps.begun += 1  # one that need not be measured
    steps.ended_ns = 1200 * MS
    assert slack.until_ns(state, 0) == 1200 * MS + SHARE * steps.decode_ns - LAUNCH_NS


def test_a_step_of_a_minute_has_no_later_pass_wait_as_long() -> None:
    """The first one compiles kernels, or the process stood still: the averages say that the next takes as long."""
    steps = StepTimes()
    slack, state = slack_of(steps)
    steps.began(0, 0, executed=True)
    steps.ended(60_000 * MS)
    steps.began(60_000 * MS, 2000, executed=True)
    assert slack.until_ns(state, 0) <= 60_500 * MS


def test_a_copy_of_unknown_length_ends_no_wait() -> None:
    """As with `sync_load_max_bytes` 0, where all loads are asynchronous."""
    steps = StepTimes()
    _, state = slack_of(steps)
    slack = Slack(steps, allowed=True, overlap=True)
    steps.decode_ns = 50.0 * MS
    steps.began(1000 * MS, 0, executed=True)
    slack.copies(1000 * MS, math.inf)
    assert slack.until_ns(state, 1000 * MS, math.inf) > 1030 * MS


def test_loads_overlap_a_step_under_way_in_which_no_block_is_cleared_or_copied() -> None:
    steps = StepTimes()
    slack = Slack(steps, allowed=True, overlap=True)
    steps.decode_ns = 50.0 * MS
    assert not slack.overlaps(SimpleNamespace())
    steps.began(1000 * MS, 0, executed=True)
    assert slack.overlaps(SimpleNamespace(new_block_ids_to_zero=None))
    assert not slack.overlaps(SimpleNamespace(new_block_ids_to_zero=[3]))
    assert not slack.overlaps(SimpleNamespace(kv_cache_block_copies=[(1, 2)]))
    for not_now in (Slack(steps, allowed=True), Slack(steps, allowed=False, overlap=True)):
        assert not not_now.overlaps(SimpleNamespace())


def test_loads_whose_copies_end_with_the_step_under_way_are_synchronous() -> None:
    """How many requests run then hardly counts: nobody waits for the copies of a pass that take as long together."""
    most = int((STEP_MS * MS - LAUNCH_NS) // (64 * COPIED_IN_NS))  # blocks

    def beside(*loads: int, hidden: bool = True) -> list[bool]:
        engine, _ = running(fenced_blocks=hidden, sync_load_max_bytes=BLOCK_BYTES // 64, clock=Clock())
        requests = [engine.add(f"{n}", (blocks + 1) * BLOCK, staged=blocks) for n, blocks in enumerate(loads)]
        return [bool(asynchronous) for _, asynchronous in map(engine.match, requests)]

    assert beside(most, hidden=False) == [True]
    assert beside(most) == [False]
    assert beside(most + 1) == [True]
    assert beside(most // 2, most // 3, most // 2, 1) == [False, False, True, True], "they share a bus"


def test_a_pass_waits_for_no_fetch_whose_copy_would_hold_up_the_next_step() -> None:
    slack, state = slack_of(steps := StepTimes())
    steps.decode_ns = 10.0 * MS
    steps.began(MS, 0, executed=True)
    steps.began(MS, 0, executed=True)
    short, at = slack.until_ns(state, 0), steps.under_way()[0]
    assert short == at + SHARE * 10 * MS - LAUNCH_NS
    assert slack.until_ns(state, at, 5.0 * MS) == at + 5 * MS - LAUNCH_NS
    assert slack.until_ns(state, at, 9.0 * MS) == short, "that one is copied beside the forward, whenever it is there"
    slack.copies(at, 4 * MS)
    assert slack.until_ns(state, at, 3.0 * MS) == at + 3 * MS - LAUNCH_NS, "the copy of another load goes before it"
    assert slack.until_ns(state, at, 9.0 * MS) == at + 6 * MS - LAUNCH_NS


LATE = {
    "the wait was over late": {"after_ms": 8.0, "left_ms": 20.0},
    "the step under way had ended": {"after_ms": 1.0, "left_ms": 1.0},
    "the step under way ended late": {"after_ms": 1.0, "left_ms": 90.0},
}


@pytest.mark.parametrize("how", LATE.values(), ids=LATE)
def test_after_a_late_launch_nothing_waits_for_a_while(how: dict[str, float]) -> None:
    steps, now = StepTimes(), 1000 * MS

    def launch(after_ms: float = 1.0, left_ms: float = 10.0) -> bool:
        """A pass that may wait for 5 ms ends after so many, and the step under way so much later."""
        nonlocal now
        slack.waited(now + 5 * MS)
        now += int(after_ms * MS)
        steps.began(now, 0, executed=True)
        slack.launched(now)
        now += int(left_ms * MS)
        late = slack.ended(now)
        steps.ended(now)
        steps.decode_ns = 50.0 * MS
        return late

    slack, state = slack_of(steps)
    steps.decode_ns = 50.0 * MS
    steps.began(now, 0, executed=True)
    assert not launch()
    assert slack.until_ns(state, 0) > 0
    for pause in (PAUSED_STEPS[0], 2 * PAUSED_STEPS[0]):
        assert launch(**how)
        for _ in range(pause):
            assert slack.until_ns(state, 0) == 0
            steps.began(now, 0, executed=True)
            steps.ended(now := now + 50 * MS)
        assert slack.until_ns(state, 0) > 0
