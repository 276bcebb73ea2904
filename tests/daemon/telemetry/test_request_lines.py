"""Every hinted request gets exactly one request.done line, whatever its end, with an outcome that says which."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.attach import Reset
from kvprefetch.shmring.wire.codec import receive_message, send_message
from kvprefetch.shmring.wire.records import FlagState, Outcome, RecordKind
from tests.daemon.stores import blocks, request_line
from tests.lab.daemon import Daemon
from tests.lab.process import frozen
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]


def outcomes_of(daemon: Daemon, *names: str) -> dict[str, list[str]]:
    """Return the outcomes of each request's lines, once each has one."""

    def so_far() -> dict[str, list[str]]:
        lines: dict[str, list[str]] = {name: [] for name in names}
        for line in daemon.records("request.done"):
            if line["request_id"] in lines:
                lines[line["request_id"]].append(line["outcome"])
        return lines

    eventually(lambda: all(so_far().values()), what=f"a line of each of {names}")
    return so_far()


def test_each_end_that_the_engine_reports_and_one_that_it_does_not(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, prefix="reported")
    outcomes = (Outcome.MISS, Outcome.TIMED_OUT, Outcome.ABORTED, Outcome.UNUSED, Outcome.LOCAL_GAP)
    names = [*(outcome.name.lower() for outcome in outcomes), "unreported"]
    for name, outcome in zip(names, (*outcomes, None), strict=True):
        key = engine.hint(list(blocks("reported", 3)), name=name)
        engine.settled(key)
        assert engine.move(key, FlagState.CANCELLED)
        if outcome is not None:  # else its record was lost
            engine.done(key, outcome)
    assert outcomes_of(shared_daemon, *names) == {name: [name] for name in names}


def test_a_record_that_comes_a_moment_after_its_release_is_believed(shared_daemon: Daemon) -> None:
    """The engine moves the flag and then pushes the record: a scan in between must not end it without the record."""
    engine = FakeEngine(shared_daemon.socket, prefix="moment")
    names = [f"moment-{i}" for i in range(40)]
    for name in names:
        key = engine.hint(list(blocks("moment", 1)), name=name)
        engine.settled(key)
        assert engine.move(key, FlagState.CANCELLED)
        time.sleep(0.01)  # forty of these meet several of the daemon's ten scans a second
        engine.done(key, Outcome.ABORTED)
    assert outcomes_of(shared_daemon, *names) == {name: ["aborted"] for name in names}


def test_a_request_cancelled_before_its_hint_was_read_is_logged(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, prefix="unread")
    with frozen(shared_daemon.pid):
        key = engine.hint(list(blocks("unread", 3)), name="unread")
        engine.cancel(key)
    assert outcomes_of(shared_daemon, "unread") == {"unread": ["aborted"]}


def test_the_end_of_an_engine_ends_its_requests_and_what_it_said_last_counts(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, prefix="gone")
    pending = engine.hint(list(blocks("gone", 3)), name="pending-at-the-end")
    engine.settled(pending)
    ended = engine.hint(list(blocks("gone", 3)), name="ended-in-time")
    engine.settled(ended)
    with frozen(shared_daemon.pid):  # the daemon sees the end of file together with the last records
        engine.cancel(ended, Outcome.MISS)
        engine.hint(list(blocks("gone", 3)), name="never-read")
        for sock in engine.sockets:
            sock.close()
    assert outcomes_of(shared_daemon, "pending-at-the-end", "ended-in-time", "never-read") == {
        "pending-at-the-end": ["engine_gone"],
        "ended-in-time": ["miss"],
        "never-read": ["engine_gone"],
    }


def test_a_reset_and_a_taking_back_are_logged(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, prefix="taken")
    groups = [blocks(f"taken-{i}", 150) for i in range(2)]  # 192 slots are there for fetches
    for values in groups:
        for start in (0, 50, 100):
            engine.save(dict(list(values.items())[start : start + 50]))
    eventually(lambda: engine.credits.available() == 64, what="the saves")
    far = engine.hint(list(groups[0]), name="far")
    assert engine.settled(far).count == 150
    near = engine.hint(list(groups[1]), name="near")
    taken = records.encode_ask(records.Ask(near[0], near[1], time.monotonic_ns()))
    engine.push(RecordKind.ASK, taken)
    assert engine.settled(near).count == 150
    flag = engine.flag(far)
    assert (flag.generation, flag.state) == (far[1], FlagState.HINTED)
    assert flag.count <= 192 - 150
    engine.cancel(near)
    assert engine.settled(far).count == 150, "fetched again, without another hint"
    assert outcomes_of(shared_daemon, "near") == {"near": ["aborted"]}
    send_message(engine.scheduler, Reset(reset_generation=1, weights="1" * 32))
    assert outcomes_of(shared_daemon, "far") == {"far": ["reset"]}
    line = request_line(shared_daemon, "far")
    assert line["taken_back"] == 1
    assert line["bytes"] > 150 * engine.spec.block_bytes, "what was fetched again counts again"
    assert receive_message(engine.scheduler)


def test_a_stop_of_the_daemon_ends_every_request_before_its_last_line(serve: Serve) -> None:
    daemon = serve()
    engine = FakeEngine(daemon.socket)
    for i in range(5):
        engine.hint(list(blocks("stop", 4)), name=f"r{i}")
    engine.settled(engine.hint(list(blocks("stop", 4)), name="r5"))
    assert daemon.sigterm(30) == 0
    records = daemon.records()
    assert Counter(line["request_id"] for line in records if line["event"] == "request.done") == {
        f"r{i}": 1 for i in range(6)
    }
    assert {line["outcome"] for line in records if line["event"] == "request.done"} == {"daemon_stopped"}
    assert records[-1]["event"] == "daemon.stopped"


def test_many_requests_of_many_ends_get_one_line_each(shared_daemon: Daemon) -> None:
    """Hundreds at once, ended in turn by record, without one, and by the engine's end: as many lines as hints."""
    engine = FakeEngine(shared_daemon.socket, prefix="many")
    keys: list[tuple[int, tuple[int, int]]] = []
    for i in range(300):
        keys.append((i, engine.hint(list(blocks(f"many-{i % 7}", 2)), name=f"many-{i}")))
    for i, key in keys:
        engine.settled(key)
        if i % 3 < 2:
            assert engine.move(key, FlagState.CANCELLED)
        if i % 3 == 0:
            engine.done(key, Outcome.MISS)
    outcomes_of(shared_daemon, *(f"many-{i}" for i, _ in keys if i % 3 < 2))
    engine.close()
    outcomes: dict[str, Any] = outcomes_of(shared_daemon, *(f"many-{i}" for i, _ in keys))
    assert Counter(len(lines) for lines in outcomes.values()) == {1: 300}
    assert Counter(lines[0] for lines in outcomes.values()) == {"miss": 100, "unreported": 100, "engine_gone": 100}
