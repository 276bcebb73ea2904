"""Starting a daemon: its options and surroundings, its log, its last words, the next start."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.connector.attach import starter
from kvprefetch.connector.attach.link import PATIENCE_S
from kvprefetch.connector.attach.starter import Starter
from tests.connector.test_link import linked
from tests.support.waiting import eventually

Play = Callable[[str], Path]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Puts a program in the daemon's place, which notes each start in a file; returns that file."""

    def put(body: str) -> Path:
        starts, script = tmp_path / "starts", tmp_path / "played.py"
        script.write_text(
            "import json, os, sys\n"
            "if sys.argv[1] == 'check-config':\n"
            "    print(json.dumps({'keys': {'socket': {'value': sys.argv[-1][9:]}, 'disk': {'value': None}}}))\n"
            "    sys.exit(0)\n"
            "seen = [sys.argv[1:], dict(os.environ), os.getpgid(0), os.getpid(), os.getppid()]\n"
            f"open({str(starts)!r}, 'a').write(json.dumps(seen) + chr(10))\n{body}\n"
        )
        monkeypatch.setattr(starter, "COMMAND", (sys.executable, str(script)))
        return starts

    return put


def starts_in(file: Path) -> list[list[Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_the_daemon_gets_the_options_and_is_no_part_of_the_engine(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither Ctrl-C, nor the end of the engine's processes, nor the engine's GPUs or unit are the daemon's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    monkeypatch.setenv("KVPREFETCHD_LOG_LEVEL", "debug")
    file = play("")
    Starter({"disk": "/x:1GiB", "save_share": 0.5, "allow_uids": [1, 2]}, "/s").start()
    [(words, environ, group, pid, parent)] = eventually(lambda: starts_in(file))
    assert words == ["serve", "--disk=/x:1GiB", "--save-share=0.5", "--allow-uids=1,2", "--socket=/s"]
    assert {"CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET"} & environ.keys() == set()
    assert environ["KVPREFETCHD_DISK"] == "auto"
    assert (environ["KVPREFETCHD_EXIT_IDLE_S"], environ["KVPREFETCHD_LOG_LEVEL"]) == ("10", "debug")
    assert group == pid
    assert parent != os.getpid()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_an_engine_that_is_bound_to_one_core_does_not_bind_the_daemon(play: Play, tmp_path: Path) -> None:
    cores = tmp_path / "cores"
    play(f"open({str(cores)!r}, 'w').write(str(len(os.sched_getaffinity(0))))")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        Starter({}, "/s").start()
    finally:
        os.sched_setaffinity(0, before)
    eventually(lambda: cores.exists() and cores.read_text())
    assert int(cores.read_text()) >= 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dsk": "/x"}, "No such option '--dsk'"),
        ({"memory": "lots"}, "memory: should be a size such as 512MiB, 4GB or 65536: memory='lots'"),
        ({"help": True}, "help"),
    ],
)
def test_options_that_the_daemon_refuses_are_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config: start_daemon: ") as caught:
        Starter(options, "/s")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_its_log_is_a_file_and_its_last_words_are_an_error_once(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """One daemon at a time, at most one start in AGAIN_S. Words are the daemon's own, not Mooncake's, nor of a log
    before it; one that found another daemon there says nothing."""
    monkeypatch.setattr(starter, "AGAIN_S", 0.4)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = tmp_path / "kvprefetch/d.log"
    log.parent.mkdir()
    log.touch(0o600)
    log.write_text("kvprefetchd: of another day\n")
    lines = ["kvprefetchd: socket: another daemon is serving", "F1122 Mooncake"]
    file = play(f"for line in {lines!r}: print(line)")
    made, began = Starter({}, "/s/d.sock"), time.monotonic()
    with caplog.at_level(logging.INFO, "vllm.kvprefetch.daemon"):
        eventually(lambda: [made.start(), len(starts_in(file)) >= 2][1])
        assert [record for record in caplog.records if record.levelno > logging.INFO] == []
        for last, said in (
            ("kvprefetchd: disk: no", "disk: no"),
            ("F1122 Mooncake", "stopped or killed, or it crashed"),
        ):
            lines[:] = [json.dumps({"level": "warning", "event": "disk.small"}), last]
            before = len(starts_in(play(f"for line in {lines!r}: print(line)")))
            eventually(lambda: [made.start(), len(starts_in(file)) >= before + 3][1])  # noqa: B023
            [error] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
            assert said in error
            assert error.endswith(f"Its log: {log}")
            caplog.clear()
    assert time.monotonic() - began >= 1.6
    assert log.read_text().count("disk.small") >= 3
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_large_log_is_put_aside_at_a_start(play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(starter, "LOG_BYTES", 10)
    monkeypatch.setattr(starter, "AGAIN_S", 0.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = play("print('a line of some length')")
    made = Starter({}, "/s/d.sock")
    eventually(lambda: [made.start(), len(starts_in(file)) >= 3][1])
    eventually(lambda: sorted(each.name for each in (tmp_path / "kvprefetch").iterdir()) == ["d.log", "d.log.1"])


def test_the_log_of_a_user_without_a_home_is_beside_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    assert starter.log_file("/tmp/kvprefetch-7/kvprefetchd.sock") == "/tmp/kvprefetch-7/kvprefetchd.log"


def test_a_daemon_that_runs_is_not_started_again(play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(starter, "AGAIN_S", 0.0)
    end = tmp_path / "end"
    file = play(f"import time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.01)")
    made = Starter({}, "/s")
    for _ in range(20):
        made.start()
        time.sleep(0.01)
    eventually(lambda: starts_in(file))
    assert len(starts_in(file)) == 1
    end.touch()
    eventually(lambda: [made.start(), len(starts_in(file)) > 1][1])


def test_an_engine_s_start_waits_for_its_daemon_only_while_that_may_come(play: Play, tmp_path: Path) -> None:
    play("print('kvprefetchd: disk: no')")
    path, began = str(tmp_path / "s"), time.monotonic()
    with linked(path, start=Starter({}, path).start) as link:
        link.wait()
    assert time.monotonic() - began < PATIENCE_S / 2


def test_an_environment_without_the_daemons_packages_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "structlog.py").write_text("raise ModuleNotFoundError(name='structlog')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match="structlog is not installed here") as caught:
        Starter({}, str(tmp_path / "s.sock"))
    assert "pip install '.[daemon-cpu]'" in str(caught.value)
