"""Memory that Mooncake does not let go of: in a real cluster the metadata server is away while engines come and go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvprefetch.shmring.wire.attach import Refused
from tests.lab import process
from tests.lab.daemon import Daemon
from tests.lab.store import Store
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import FakeEngine, answer
from tests.support.waiting import eventually

pytestmark = pytest.mark.store
STAGING = 1 << 20


class MetadataServer:
    """Mooncake's own, on a port that it keeps. `start` and `stop` as often as wanted."""

    def __init__(self, log: Path) -> None:
        [self.port] = process.free_ports(1)
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mooncake.http_metadata_server", "--host", "127.0.0.1"]
        self._child = process.spawn([*command, "--port", str(self.port)], log=self._log)
        assert process.comes_up(self._child, lambda: process.listens("127.0.0.1", self.port), 30)

    def freeze(self) -> None:
        """It takes connections, and answers none."""
        assert self._child is not None
        for pid in [self._child.pid, *process.descendants(self._child.pid)]:
            os.kill(pid, signal.SIGSTOP)

    def stop(self) -> None:
        if self._child is not None:
            process.reap(self._child)
            self._child = None


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[MetadataServer]:
    server = MetadataServer(tmp_path / "metadata.log")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def daemon(serve: Callable[..., Daemon], metadata: MetadataServer, tmp_path: Path) -> Iterator[Daemon]:
    """A daemon of a cluster with this metadata server."""
    with Store(nodes=0) as store:
        config = json.loads(store.config.read_text())
        config |= {"metadata_server": f"http://127.0.0.1:{metadata.port}/metadata"}
        path = tmp_path / "mooncake.json"
        path.write_text(json.dumps(config))
        yield serve(memory=None, mooncake_config=path)


@contextmanager
def left(daemon: Daemon, metadata: MetadataServer) -> Iterator[None]:
    """An engine leaves while the metadata server is away, which comes back at the end."""
    engine = FakeEngine(daemon.socket, engine_id="first")
    metadata.stop()
    engine.close()
    assert daemon.wait_record("memory.held") is not None
    yield
    metadata.start()


def test_memory_that_the_store_does_not_let_go_of_keeps_no_engine_out(daemon: Daemon, metadata: MetadataServer) -> None:
    """It stays mapped, is listed, and is free once the metadata server is back; the next engines attach."""
    with left(daemon, metadata):
        [held] = eventually(lambda: ask_daemon(daemon.socket).held, what="the memory in the status")
        assert (held["bytes"], held["error"]) == (STAGING, daemon.records("memory.held")[0]["error"])
        assert "not free again" in ask_daemon(daemon.socket).problems[-1]
    FakeEngine(daemon.socket, engine_id="second").close()
    freed = daemon.wait_record("memory.freed", timeout_s=30)
    assert freed is not None
    assert freed["epoch"] == held["epoch"]
    eventually(lambda: not ask_daemon(daemon.socket).held, what="a status without it")
    assert ask_daemon(daemon.socket).problems == []
    FakeEngine(daemon.socket, engine_id="third").close()


def test_engines_that_the_store_keeps_out_are_a_problem_of_the_daemon(daemon: Daemon, metadata: MetadataServer) -> None:
    with left(daemon, metadata):
        other = FakeEngine(daemon.socket, engine_id="other", attach=False)
        assert "the store refuses staging" in answer(other.greet_all()[-1], Refused).error
        eventually(lambda: ask_daemon(daemon.socket).refused, what="the refusal")
        status = ask_daemon(daemon.socket)
        assert (status.ready, status.healthy) == (False, True)
        assert status.problems[0].startswith("engines are refused: engine other: the store refuses staging")
    other.close()
    FakeEngine(daemon.socket, engine_id="other").close()
    eventually(lambda: ask_daemon(daemon.socket).ready, what="a daemon that is ready")


def test_a_stop_does_not_wait_for_memory_that_the_store_holds(daemon: Daemon, metadata: MetadataServer) -> None:
    with left(daemon, metadata):
        began = time.monotonic()
        assert daemon.sigterm(30) == 0
        assert time.monotonic() - began < 10


@pytest.mark.stress
def test_a_stop_asks_a_metadata_server_that_is_frozen_once(daemon: Daemon, metadata: MetadataServer) -> None:
    """Each question takes six seconds, and then the client leaves the cluster."""
    engines = [FakeEngine(daemon.socket, engine_id=f"e{number}") for number in range(5)]
    metadata.freeze()
    began = time.monotonic()
    assert daemon.sigterm(60) == 0
    assert time.monotonic() - began < 25
    assert len(daemon.records("engine.detached")) == len(engines)
