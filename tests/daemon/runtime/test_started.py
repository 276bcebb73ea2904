"""A daemon that engines start: exactly one, which outlives its starter, comes back, and ends with the last engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvprefetch.connector import starter
from kvprefetch.connector.link import Link
from kvprefetch.connector.session import SchedulerSession
from kvprefetch.connector.starter import Starter
from kvprefetch.daemon.runtime.service import FIRST_NS, Idle
from tests.daemon.stores import blocks
from tests.lab.daemon import Daemon
from tests.lab.process import OWN_GROUP
from tests.support import auditor as audit
from tests.support.auditor import Auditor, ask_daemon
from tests.support.engine_side import EngineSpec
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

OPTIONS = {"memory": "64MiB", "staging": "1MiB", "exit_idle_s": 1}
# The scheduler's process of an engine, as far as it starts a daemon: its log is on standard error.
ENGINE = """
import json, logging, sys, time
from kvprefetch.connector.starter import Starter
logging.basicConfig(level=logging.INFO)
Starter(json.loads(sys.argv[2]), sys.argv[1]).start()
time.sleep(600)
"""
S = 1_000_000_000


def test_without_an_engine_it_ends_after_a_while_and_at_first_after_a_minute() -> None:
    idle = Idle(10, 0)
    assert not idle.over(FIRST_NS - 1, engines=False)
    assert idle.over(FIRST_NS, engines=False)
    assert not idle.over(61 * S, engines=True)
    assert not idle.over(71 * S - 1, engines=False)
    assert idle.over(71 * S, engines=False)
    assert Idle(600, 0).over(599 * S, engines=False) is False
    assert Idle(0, 0).over(10**6 * S, engines=False) is False


def test_it_ends_in_order_once_its_last_engine_has_ended(serve: Callable[..., Daemon]) -> None:
    daemon = serve(extra=("--exit-idle-s", "1"))
    engines = [FakeEngine(daemon.socket, engine_id=name) for name in "ab"]
    engines[0].close()
    assert daemon.wait_record("daemon.idle", timeout_s=3) is None
    engines[1].close()
    assert daemon.wait_exit() == 0
    assert [line["idle_s"] for line in daemon.records("daemon.idle")] == [1]
    assert daemon.records("daemon.stopped")
    assert not daemon.socket.exists()


@pytest.fixture
def place(auditor: Auditor) -> Iterator[Path]:
    """A path for a control socket, in a folder that must be empty at the end."""
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
        path = Path(folder) / "d.sock"
        audit.SOCKETS.add(path)
        yield path
        eventually(lambda: os.listdir(folder) == [], 30, lambda: os.listdir(folder))


@contextlib.contextmanager
def engine_process(place: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", ENGINE, str(place), json.dumps(OPTIONS)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **OWN_GROUP) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def servers() -> list[int]:
    return [pid for pid, command in audit.our_processes().items() if " kvprefetch.daemon serve " in command]


def answering(place: Path) -> int:
    """The pid of the daemon that answers there."""
    with contextlib.suppress(OSError):
        return ask_daemon(place).pid
    return 0


@pytest.mark.store
def test_two_engines_start_one_daemon_which_outlives_both_and_ends_with_the_last(place: Path, auditor: Auditor) -> None:
    """The one that came second says nothing of it; a killed engine's whole process group leaves the daemon alone."""
    with engine_process(place) as first, engine_process(place) as second:
        daemon = eventually(lambda: answering(place), 60, "a daemon")
        eventually(lambda: servers() == [daemon], 30, servers)
        engine = FakeEngine(place)
        for process in (first, second):
            os.killpg(process.pid, signal.SIGKILL)
        said = [process.communicate()[1] for process in (first, second)]
    assert [text.count("starting one") for text in said] == [1, 1]
    assert not any("ERROR" in text for text in said)
    values = blocks("outlived", 4)
    engine.save(values)
    assert eventually(lambda: engine.load(list(values)), 10, "a hit") == list(values.values())
    assert servers() == [daemon]
    engine.close()
    auditor.assert_nothing_left(30)


@pytest.mark.store
def test_a_killed_daemon_is_started_again_and_an_engine_that_left_starts_none(
    place: Path, auditor: Auditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starter, "AGAIN_S", 1.0)
    hello = EngineSpec().hello("scheduler")
    link = Link(str(place), lambda: hello, SchedulerSession.map, start=Starter(OPTIONS, str(place)).start)
    link.start()
    pids: list[int] = []
    for _ in range(3):
        if pids:
            os.kill(pids[-1], signal.SIGKILL)
            eventually(lambda: answering(place) != pids[-1], 10, "its end")
        pids.append(eventually(lambda: answering(place), 60, "a daemon"))
    FakeEngine(place).close()
    link.close()
    auditor.assert_nothing_left(30)
    assert len(set(pids)) == 3
