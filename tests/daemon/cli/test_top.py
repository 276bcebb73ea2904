"""`kvprefetchd status` and `top`: what is shown is what the daemon says, in numbers that add up."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import signal
import struct
import subprocess
import termios
import time
from functools import reduce
from typing import Any

import pytest
from rich.console import Console

from kvprefetch.daemon.cli import top_view
from kvprefetch.daemon.control import report
from kvprefetch.daemon.control.refusals import LISTED, MAX_TEXT
from kvprefetch.daemon.telemetry import overview
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.admin import MAX_NAMESPACE_BYTES, Status
from kvprefetch.shmring.wire.attach import MAX_SETTINGS
from kvprefetch.shmring.wire.codec import MAX_MESSAGE_BYTES, decode_message, encode_message
from kvprefetch.shmring.wire.records import Outcome
from tests.daemon.stores import blocks
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.command import COMMAND, ended_quietly, kvprefetchd
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually


def status(*engines: dict[str, Any], **changes: Any) -> Status:
    named = {"engines": list(engines), "engine_count": len(engines)}
    return Status(**{"version": "1", "pid": 7, "store_open": True, "uptime_s": 400.0, **named, **changes})


ENGINE = {
    "engine": "e", "epoch": 1, "block_bytes": 1000, "transfer_ms": 400, "hidden_ms": 300, "hints": 10,
    "fetched_blocks": 50, "hit_blocks": 60, "miss_blocks": 20, "requests": 3, "orders": 1, "blocks_pinned": 4,
    "slots_idle": 5, "slots_free": 6, "saves_queued": 2, "dropped_hints": 8, "bad_records": 9,
    "slots_unused": 2, "blocks_wasted": 3,
}  # fmt: skip
MIB = 1 << 20
AT_REST = overview.NodeRates(0.0, 0.0, None)


def engine(**changes: Any) -> dict[str, Any]:
    return {**ENGINE, **changes}


def shown(now: Status, width: int, rates: overview.NodeRates = AT_REST) -> list[str]:
    """The lines of a frame on a terminal of this width."""
    console = Console(file=io.StringIO(), width=width)
    console.print(top_view.frame(now, rates))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_rates_are_of_what_grew_between_two_answers() -> None:
    before = status(engine(), engine(epoch=2, hints=100))
    now = status(
        engine(hints=14, fetched_blocks=80, transfer_ms=500, hidden_ms=320),
        engine(epoch=3, hints=2, fetched_blocks=10, transfer_ms=0, hidden_ms=0),  # came since; epoch 2 left
    )
    rates = overview.rates(before, now, 2.0)
    assert rates.hints == (4 + 2) / 2
    assert rates.fetched_bytes == (30 + 10) * 1000 / 2
    assert rates.hidden == 20 / 100


def test_another_daemon_and_a_first_look_have_no_rates() -> None:
    now = status(engine())
    for before in (None, status(engine(), pid=8)):
        assert overview.rates(before, now, 1.0) == (0.0, 0.0, 0.75)
    assert overview.rates(None, status(), 1.0).hidden is None


def test_a_row_has_a_cell_for_each_column() -> None:
    cells = dict(zip(overview.COLUMNS, overview.row(engine()), strict=True))
    assert cells == {
        "ENGINE": "e", "PEND": "3", "FETCH": "1", "PINNED": "4", "IDLE": "5", "FREE": "6", "SAVES": "2",
        "HINTS": "10", "HIT": "75 %", "HIDDEN": "75 %", "WASTED": "10 %", "DROP": "8", "BAD": "9",
    }  # fmt: skip
    assert overview.row({})[overview.COLUMNS.index("WASTED")] == "–"
    assert overview.row({"engine": "x\x1b[2J"})[0] == "x\N{REPLACEMENT CHARACTER}[2J"
    assert overview.row(engine(engine="4f1c" * 9))[0] == "4f1c" * 9, "whole: --engine takes it"


def test_the_description_says_what_is_wrong() -> None:
    shown = overview.describe(status(store_open=False, calls={"fetch": 12.0}))
    assert "store NOT open" in shown[0]
    assert "store calls in flight: fetch 12.0 s" in shown[0]
    assert shown[1:] == ["no engine is attached"]
    more = "and 3 more engines, of other users or beyond those that fit"
    assert more in overview.describe(status(engine(), engine_count=4))
    assert overview.describe(status(engine_count=3))[1:] == [more]


def slow(request_id: str, engine: str, outcome: str, exposed_ms: float, **changes: Any) -> dict[str, Any]:
    known = {"request_id": request_id, "engine": engine, "outcome": outcome, "exposed_ms": exposed_ms}
    return {**known, "fetched_bytes": 99.9 * MIB, "ago_s": 118.0, **changes}


def test_a_frame_shows_engines_and_slow_requests() -> None:
    one = slow("cmpl-[red]9", "e", "late", 250.0, fetched_bytes=10 * MIB, ago_s=42.0)
    lines = shown(status(engine(), slowest=[one]), 140, overview.NodeRates(12.0, 3 << 20, 0.5))
    assert [line for line in lines if "12.0 hints/s, fetching 3 MiB/s, hidden 50 %" in line]
    line = next(line for line in lines if "cmpl-" in line)
    assert line.split() == ["250", "ms", "late", "10", "MiB", "42", "s", "ago", "e", "cmpl-[red]9"]


def test_a_frame_says_what_is_wrong_as_the_description_does() -> None:
    now = status(engine(), engine(engine="x", namespace="llama@"), problems=["no disk"], engine_count=5)
    wrong = re.compile("no disk|x: .* stores under llama@|and 3 more engines")
    said = [line for line in overview.describe(now) if wrong.search(line)]
    assert len(said) == 3
    assert [line.rstrip() for line in shown(now, 400) if line.rstrip() in said] == said


def test_what_is_wrong_comes_first_where_no_engine_can_count_on_the_daemon() -> None:
    dead = status(alive=False, ready=False, problems=["the daemon is gone"], log="/var/log/kv.log")
    said = ["the daemon is gone", f"it showed last: {overview.headline(status())}", "log: /var/log/kv.log"]
    assert [line for line in overview.describe(dead) if line in said] == said == overview.describe(dead)[:3]
    assert [line.rstrip() for line in shown(dead, 400)[:2]] == said[:2]
    assert overview.describe(status(problems=["no disk"]))[1] == "no disk"


def test_the_store_s_rates_and_the_causes_are_shown() -> None:
    now = status(
        rates={"memory": {"now": 1.2 * MIB, "5m": 1.2 * MIB, "hour": 96 * MIB}, "save": {"now": 5 * MIB}},
        causes={"lease": [30, 20.0], "link": [92, 80_000.0], "absent": [3, 0.0]},
    )
    expected = [
        "fetches from memory: now 1.2 MiB/s, last 5 min 1.2 MiB/s, last hour 96 MiB/s",
        "puts: now 5 MiB/s",
        "slow lately, requests (waited): slow link 92 (80.0 s), lost lease 30 (0.02 s), absent 3 (0.00 s)",
    ]
    assert [line for line in overview.describe(now) if line in expected] == expected
    assert [line.rstrip() for line in shown(now, 200) if line.rstrip() in expected] == expected


def pressed(keys: str) -> top_view.View:
    return reduce(top_view.View.press, keys, top_view.View())


def first_cells(view: top_view.View, *engines: dict[str, Any]) -> list[str]:
    now = status(*engines)
    return [row[0] for row in view.rows(map(overview.row, now.engines), overview.names(now))]


def test_keys_sort_filter_and_end() -> None:
    engines = [engine(engine="b", requests=9), engine(engine="c", requests=10), engine(engine="a", model="llama")]
    assert first_cells(pressed(""), *engines) == ["b", "c", "a"]
    assert first_cells(pressed("s"), *engines) == ["a", "b", "c"]
    assert first_cells(pressed("ssr"), *engines) == ["c", "b", "a"], "by PEND, as numbers"
    assert pressed("s" * (len(overview.COLUMNS) + 1)) == pressed(""), "round and round"
    assert first_cells(pressed("/LLx\x7fama\r"), *engines) == ["a"]
    assert (pressed("/q\r").only, pressed("/q\r").over) == ("q", False), "what is typed is no key"
    assert pressed("/a\x1b") == pressed("x") == pressed("hh") == pressed("")
    assert pressed("q").over
    assert "sorted by PEND, reversed" in pressed("ssr").line()
    console = Console(file=io.StringIO(), width=140)
    console.print(top_view.frame(status(*engines), AT_REST, pressed("h/b\r")))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert top_view.LEGEND[0] in text
    assert "a: llama, pid ?" not in text
    assert "\nb: " in text


def test_a_narrow_terminal_cuts_names_short_and_no_number() -> None:
    one = slow("cmpl-" + "9" * 40, "e" * 36, "recomputed", 31.6, cause="link")
    lines = shown(status(engine(engine="4f1c" * 8, hints=1234567, slots_idle=76800), slowest=[one]), 80)
    line = next(line for line in lines if line.startswith("4f1c"))
    assert line.split()[1:] == ["3", "1", "4", "76800", "6", "2", "1234567", "75", "%", "75", "%", "10", "%", "8", "9"]
    line = next(line for line in lines if "recomputed" in line)
    assert line.split()[:9] == ["31.6", "ms", "recomputed", "slow", "link", "99.9", "MiB", "118", "s"]
    assert "cmpl-" in line


def test_status_of_another_release_is_understood() -> None:
    """Fewer fields than this one knows, and more."""
    old = decode_message(b'{"type":"status","version":"0","pid":1,"store_open":true,"engines":[],"news":{"a":1}}')
    assert isinstance(old, Status)
    assert overview.describe(old)


def test_an_answer_with_many_engines_fits_a_message() -> None:
    counters = {f"counter_{i}": 10**12 for i in range(20)}
    worst = engine(engine="x" * 256, namespace="x" * MAX_NAMESPACE_BYTES, settings="x" * MAX_SETTINGS, **counters)
    longest = slow("r" * 512, "x" * 256, "engine_corrupt", 1e6, fetched_bytes=10**12)
    refused = [{"engine": "x" * MAX_TEXT, "uid": 10**9, "pid": 10**9, "error": "x" * MAX_TEXT, "tries": 10**9}] * LISTED
    message = status(
        *([worst] * report.MAX_ENGINES), slowest=[longest] * report.SLOWEST, refused=refused, log="x" * report.MAX_PLACE
    )
    assert len(encode_message(message)) <= MAX_MESSAGE_BYTES


def test_a_real_daemon_s_status_and_top(shared_daemon: Daemon) -> None:
    attached = FakeEngine(shared_daemon.socket, engine_id="shown", prefix="top")
    values = blocks("top", 8)
    attached.save(values)
    eventually(lambda: attached.load(list(values)), what="a hit")
    for name, outcome in (("given-up", Outcome.ABORTED), ("slow-one", Outcome.TIMED_OUT)):
        late = attached.hint(list(blocks("top-late", 3)), name=name)
        attached.settled(late)
        assert attached.move(late, records.FlagState.CANCELLED)
        began = time.monotonic_ns() - 80_000_000
        asked = records.Done(late[0], late[1], outcome, 0, 0, began, 80_000_000, 0, 0)
        attached.push(records.RecordKind.DONE, records.encode_done(asked))
        attached.flags.give_back(late[0])
    eventually(lambda: ask_daemon(shared_daemon.socket).slowest, what="the slow request")

    def waits() -> dict[Any, Any]:
        return {line["request_id"]: line["exposed_ms"] for line in shared_daemon.records("request.done")}

    eventually(lambda: {"given-up", "slow-one"} <= waits().keys(), what="the lines of both")
    waited = waits()
    assert waited["given-up"] >= 80, "its client left, which says nothing of us"

    def output(*arguments: str) -> str:
        done = kvprefetchd(*arguments, "--socket", shared_daemon.socket, COLUMNS="80")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def numbers() -> dict[str, Any] | None:
        said: dict[str, Any] = json.loads(output("status", "--json"))
        return said if said["engines"] and said["engines"][0]["fetched_blocks"] == 8 else None

    said = eventually(numbers, 30, "the engine's numbers")
    assert [each["request_id"] for each in said["slowest"]] == ["slow-one"]
    assert said["slowest"][0]["exposed_ms"] >= 80
    for text in (output("status"), output("top", "--once", "--interval", "0.2")):
        assert "shown" in text
        assert "slow-one" in text
        assert "timed_out" in text
        assert f"pid {shared_daemon.pid}" in text
        assert "store calls in flight" in text.splitlines()[0], "no line is cut or wrapped"
        assert text == "".join(line.rstrip() + "\n" for line in text.splitlines())
    assert "\nnow: 0.00 hints/s, fetching 0 B/s, " in output("top", "--interval", "0.2")


@pytest.mark.parametrize("end", ["interrupt", "q"])
def test_top_on_a_terminal_runs_until_it_is_interrupted_or_q_is_pressed(shared_daemon: Daemon, end: str) -> None:
    primary, secondary = os.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    command = [*COMMAND, "top", "--interval", "0.2", "--socket", str(shared_daemon.socket)]
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=secondary, stdout=secondary, stderr=subprocess.PIPE, env=environment)
    try:
        os.close(secondary)
        os.set_blocking(primary, False)
        text = b""

        def frames() -> bool:
            nonlocal text
            try:
                text += os.read(primary, 1 << 16)
            except BlockingIOError:
                pass
            return text.count(b"kvprefetchd") >= 3 and b"no engine is attached" in text

        eventually(frames, 30, "three frames, one of them after the last test's engine left the picture")
        if end == "q":
            os.write(primary, b"hq")
    finally:
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
        os.set_blocking(primary, True)
        ended_quietly(process)
        os.close(primary)


def test_top_ends_with_its_terminal(shared_daemon: Daemon) -> None:
    """Also where no SIGHUP comes, as below `su -c` or `kubectl exec`: an end of file is no key that was not pressed."""
    primary, secondary = os.openpty()
    command = [*COMMAND, "top", "--interval", "0.2", "--socket", str(shared_daemon.socket)]
    process = subprocess.Popen(command, stdin=secondary, stdout=secondary, stderr=subprocess.PIPE)
    try:
        os.close(secondary)
        assert os.read(primary, 1)
        os.close(primary)
        ended_quietly(process)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (86400 * 12.4, "12 d")],
)
def test_a_time_is_shown_in_the_largest_unit_of_which_it_has_two(seconds: float, text: str) -> None:
    assert overview.duration(seconds) == text
