"""The log's form: JSON lines, journald's priorities, floods that are summed, one readable line on a terminal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvprefetch.daemon.telemetry import logs, pretty
from kvprefetch.daemon.telemetry.logs import ENGINE_BURST, ENGINE_BYTES_S, FLOOD_NS, Floods
from tests.support.clock import Clock
from tests.support.command import run


def say(floods: Floods, event: str = "record.bad", engine: str = "a", **fields: Any) -> bool:
    """Whether the line was let through."""
    try:
        floods(None, "warning", {"event": event, "level": "warning", "engine": engine, **fields})
    except structlog.DropEvent:
        return False
    return True


def test_a_flood_is_summed_once_a_second_and_loses_no_count() -> None:
    clock = Clock()
    floods = Floods(clock)
    assert say(floods), "the first one goes out at once"
    assert not any(say(floods, count=i) for i in range(100))
    assert floods.due() == [], "not before a second is over"
    clock.ns += FLOOD_NS
    (line,) = floods.due()
    assert line["suppressed"] == 99, "99 beside the one shown"
    assert line["count"] == 99, "the last one is shown"
    assert not say(floods), "the second that began with the sum"
    clock.ns += FLOOD_NS
    assert [each["suppressed"] for each in floods.due()] == [0]
    clock.ns += FLOOD_NS
    assert floods.due() == []
    assert say(floods), "quiet for a second: at once again"


def test_engines_and_events_do_not_hide_each_other_and_other_events_pass() -> None:
    floods = Floods(Clock())
    assert say(floods, engine="a")
    assert say(floods, engine="b")
    assert say(floods, event="store.failed", engine="")
    assert not say(floods, engine="b")
    assert all(say(floods, event="request.done") for _ in range(50))
    assert [each["engine"] for each in floods.due(at_once=True)] == ["b"]


def test_an_engine_that_writes_more_than_its_share_is_summed_and_no_other_is() -> None:
    """Each of its requests has a line of a kilobyte, and it may make thousands of them a second."""
    clock = Clock()
    floods, through = Floods(clock), 0
    for _ in range(100_000):
        clock.ns += 100_000
        if say(floods, "request.done"):
            through += 1
            floods.wrote({"engine": "a"}, 1000)
        for line in floods.due():
            floods.wrote(line, 1000)
            through += 1
    most = ENGINE_BURST + 10 * ENGINE_BYTES_S
    assert 0.9 * most < 1000 * through < 1.1 * most, "in ten seconds"
    assert say(floods, "request.done", engine="b")
    assert say(floods, "daemon.ready", engine="")
    [line] = floods.due(at_once=True)
    assert line["event"] == "request.done"
    clock.ns += 5 * FLOOD_NS
    assert say(floods, "request.done"), "once it was quiet"


def test_each_line_of_an_engine_that_floods_is_written_or_counted() -> None:
    clock = Clock()
    floods, written = Floods(clock), 0
    for _ in range(20_000):
        clock.ns += 200_000
        if say(floods, "request.done"):
            floods.wrote({"engine": "a"}, 1000)
            written += 1
        written += sum(1 + line["suppressed"] for line in floods.due())
    assert written + sum(1 + line["suppressed"] for line in floods.due(at_once=True)) == 20_000


def test_a_warning_below_the_level_is_counted() -> None:
    script = """if True:
        from kvprefetch.daemon.telemetry import logs, metrics
        counted = metrics.Metrics()
        logs.configure("error", counted).warning("record.bad", error="kind=77", count=1)
        print(counted.totals("events")["record.bad"])
    """
    assert run([sys.executable, "-c", script]).stdout.strip() in ("1", "1.0")


SPEAK = """
from kvprefetch.daemon.telemetry import logs, metrics
log = logs.configure("info", metrics.Metrics())
log.debug("master.said", line="not shown")
log.bind(engine="e1", epoch=7).warning("record.bad", error="kind=77", count=1)
log.info("daemon.stopped")
"""


def speak(stdout: int, **environ: str) -> None:
    subprocess.run([sys.executable, "-c", SPEAK], stdout=stdout, env={**os.environ, **environ}, check=True, timeout=60)


def test_lines_are_json_with_the_common_fields_first(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        speak(file.fileno(), JOURNAL_STREAM="1:2")
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["record.bad", "daemon.stopped"]
    assert list(lines[0]) == ["ts", "level", "event", "run_id", "engine", "epoch", "error", "count"]
    assert lines[0]["run_id"] == lines[1]["run_id"]


def test_journald_gets_its_priorities_when_it_reads_this_very_stream(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        status = os.fstat(file.fileno())
        speak(file.fileno(), JOURNAL_STREAM=f"{status.st_dev}:{status.st_ino}")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line[:4] for line in lines] == ["<4>{", "<6>{"]


@pytest.mark.parametrize("value", ["", "nonsense", "1:2:3", "5:"])
def test_a_strange_journal_stream_is_not_journald(tmp_path: Path, value: str) -> None:
    with (tmp_path / "log").open("w") as file:
        assert not logs.goes_to_journald(file, {"JOURNAL_STREAM": value})
    assert not logs.goes_to_journald(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


def test_a_terminal_gets_readable_lines() -> None:
    primary, secondary = os.openpty()
    try:
        speak(secondary, NO_COLOR="1")
        shown = os.read(primary, 4096).decode().splitlines()
    finally:
        os.close(primary)
        os.close(secondary)
    assert "record.bad" in shown[0]
    assert "error=kind=77 count=1" in shown[0]
    assert "{" not in shown[0]


def test_a_miss_without_the_store_looks_unlike_one_that_the_store_has_nothing_for() -> None:
    record = {"event": "request.done", "request_id": "a", "outcome": "miss", "hint_blocks": 14, "exposed_ms": 4.64}
    assert pretty.line({**record, "store_unavailable": False}).endswith("a miss: 0 of 14 blocks waited 4.64 ms")
    assert "a miss: 0 of 14 blocks (store unavailable) waited" in pretty.line({**record, "store_unavailable": True})
