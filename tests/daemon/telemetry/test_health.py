"""Health as it is judged from a snapshot: ready, healthy, and what is wrong."""

from __future__ import annotations

import socket
import time

import pytest

from kvprefetch.daemon.telemetry import web
from kvprefetch.daemon.telemetry.logs import EventCounts
from kvprefetch.daemon.telemetry.snapshot import CALL_HEALTHY_S, LOOP_HEALTHY_S, LOST_NS, Snapshot, judge
from kvprefetch.daemon.telemetry.web import MetricsServer
from tests.lab.process import free_ports
from tests.support.clock import Clock
from tests.support.telemetry import get, snapshot_at
from tests.support.waiting import eventually


@pytest.mark.parametrize(
    ("snapshot", "ready", "healthy"),
    [
        (snapshot_at(100, beat_s=99.9), True, True),
        (snapshot_at(100, beat_s=95), False, True),
        (snapshot_at(100, beat_s=99 - LOOP_HEALTHY_S), False, False),
        (snapshot_at(100, beat_s=100, running={"look_up": 99}), True, True),
        (snapshot_at(100, beat_s=100, running={"look_up": 80, "fetch": 99}), False, True),
        (snapshot_at(200, beat_s=200, running={"look_up": 199 - CALL_HEALTHY_S}), False, False),
        (snapshot_at(100, beat_s=0, phase="starting"), False, True),
        (snapshot_at(100, beat_s=0, phase="stopping"), False, True),
    ],
)
def test_health_is_judged_by_ages(snapshot: Snapshot, ready: bool, healthy: bool) -> None:
    health = judge(snapshot)
    assert (health.ready, health.healthy) == (ready, healthy)
    assert bool(health.problems) == (not ready)


@pytest.mark.parametrize("call", ["fetch", "save", "attach", "copy"])
def test_what_a_restart_does_not_mend_is_no_reason_for_one(call: str) -> None:
    """Purges, puts, reads from a node that trickles, large staging and copies to a GPU may last."""
    health = judge(snapshot_at(1000, beat_s=1000, running={call: 1}))
    assert (health.ready, health.healthy, health.problems) == (True, True, ())
    assert health.call_age_s == {call: 999}


def test_health_is_the_status_over_http() -> None:
    """503 of /healthz is the restart that is due."""
    (port,) = free_ports(1)
    snapshot = snapshot_at(100, beat_s=100)
    server = MetricsServer("127.0.0.1", port, snapshot, EventCounts())
    try:
        for beat_s, statuses in ((100, (200, 200)), (97, (503, 200)), (99 - LOOP_HEALTHY_S, (503, 503))):
            snapshot.beat_ns = int(beat_s * 1e9)
            assert (get(port, "/readyz")[0], get(port, "/healthz")[0]) == statuses
    finally:
        server.close()


def test_clients_that_do_not_finish_their_request_keep_nobody_out() -> None:
    """Each of them has one deadline, however often it sends a byte, and when all places are taken the oldest goes."""
    (port,) = free_ports(1)
    server = MetricsServer("127.0.0.1", port, snapshot_at(100, beat_s=100), EventCounts())
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(web.MAX_CLIENTS)]
    try:
        for each in slow:
            each.sendall(b"GET /healthz HT")
        deadline = time.monotonic() + web.REQUEST_S + 5
        assert get(port, "/healthz", timeout_s=3)[0] == 200, "the oldest made room"

        def gone(each: socket.socket) -> bool:
            try:
                each.sendall(b"x")
                return each.recv(1, socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True

        assert gone(slow[0])
        assert not gone(slow[-1])
        eventually(lambda: all(map(gone, slow)), deadline - time.monotonic(), "the end of those that send on")
    finally:
        server.close()
        for each in slow:
            each.close()


@pytest.mark.parametrize(("is_open", "problem"), [(False, "is not open"), (True, "does not answer")])
def test_a_store_that_is_closed_or_silent_is_not_ready_but_healthy(is_open: bool, problem: str) -> None:
    snapshot = snapshot_at(1, beat_s=1)
    snapshot.publish(0, [], [], store_open=is_open, store_answering=False)
    health = judge(snapshot)
    assert (health.ready, health.healthy) == (False, True)
    assert problem in health.problems[0]


def test_a_disk_that_keeps_nothing_is_a_problem_and_no_reason_not_to_be_ready() -> None:
    snapshot = snapshot_at(1, beat_s=1)
    snapshot.disk_fault = lambda: "nothing can be kept on disk"
    health = judge(snapshot)
    assert (health.ready, health.healthy, health.problems) == (True, True, ("nothing can be kept on disk",))
    snapshot.lease_fault = lambda: "a shorter lease"
    health = judge(snapshot)
    assert (health.ready, health.problems) == (True, ("nothing can be kept on disk", "a shorter lease"))


def test_lost_lines_of_the_log_are_a_problem_for_a_minute() -> None:
    clock = Clock()
    snapshot = Snapshot(clock)
    snapshot.phase = "serving"
    snapshot.publish(0, [], [], store_open=True)
    assert judge(snapshot).problems == ()
    for lines in (3, 3):
        snapshot.note_lost(lines, clock())
        health = judge(snapshot)
        assert health.ready
        [problem] = health.problems
        assert problem.endswith("lines=3")
        snapshot.beat_ns = clock.ns = clock.ns + LOST_NS - 1
    clock.ns = snapshot.beat_ns = clock.ns + 1
    assert judge(snapshot).problems == ()
