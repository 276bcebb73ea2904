"""SIGKILL of an engine, of the daemon or of both at any time: nothing of a GPU's memory is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.engine.near import daemon_with
from tests.lab.daemon import Daemon
from tests.support.fakecuda import machine, needs_fake
from tests.support.waiting import eventually

pytestmark = [needs_fake, pytest.mark.store, pytest.mark.stress]
ROOT = Path(__file__).resolve().parents[3]
KILLS = 200
LONGEST_S = 0.8  # an engine attaches in a third of that


class Engines:
    """The process that forks engines."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tests.daemon.engine.doomed"]
        env = {**os.environ, **machine().environment}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env)

    def start(self, daemon: Daemon) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(daemon.socket, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.close()


def test_kills_at_any_time_leave_no_device_memory(engines: Engines) -> None:
    rng, most = random.Random(36), 0
    with daemon_with() as daemon:
        for number in range(KILLS):
            engine, victims = engines.start(daemon), rng.choice(["engine", "daemon", "both"])
            deadline = time.monotonic() + rng.uniform(0, LONGEST_S)
            while time.monotonic() < deadline:
                most = max(most, machine().memories())
                time.sleep(0.01)
            if victims != "daemon":
                os.kill(engine, signal.SIGKILL)
            if victims != "engine":
                daemon.sigkill()
            run = f"everything given back: run={number} killed={victims}"
            eventually(lambda: machine().left() == {}, 30, lambda run=run: f"{run} left={machine().left()}")
            if victims != "engine":
                daemon.start()
    assert most, "an engine had device slots"
