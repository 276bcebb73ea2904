"""The log stops nobody: a reader that stalls, one that left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvprefetch.daemon.runtime.signals import Signals
from kvprefetch.daemon.telemetry.digest import Digest
from kvprefetch.daemon.telemetry.streams import LogWriter
from kvprefetch.shmring.wire.records import Done, FlagState, Outcome, RecordKind, encode_done
from tests.daemon.stores import blocks
from tests.support.auditor import ask_daemon
from tests.support.command import COMMAND, kvprefetchd, listening
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):
            os.close(fd)


def lines_in(fd: int) -> list[str]:
    """What a pipe holds now."""
    os.set_blocking(fd, False)
    data = b""
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(fd, 1 << 20):
            data += piece
    assert data == b"" or data.endswith(b"\n")
    return data.decode().splitlines()


def test_lines_wait_for_a_stalled_reader_and_keep_their_order(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1])
    sent = [f"{i} " + "x" * (i % 9000) for i in range(200)]  # more than a pipe holds, and lines above PIPE_BUF
    for line in sent:
        writer.write(line)
    received: list[str] = []

    def collect_all() -> None:
        with open(pipe[0], closefd=False) as file:
            received.extend(file.read().splitlines())

    collect = threading.Thread(target=collect_all)
    collect.start()
    writer.drain(30)
    os.close(pipe[1])
    collect.join()
    assert received == sent
    assert writer.take_lost() == 0


def test_beyond_the_bound_lines_are_lost_and_counted_once_others_get_through(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1], limit_bytes=100_000)
    for i in range(3000):
        writer.write(f"{i:04} " + "x" * 94)  # 300 kB; the pipe takes 64 KiB, the memory 100 kB
    assert writer.take_lost() == 0, "nobody reads yet"
    received = []
    while more := lines_in(pipe[0]):
        received += more
        writer.tick()
    assert [int(line[:4]) for line in received] == list(range(len(received)))
    assert 1500 <= len(received) < 1800
    assert writer.take_lost() == 3000 - len(received)
    assert writer.take_lost() == 0
    writer.write("again")
    assert lines_in(pipe[0]) == ["again"]


def test_a_reader_that_left_costs_nothing(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1])
    os.close(pipe[0])
    for _ in range(1000):
        writer.write("nobody reads this")
    writer.drain(5)
    assert writer.take_lost() == 0, "nobody would read that line either"
    assert writer.dropped_lines == 1000


def serve(tmp_path: Path, stdout: int, stderr: int | None = None) -> subprocess.Popen[bytes]:
    options = ["--socket", str(tmp_path / "s"), "--metrics-port", "0", "--memory", "64MiB", "--staging", "1MiB"]
    process = subprocess.Popen([*COMMAND, "serve", *options], stdout=stdout, stderr=stderr)
    eventually(lambda: listening(tmp_path / "s"), 60, "the socket")
    return process


@pytest.mark.store
def test_a_daemon_whose_log_nobody_reads_serves_on_and_tells_it_all_later(tmp_path: Path) -> None:
    process = serve(tmp_path, subprocess.PIPE)
    assert process.stdout is not None
    try:
        engine = FakeEngine(tmp_path / "s")
        for i in range(300):  # about 700 bytes each, 64 KiB fit the pipe
            assert engine.load(list(blocks("stalled", 1)), name=f"r{i}") is None
        engine.push(RecordKind.HINT, b"short")
        assert ask_daemon(tmp_path / "s").engines
        engine.close()
        process.terminate()
        records = [json.loads(line) for line in process.stdout if line.startswith(b"{")]
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert [each["request_id"] for each in records if each["event"] == "request.done"] == [f"r{i}" for i in range(300)]
    assert records[-1]["event"] == "daemon.stopped"


@pytest.mark.store
def test_a_daemon_outlives_the_reader_of_its_log(tmp_path: Path) -> None:
    process = serve(tmp_path, subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.close()
        engine = FakeEngine(tmp_path / "s")
        for i in range(3):
            assert engine.load(list(blocks("left", 1)), name=f"r{i}") is None
        engine.close()
        assert process.poll() is None
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.store
def test_a_signal_in_the_middle_of_a_line_stops_nobody(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler runs on the thread that writes, wherever that is."""
    writer = LogWriter(pipe[1])
    signals, write = Signals(), os.write

    def interrupted(fd: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        signals.note(signal.SIGTERM)
        return write(fd, data)

    monkeypatch.setattr(os, "write", interrupted)
    writing = threading.Thread(target=writer.write, args=("a line",), daemon=True)
    writing.start()
    writing.join(5)
    assert not writing.is_alive()
    assert (lines_in(pipe[0]), signals.stop) == (["a line"], signal.SIGTERM)


@pytest.mark.store
def test_a_daemon_whose_standard_error_nobody_reads_starts_serves_and_stops(
    pipe: tuple[int, int], tmp_path: Path
) -> None:
    """Mooncake writes there in the middle of its calls, with the interpreter's lock held in some."""
    filler = os.open(f"/proc/self/fd/{pipe[1]}", os.O_WRONLY | os.O_NONBLOCK)

    def fill() -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(filler, b"x")

    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096)
    fill()
    process = serve(tmp_path, subprocess.DEVNULL, pipe[1])
    try:
        fill()
        engine = FakeEngine(tmp_path / "s")
        engine.save(blocks("full", 3))
        eventually(lambda: engine.load(list(blocks("full", 3))), what="a hit")
        engine.close()
        process.terminate()
        assert process.wait(20) == 0
        assert os.get_blocking(pipe[1]), "who shares the pipe notices nothing"
    finally:
        process.kill()
        process.wait()
        os.close(filler)


def renamed(log: Path, pid: int, count: int) -> None:
    log.rename(log.with_name(f"log.{count}"))
    os.kill(pid, signal.SIGHUP)


def rotated(log: Path, pid: int, count: int) -> None:
    """Let logrotate do it, by the file that install-unit writes, but for its owner and the way to this daemon."""
    if shutil.which("logrotate") is None:
        pytest.skip("logrotate is not installed")
    text = (Path(__file__).parents[3] / "systemd/kvprefetchd.logrotate").read_text()
    for before, after in (
        ("/var/log/kvprefetch/*.log", str(log)),
        (" kvprefetch kvprefetch\n", "\n"),
        ("systemctl reload kvprefetchd.service", f"kill -HUP {pid}"),
        ("    delaycompress\n", "    start 9\n    delaycompress\n"),
    ):
        assert before in text
        text = text.replace(before, after)
    rules = log.with_name("rules")
    rules.write_text(text)
    rules.chmod(0o644)
    command = ["logrotate", "--force", "--state", str(log.with_name("state")), str(rules)]
    subprocess.run(command, check=True, timeout=30)
    log.with_name("log.9").rename(log.with_name(f"log.{count}"))


@pytest.mark.store
@pytest.mark.parametrize("rotate", [renamed, rotated])
def test_a_rotation_loses_and_tears_no_line(tmp_path: Path, rotate: Callable[[Path, int, int], None]) -> None:
    """By a rename and SIGHUP, while requests end; standard error is in the same file. What cannot be opened is said."""
    log = tmp_path / "log"
    with log.open("ab") as file:
        process = serve(tmp_path, file.fileno(), file.fileno())
    try:
        engine = FakeEngine(tmp_path / "s")
        for i in range(200):
            assert engine.load(list(blocks("rotated", 1)), name=f"r{i}") is None
            if i % 50 == 25:
                rotate(log, process.pid, i // 50)
        engine.close()
        eventually(lambda: "config.read" in log.read_text(), what="the last file's first line")
        assert ask_daemon(tmp_path / "s").log == str(log)
        log.rename(tmp_path / "log.4")
        log.mkdir()
        os.kill(process.pid, signal.SIGHUP)
        eventually(lambda: "log.kept" in (tmp_path / "log.4").read_text(), what="the reason")
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    texts = [(tmp_path / f"log.{number}").read_text() for number in range(5)]
    assert all(text.endswith("\n") for text in texts)
    records = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
    assert [each["request_id"] for each in records if each["event"] == "request.done"] == [f"r{i}" for i in range(200)]
    assert [each["event"] for each in records][-1] == "daemon.stopped"


@pytest.mark.store
def test_status_sums_up_the_log_over_a_restart(tmp_path: Path) -> None:
    """What was saved is what computing the loaded blocks takes, less what the scheduler waited, in every start.

    A file that was rotated counts as far as the time reaches.
    """
    log = tmp_path / "log"
    for start in (1, 2):
        if start == 2:
            log.rename(tmp_path / "log.1")
        with log.open("ab") as file:
            process = serve(tmp_path, file.fileno(), file.fileno())
        try:
            engine = FakeEngine(tmp_path / "s")
            key = engine.hint(list(blocks("spared", 3)), name="measured")
            engine.settled(key)
            assert engine.move(key, FlagState.CANCELLED)
            times = (time.monotonic_ns() - 10**9, 500_000_000, 0, 0)
            done = Done(*key, Outcome.LOADED, 0, 3, *times, spared_ns=1_700_000_000)
            engine.push(RecordKind.DONE, encode_done(done))
            engine.flags.give_back(key[0])
            eventually(lambda: '"measured"' in log.read_text(), what="its line")
            if start == 2:
                asked = ["status", "--since", "10m", "--socket", tmp_path / "s"]
                said, data = kvprefetchd(*asked), json.loads(kvprefetchd(*asked, "--json").stdout)
                since = json.loads(log.read_text().splitlines()[-1])["ts"]
                later = json.loads(kvprefetchd(*asked[:2], since[:26], *asked[3:], "--json").stdout)
            engine.close()
        finally:
            process.terminate()
            assert process.wait(30) == 0
    for figures in (data["since"], data["whole_log"]):
        assert [figures[name] for name in ("saved_s", "spared_s", "waited_s")] == [2.4, 3.4, 1.0]
        assert figures["requests"] == {"loaded": 2}
    assert (later["since"]["requests"], later["whole_log"]["saved_s"]) == ({"loaded": 1}, 1.2)
    assert said.stdout.count("to compute what they loaded takes 3.40 s, and they waited 1.00 s") == 2
    assert "2 × " in said.stdout
    assert " daemon.ready " in said.stdout


def test_what_went_wrong_is_shown_before_what_is_usual() -> None:
    """However rare it is; fields of 0 say nothing."""
    digest = Digest()
    usual = ["daemon.ready", "config.read", "config.changed", "engine.attached", "engine.detached", "daemon.stopping"]
    for event in (*usual * 3, "daemon.stopped", "daemon.idle", "store.failed", "store.failed", "master.died"):
        digest.add({"ts": "2026-01-02T03:04:05.678901Z", "level": "?", "event": event, "pid": 7, "orders": 0})
    worst, bad, *others = digest.lines()[2:]
    assert (worst[:4], worst.split()[5], worst.split()[-1]) == ("1 × ", "master.died", "pid=7")
    assert bad.startswith("2 × ")
    assert len(others) == 6
    assert digest.saved().startswith("saved 0.00 s in 0 requests")
    digest.add({"ts": "2026", "event": "request.done", "exposed_ms": 0.5})
    assert digest.saved().startswith("saved 0.00 s in 1 requests"), "never -0.00"


@pytest.mark.store
def test_last_words_whose_reader_left_change_no_exit_status(pipe: tuple[int, int], tmp_path: Path) -> None:
    os.close(pipe[0])
    (tmp_path / "s").mkdir()
    command = [*COMMAND, "serve", "--socket", str(tmp_path / "s")]
    assert subprocess.run(command, stderr=pipe[1], timeout=30, check=False).returncode == 78
