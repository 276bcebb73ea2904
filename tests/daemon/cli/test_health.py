"""`kvprefetchd health` and `status --wait`: one line and 0 or 1, for start scripts and probes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from kvprefetch.shmring.wire.admin import Status
from tests.daemon.stores import blocks
from tests.lab.daemon import Daemon
from tests.lab.process import descendants, frozen
from tests.support.auditor import ask_daemon
from tests.support.command import COMMAND, kvprefetchd, one_line
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually


def test_without_a_daemon_it_is_one_line_and_1(tmp_path: Path) -> None:
    """No daemon is "not ready", with the reason and the advice, after as long as was asked for."""
    result = kvprefetchd("health", "--socket", tmp_path / "none.sock", "--wait", 0.5)
    assert (result.returncode, result.stderr) == (1, "")
    assert one_line(result.stdout)
    assert result.stdout.startswith("not ready: no daemon answers")
    assert "start it" in result.stdout
    answer = kvprefetchd("health", "--json", "--socket", tmp_path / "none.sock")
    assert answer.returncode == 1
    assert json.loads(answer.stdout)["ready"] is False
    assert kvprefetchd("health", "--alive", "--socket", tmp_path / "none.sock").returncode == 1
    assert kvprefetchd("status", "--socket", tmp_path / "none.sock", "--wait", 0.5).returncode == 69


def test_both_wait_for_a_daemon_that_starts(serve: Callable[..., Daemon], tmp_path: Path) -> None:
    """`--wait` returns when the daemon is there, long before its time is up."""
    options = ["--wait", "300", "--socket", str(tmp_path / "s.sock")]
    waiting = [
        subprocess.Popen([*COMMAND, name, *options], stdout=subprocess.PIPE, text=True) for name in ("health", "status")
    ]
    daemon = serve(socket=tmp_path / "s.sock")
    said = [child.communicate(timeout=60)[0] for child in waiting]
    assert [child.returncode for child in waiting] == [0, 0]
    assert said[0] == f"ready: pid {daemon.pid}, mode on, engines 0\n"
    assert f"pid {daemon.pid}" in said[1]


def test_a_store_that_does_not_answer_is_named(serve: Callable[..., Daemon]) -> None:
    """With a frozen master the daemon is not ready, as /readyz says.

    tests/daemon/telemetry/test_board.py has a daemon that hangs.
    """
    daemon = serve(extra=("--rpc-timeout-ms", "200", "--call-timeout-ms", "500"))
    (master,) = descendants(daemon.pid)

    def status() -> Status:
        return ask_daemon(daemon.socket)

    engine = FakeEngine(daemon.socket)
    with frozen(master):
        engine.hint(list(blocks("asked", 2)), name="asked")
        eventually(lambda: not status().ready, timeout_s=60, what="the store's silence")

        def silent() -> str | None:
            result = kvprefetchd("health", "--socket", daemon.socket)
            return result.stdout if result.returncode == 1 else None

        said = eventually(silent, 30, "a picture of it")
        assert one_line(said)
        assert "the store does not answer" in said
        alive = kvprefetchd("health", "--alive", "--socket", daemon.socket)
        assert (alive.returncode, alive.stdout.split(":")[0]) == (0, "alive"), "a restart would not bring the store"
    eventually(lambda: status().ready, timeout_s=60, what="the store's return")
    at = ("--socket", str(daemon.socket))
    eventually(lambda: json.loads(kvprefetchd("health", "--json", *at).stdout)["ready"], 30, "a picture of it")
