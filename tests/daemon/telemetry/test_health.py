"""Health as it is judged from the daemon's picture: ready, healthy, and what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvprefetch.daemon.telemetry.health import CALL_HEALTHY_S, LOOP_HEALTHY_S
from kvprefetch.daemon.telemetry.snapshot import LOST_NS, Snapshot
from tests.support.telemetry import get, picture, served


@pytest.mark.parametrize(
    ("seen", "ready", "healthy"),
    [
        ({"beat_age_s": 0.1}, True, True),
        ({"beat_age_s": 5}, False, True),
        ({"beat_age_s": LOOP_HEALTHY_S + 1}, False, False),
        ({"calls": {"look_up": 1}}, True, True),
        ({"calls": {"look_up": 20, "fetch": 1}}, False, True),
        ({"calls": {"look_up": CALL_HEALTHY_S + 1}}, False, False),
        ({"beat_age_s": 100, "phase": "starting"}, False, True),
        ({"beat_age_s": 100, "phase": "stopping"}, False, True),
        ({"alive": False}, False, False),
    ],
)
def test_health_is_judged_by_ages(seen: dict[str, Any], ready: bool, healthy: bool) -> None:
    health = picture(**seen).health()
    assert (health.ready, health.healthy) == (ready, healthy)
    assert bool(health.problems) == (not ready)


def test_a_start_that_lasts_says_for_how_long() -> None:
    """A daemon that hangs in it, or that is stopped, would be "starting" for ever."""
    assert picture(100, phase="starting").health().problems == ("starting for 100 s",)


@pytest.mark.parametrize("call", ["fetch", "save", "attach", "copy"])
def test_what_a_restart_does_not_mend_is_no_reason_for_one(call: str) -> None:
    """Purges, puts, reads from a node that trickles, large staging and copies to a GPU may last."""
    health = picture(calls={call: 999}).health()
    assert (health.ready, health.healthy, health.problems) == (True, True, ())
    assert health.call_age_s[call] >= 999


def test_health_is_the_status_over_http() -> None:
    """503 of /healthz is the restart that is due."""
    seen = [picture()]
    with served(lambda: seen[0]) as port:
        for age_s, statuses in ((0, (200, 200)), (3, (503, 200)), (LOOP_HEALTHY_S + 1, (503, 503))):
            seen[0] = picture(age_s)
            assert (get(port, "/readyz")[0], get(port, "/healthz")[0]) == statuses


@pytest.mark.parametrize(("is_open", "problem"), [(False, "is not open"), (True, "does not answer")])
def test_a_store_that_is_closed_or_silent_is_not_ready_but_healthy(is_open: bool, problem: str) -> None:
    health = picture(store_open=is_open, store_answering=False).health()
    assert (health.ready, health.healthy) == (False, True)
    assert problem in health.problems[0]


def test_faults_of_disk_and_log_are_problems_and_no_reason_not_to_be_ready() -> None:
    health = picture(disk_fault="nothing can be kept on disk", log_fault="lost").health()
    assert (health.ready, health.healthy) == (True, True)
    assert health.problems == ("nothing can be kept on disk", "lost")


def test_a_daemon_that_is_gone_is_named_with_its_last_beat() -> None:
    [problem] = picture(60, alive=False, pid=7, engine_count=3).health().problems
    assert problem.startswith("the daemon is gone: pid 7, last beat 20")
    assert problem.endswith(" UTC, 3 engines")


def test_lost_lines_of_the_log_are_a_problem_for_a_minute() -> None:
    snapshot = Snapshot()
    assert snapshot.log_fault(0) == ""
    for lines, now_ns in ((3, 10), (3, 20)):
        snapshot.note_lost(lines, now_ns)
        assert snapshot.log_fault(10 + LOST_NS - 1).endswith("lines=3")
    assert snapshot.log_fault(10 + LOST_NS) == ""
