"""`kvprefetchd tail`: filters, foreign lines, rotation, truncation, the journal, readers that leave."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import threading
import time
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO, Any

import pytest

from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.telemetry import board, reader
from tests.support.command import COMMAND, ended_quietly, kvprefetchd, one_line
from tests.support.waiting import eventually

TAIL = [*COMMAND, "tail"]


def record(event: str = "request.done", **fields: Any) -> dict[str, Any]:
    return {"ts": "2026-01-02T03:04:05.678901Z", "level": "info", "event": event, "run_id": "r", **fields}


LOG = [
    record("daemon.ready", socket="/s", pid=1, staging=5),
    record(engine="alpha", request_id="one", outcome="loaded", exposed_ms=12.0, hidden_fraction=0.5),
    record(engine="beta", request_id="two", outcome="miss", exposed_ms=250.0, hidden_fraction=0.0),
    record("record.bad", engine="beta", error="kind=7", count=1) | {"level": "warning"},
]


def written(path: Path, *lines: object) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text)
    return path


def tail(*arguments: str, given: bytes = b"", **environ: str) -> CompletedProcess[str]:
    return kvprefetchd("tail", *arguments, given=given, **environ)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([], ["daemon.ready", "one", "two", "record.bad"]),
        (["--event", "request.*"], ["one", "two"]),
        (["--event", "daemon.ready", "--event", "record.bad"], ["daemon.ready", "record.bad"]),
        (["--request", "wo"], ["two"]),  # vLLM puts cmpl- before the id that its client knows
        (["--engine", "beta"], ["two", "record.bad"]),
        (["--engine", "beta", "--event", "request.done"], ["two"]),
        (["--level", "warning"], ["record.bad"]),
        (["--slow", "100"], ["two"]),
        (["-n", "1"], ["record.bad"]),
        (["-n", "1", "--event", "request.*"], ["two"]),
        (["-n", "2", "--slow", "1"], ["one", "two"]),
        (["-n", "0"], []),
    ],
)
def test_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str], filters: list[str], expected: list[str]) -> None:
    assert main(["tail", str(written(tmp_path / "log", "not ours", *LOG)), "--json", *filters]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("request_id", line["event"]) for line in lines] == expected


def at(seconds_ago: float) -> str:
    """A time as the log has it."""
    return datetime.fromtimestamp(time.time() - seconds_ago, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--since", "10m"], ["recent", "now"]),
        (["--since", "2h", "--until", "5m"], ["hour", "recent"]),
        (["--until", "30m"], ["old", "hour"]),
        (["--since", "1d", "-n", "1"], ["now"]),
        (["--since", at(3700)[:19]], ["hour", "recent", "now"]),
        (["--until", "2026-01-31"], ["old"]),
    ],
)
def test_times(tmp_path: Path, capsys: pytest.CaptureFixture[str], filters: list[str], expected: list[str]) -> None:
    times = {"old": "2026-01-30T23:59:59.999999Z", "hour": at(3600), "recent": at(500), "now": at(0)}
    lines = [record(request_id=name) | {"ts": text} for name, text in times.items()]
    assert main(["tail", str(written(tmp_path / "log", "not ours", *lines)), "--json", *filters]) == 0
    assert [json.loads(line)["request_id"] for line in capsys.readouterr().out.splitlines()] == expected


def test_an_event_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = str(written(tmp_path / "log", *LOG))
    mistyped = tail(path, "--event", "request.dnoe", "--event", "daemon.*")
    assert mistyped.stderr == "kvprefetchd: note: no event has the name 'request.dnoe'; did you mean request.done?\n"
    assert len(mistyped.stdout.splitlines()) == 1


def test_foreign_lines_are_passed_on_harmlessly_and_left_out_by_a_filter(tmp_path: Path) -> None:
    foreign = ["Traceback (most recent call last):", '{"event": 7}', "[1, 2]", "{broken", "\x1b[31mred", ""]
    path = written(tmp_path / "log", *foreign, LOG[1])
    lines = tail(str(path)).stdout.splitlines()
    assert lines[:4] == foreign[:4]
    assert lines[4] == "\N{REPLACEMENT CHARACTER}[31mred"
    assert "one loaded:" in lines[6]
    assert len(tail(str(path), "--level", "debug").stdout.splitlines()) == 1


def test_a_line_of_strange_values_is_shown_and_harms_nothing(tmp_path: Path) -> None:
    """Another release's line, or another program's: the ones after it are read all the same."""
    strange: list[Any] = ["x", [1], None, float("nan"), float("inf"), 10**400, {"a": 1}]
    names = ("bytes", "hidden_fraction", "exposed_ms", "hint_seen_ms", "last_byte_ms", "hint_blocks", "request_id")
    lines = [record(**dict.fromkeys(names, value)) for value in strange]
    hostile = record(engine="\x1b[31m", request_id="\ud800") | {"level": "\x1b[1m", "ts": "\x1b]0;x\x07"}
    path = written(tmp_path / "log", *lines, hostile, LOG[2])
    shown = tail(str(path))
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) == len(lines) + 2
    assert "\x1b" not in shown.stdout
    assert shown.stdout.splitlines()[-1].startswith(
        "01-02 03:04:05.678 info    request.done     beta         two miss:"
    )
    assert len(tail(str(path), "--slow", "100", "--json").stdout.splitlines()) == 1


@pytest.mark.parametrize("before", ["<4>", "(EngineCore pid=7) WARNING 11-26 03:38:52 [starter.py:99] kvprefetchd: "])
def test_standard_input_and_lines_behind_a_journal_s_priority_or_in_an_engine_s_log_are_read(before: str) -> None:
    line = before.encode() + json.dumps(LOG[3]).encode() + b"\n\xff\xfe\n"
    assert "record.bad" in tail(given=line).stdout
    assert "record.bad" in tail("-", "--level", "warning", given=line).stdout


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["/nonexistent/log"], 69, ["/nonexistent/log", "No such file"]),
        (["-f", "/nonexistent/log"], 69, ["/nonexistent/log", "No such file"]),
        (["--level", "loud"], 78, ["--level", "'loud'", "warning"]),
        (["-n", "-3"], 78, ["-n"]),
        (["-n", "x"], 78, ["-n", "'x'", "not a valid integer"]),
        (["--slow", "much"], 78, ["--slow", "'much'", "not a valid float"]),
        (["--slow", "nan"], 78, ["--slow", "'nan'"]),
        (["--since", "10 minutes"], 78, ["--since", "'10 minutes'", "10m", "2026-01-31T03:10"]),
        (["log", "--journal"], 78, ["FILE='log'", "--journal"]),
    ],
)
def test_bad_use_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: list[str]
) -> None:
    assert main(["tail", *arguments]) == status
    said = capsys.readouterr().err
    assert one_line(said)
    for word in words:
        assert word in said


def test_a_pipe_is_read_to_its_end_after_the_first_interrupt() -> None:
    """Ctrl-C in `kvprefetchd serve | kvprefetchd tail` reaches both, and the daemon still has its last lines."""
    for interrupts in (1, 2):
        process = subprocess.Popen([*TAIL, "-f", "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        with process, process.stdin as given, process.stdout as shown:
            given.write(json.dumps(LOG[0]).encode() + b"\n")
            given.flush()
            assert json.loads(shown.readline()) == LOG[0]
            for _ in range(interrupts):
                assert process.poll() is None
                process.send_signal(signal.SIGINT)
                eventually(lambda pid=process.pid: not pending(pid), what="the signal's delivery")
            if interrupts == 1:
                given.write(json.dumps(LOG[1]).encode() + b"\n")
                given.close()
                assert json.loads(shown.readline()) == LOG[1]
            assert process.wait(30) == 0


def pending(pid: int) -> bool:
    """Whether a signal waits for the process, or its handler has not returned yet."""
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["ShdPnd"], 16) != 0 or not fields["State"].startswith(("S", "Z"))


# --- following ----------------------------------------------------------------------------------------------------


def test_the_last_lines_are_shown(tmp_path: Path) -> None:
    """Also where a line has no end, or more than a program should keep."""
    path = tmp_path / "log"
    path.write_text("1\n2\n3")
    for last, lines in ((0, ""), (1, "3\n"), (2, "2\n3\n"), (9, "1\n2\n3\n")):
        assert tail("-n", str(last), str(path)).stdout == lines
        assert tail("-n", str(last), given=path.read_bytes()).stdout == lines
    path.write_bytes(b"x" * (3 << 20) + b"\nlast\n")
    found = [line or b"" for line in islice(reader.follow(path), 6)]
    assert [max(map(len, found)), *found[-2:]] == [reader.MAX_LINE_BYTES, b"last\n", b""]


def test_following_as_a_process_until_it_is_interrupted(tmp_path: Path) -> None:
    """From the last lines that the filter lets through, and on over a rename and a cut: no line twice, none missing."""
    path = written(tmp_path / "log", *LOG, *[LOG[0]] * 20)
    command = [*TAIL, "-f", str(path), "--json", "--event", "request.done", "-n", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    names: list[str] = []
    assert process.stdout is not None

    def collect(out: IO[bytes]) -> None:
        names.extend(json.loads(line)["request_id"] for line in iter(out.readline, b""))

    def put(name: str, where: Path = path, begin: str = "", end: str = "\n") -> None:
        with where.open("a") as file:
            file.write(begin + json.dumps(record(request_id=name)) + end)

    def shown(*expected: str) -> None:
        eventually(lambda: len(names) >= len(expected), 30, "the lines")
        assert names == list(expected)

    collecting = threading.Thread(target=collect, args=(process.stdout,))
    collecting.start()
    try:
        shown("two")
        put("before")
        shown("two", "before")
        old = tmp_path / "log.1"
        path.rename(old)
        path.touch()  # as logrotate's `create`; the daemon is still in the old file
        put("late", old, end="")
        time.sleep(2 * reader.LOOK_S)
        put("last of the old", old, begin="\n")
        put("first of the new")
        shown("two", "before", "late", "last of the old", "first of the new")
        os.truncate(path, 0)
        time.sleep(2 * reader.LOOK_S)
        put("after the cut")
        shown("two", "before", "late", "last of the old", "first of the new", "after the cut")
    finally:
        process.send_signal(signal.SIGINT)
        ended_quietly(process)
        collecting.join()
        process.stdout.close()


def test_a_time_before_the_file_is_found_in_those_that_were_rotated(tmp_path: Path) -> None:
    """As logrotate names and packs them, but none that ended before; without a time the file alone is read."""
    packed, log = tmp_path / "log.3.gz", tmp_path / "log"
    packed.write_bytes(gzip.compress((json.dumps(record(engine="packed") | {"ts": at(300)}) + "\n").encode()))
    for name, name_of_time in (("log.2", 200), ("log.1", 100), ("log", 0)):
        written(tmp_path / name, record(engine=name) | {"ts": at(name_of_time)})
    written(tmp_path / "log.4", record(engine="old") | {"ts": at(400)})
    os.utime(tmp_path / "log.4", (time.time() - 400,) * 2)

    def engines(*options: str) -> list[str]:
        return [json.loads(line)["engine"] for line in tail("--json", *options, str(log)).stdout.splitlines()]

    assert engines("--since", "150s") == ["log.1", "log"]
    assert engines("--since", "350s") == ["packed", "log.2", "log.1", "log"]
    assert engines() == ["log"]
    with packed.open("r+b") as file:
        file.truncate(20)
    assert engines("--since", "350s") == ["log.2", "log.1", "log"]


@pytest.mark.store
def test_where_nothing_is_piped_the_log_of_the_daemon_here_is_read(tmp_path: Path) -> None:
    """On a terminal and in a script, also after it was killed; one whose log is in no file is named."""
    socket, log = tmp_path / "s", tmp_path / "kv.log"
    options = ["--socket", str(socket), "--metrics-port", "0", "--memory", "64MiB", "--staging", "1MiB"]
    environ = {**os.environ, "KVPREFETCHD_SOCKET": str(socket)}
    ours, theirs = os.openpty()
    try:
        with log.open("ab") as file, subprocess.Popen([*COMMAND, "serve", *options], stdout=file) as daemon:
            eventually(lambda: b"daemon.ready" in log.read_bytes(), 60, "the daemon")
            said = subprocess.run(TAIL, stdin=theirs, env=environ, capture_output=True, timeout=60, check=True)
            assert b" daemon.ready " in said.stdout
            said = subprocess.run(TAIL, stdin=subprocess.DEVNULL, env=environ, capture_output=True, timeout=60)
            assert b" daemon.ready " in said.stdout
            daemon.kill()
        dead = [*TAIL, "--event", "daemon.ready", "--json"]
        said = subprocess.run(dead, stdin=theirs, env=environ, capture_output=True, timeout=60, check=True)
        assert json.loads(said.stdout)["socket"] == str(socket)
    finally:
        Path(f"/dev/shm{board.name_of(socket)}").unlink()
    nothing = subprocess.run(TAIL, stdin=theirs, env=environ, capture_output=True, timeout=60, check=False)
    assert (nothing.returncode, b"no daemon answers" in nothing.stderr) == (78, True)
    os.close(ours), os.close(theirs)


# --- the journal --------------------------------------------------------------------------------------------------


def planted_journal(folder: Path, *records: dict[str, Any]) -> str:
    """Put a journalctl into the folder that answers like the real one; returns the PATH to find it with.

    No journal can be written to without booting systemd.
    """
    lines = [json.dumps(each) for each in records]
    program = folder / "journalctl"
    more = 'case "$*" in *--show-cursor*) echo "-- cursor: s=1;i=2";; esac'
    once = 'case "$*" in *--follow*) exit;; esac'
    script = ["#!/bin/sh", f'echo "$@" >> {folder}/arguments', once, "cat <<'END'", *lines, "END", more, ""]
    program.write_text("\n".join(script))
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_the_journal_is_asked_for_the_unit(tmp_path: Path) -> None:
    """To follow it, twice: for what is there, as -n counts behind the filter, and from there on."""
    filters = ("--journal", "other.service", "-n", "1", "-f", "--event", "request.done", "--since", "1970-01-02")
    result = tail(*filters, "--json", PATH=planted_journal(tmp_path, *LOG))
    assert result.returncode == 0
    assert [json.loads(line)["request_id"] for line in result.stdout.splitlines()] == ["two"]
    same = "--quiet --no-pager --output=cat --unit=other.service"
    asked = [f"{same} --since=@86400 --show-cursor", f"{same} --follow --no-tail --after-cursor=s=1;i=2"]
    assert (tmp_path / "arguments").read_text().splitlines() == asked


@pytest.mark.parametrize(
    ("command", "status"), [("tail --journal", 69), ("explain x --journal", 69), ("tail --journal --since 1h", 0)]
)
def test_a_journal_without_entries_is_reported(tmp_path: Path, command: str, status: int) -> None:
    """The real journalctl prints nothing for a unit that does not exist."""
    result = kvprefetchd(*command.split(), PATH=planted_journal(tmp_path))
    said = "kvprefetchd: the journal of kvprefetchd.service has no entries: " if status else ""
    assert (result.returncode, result.stderr[: len(said)], bool(result.stderr)) == (status, said, bool(said))


def test_without_journalctl_it_says_so(tmp_path: Path) -> None:
    result = tail("--journal", PATH=str(tmp_path))
    assert result.returncode == 69
    assert "journalctl" in result.stderr
    assert one_line(result.stderr)
