"""The waits and the hidden fraction of a request.done line."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.telemetry.counters import Counters
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.daemon.telemetry.metrics import Metrics
from kvprefetch.daemon.telemetry.trace import Met, Trace, Work
from kvprefetch.shmring.wire.records import Done, Hint, Outcome
from tests.daemon.planning.support import request_of
from tests.support.telemetry import sample

MS = 1_000_000


def hint(blocks: int = 4, local: int = 0) -> Hint:
    """One that arrived at 1 ms."""
    return Hint(0, 1, "r", blocks, local, 0, 1500, 1 * MS, 32, b"", [0])


@pytest.mark.parametrize(("early", "adopted", "told"), [(True, 25, 24.0), (True, 0, None), (False, 25, None)])
def test_an_early_hint_is_so_long_before_the_scheduler_has_its_request(
    early: bool, adopted: int, told: float | None
) -> None:
    """A word of an earlier use of the flag says nothing."""
    trace, request = Trace(hint()._replace(early=early), 2 * MS), request_of(0, range(4))
    line = trace.fields(request, Ending.ABORTED, None, 1, 50 * MS, Work(), adopted * MS)
    assert line["adopted_ms"] == told


@pytest.mark.parametrize(
    ("asked", "waited", "claimed", "ended", "exposed", "hidden"),
    [
        (0, 0, 300, 310, 0.0, 1.0),  # never asked: the queue hid all of it
        (60, 50, 110, 115, 50.0, 0.5),  # asked in the middle of a transfer from 20 to 100
        (100, 40, 140, 145, 40.0, 1.0),  # asked when all was there, and looked again late
        (10, 100, 110, 115, 100.0, 0.0),  # asked before the hint was seen
        (60, 20, 0, 80, 20.0, 0.75),  # gave up before the end: only what it waited for counts
        (20, 4, 3498, 3500, 4.0, 0.95),  # the scheduler was with others meanwhile, and long after
        (20, 10**12, 60, 65, 40.0, 0.5),  # an engine that counts more than there was
    ],
)
def test_the_wait_and_what_was_hidden(
    asked: int, waited: int, claimed: int, ended: int, exposed: float, hidden: float
) -> None:
    trace = Trace(hint(), 21 * MS, 1, Met(MS, 4))
    trace.looked_up_ns, trace.staged_blocks = 26 * MS, 3
    request = request_of(0, range(4))
    request.first_byte_ns, request.last_byte_ns, request.fetched_blocks = 41 * MS, 101 * MS, 4
    request.disk_blocks = 1
    times = [(at + 1) * MS if at else 0 for at in (asked, claimed)]
    costs = {"missing": 2, "cost_ns": 9 * MS, "spared_ns": 8 * MS}
    done = Done(0, 1, Outcome.LOADED, 0, 4, times[0], waited * MS, times[1], 0, **costs)
    line = trace.fields(request, Ending.LOADED, done, 1000, (ended + 1) * MS, Work())
    assert (line["exposed_ms"], line["hidden_fraction"]) == (exposed, hidden)
    assert (line["hint_seen_ms"], line["last_byte_ms"], line["ended_ms"]) == (20.0, 100.0, ended)
    assert line["visited_ms"] == (asked or None)
    assert (line["missing_blocks"], line["recompute_ms"], line["spared_ms"]) == (2, 9.0, 8.0)
    assert (line["announced_ms"], line["announced_blocks"], line["announced_staged"]) == (0.0, 4, 3)
    assert (line["bytes"], line["bytes_memory"], line["bytes_disk"]) == (4000, 3000, 1000)


@pytest.mark.parametrize(
    ("final", "asked", "looked_up", "waited", "unseen"),
    [
        (True, 2, 9, 9, 2.0),  # 64 prompts at once, tokens for one: 67 s with others are no wait
        (True, 1, 6, 812, 807.0),  # it had to wait, and its answer came during a step of others
        (True, 1, 6, 4, 0.0),  # the step went to others before the answer came
        (True, 6, 2, 10, 10.0),  # answered before it was asked about: the daemon's clock and the scheduler's look cross
        (True, 0, 6, 0, 0.0),  # never asked
        (False, 1, 6, 812, 0.0),  # no answer yet
    ],
)
def test_what_a_request_waited_for_the_engine_s_own_step(
    final: bool, asked: int, looked_up: int, waited: int, unseen: float
) -> None:
    trace = Trace(hint(46), 2 * MS)
    trace.looked_up_ns = (looked_up + 1) * MS
    request = request_of(0, range(46))
    request.final = final
    done = Done(0, 1, Outcome.MISS, 0, 0, (asked + 1) * MS if asked else 0, waited * MS, 0, 0)
    line = trace.fields(request, Ending.MISS, done, 1000, 900 * MS, Work())
    assert (line["unseen_ms"], line["hidden_fraction"]) == (unseen, None), "a miss hides nothing"
    assert line["exposed_ms"] == (min(waited, 899 - asked) if asked else 0)
    counters = Counters(Metrics())
    counters.request_done(line)
    assert (counters["transfer_seconds"], counters["hidden_seconds"]) == (0.0, 0.0)
    assert sample(counters.metrics, "ready_to_seen_seconds_count") == (unseen > 0)
    assert sample(counters.metrics, "ready_to_seen_seconds_sum") == pytest.approx(unseen / 1e3)


@pytest.mark.parametrize(("final", "exposed"), [(True, 20.0), (False, 60.0)])
def test_without_the_engine_s_word_a_wait_ends_with_the_fetch(final: bool, exposed: float) -> None:
    trace = Trace(hint(), 2 * MS)
    trace.looked_up_ns, trace.asked_ns = 10 * MS, 31 * MS
    request = request_of(0, range(4))
    request.last_byte_ns, request.fetched_blocks, request.final = 51 * MS, 2, final
    line = trace.fields(request, Ending.ENGINE_GONE, None, 1000, 91 * MS, Work())
    assert line["exposed_ms"] == exposed


def test_the_line_of_a_request_is_entered_into_the_totals() -> None:
    """One that the engine said nothing of has loaded nothing, and no time at which it did."""
    request = request_of(0, range(4))
    request.last_byte_ns, request.fetched_blocks = 51 * MS, 2
    trace = Trace(hint(local=1), 11 * MS, looked_up_ns=21 * MS, asked_ns=31 * MS, found_blocks=3)
    line = trace.fields(request, Ending.ENGINE_GONE, None, 1000, 61 * MS, Work())
    times = [line[f"{name}_ms"] for name in ("arrived", "hint_seen", "looked_up", "visited", "last_byte", "ended")]
    assert times == [0.0, 10.0, 20.0, 30.0, 50.0, 60.0]
    assert [line[name] for name in ("claimed_ms", "loaded_ms", "loaded_blocks")] == [None, None, 0]
    assert (line["exposed_ms"], line["hidden_fraction"]) == (30.0, 0.5)
    totals = Counters(Metrics())
    totals.request_done(line)
    totals.publish()
    ended = totals.metrics.totals("requests")
    assert {outcome: count for outcome, count in ended.items() if count} == {"engine_gone": 1}
    assert totals["miss_blocks"] == 1
