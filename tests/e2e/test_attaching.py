"""Every start of a served engine (`AsyncLLM`, with the engine core in a process of its own) attaches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import process
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import EngineSpec
from tests.support.waiting import eventually


def attached_starts(model: Path, tmp_path: Path, starts: int) -> None:
    """Start so many engines, one after the other; each must be attached although its worker reads long."""
    log = tmp_path / "engine.log"
    with Daemon(memory="64MiB", staging="16MiB") as daemon:
        spec = EngineSpec(
            model=model,
            num_gpu_blocks=64,
            max_model_len=512,
            kv_transfer={**ours(daemon.socket), "kv_connector_module_path": "tests.e2e.slow_connector"},
        )
        given = {"engine_args": spec.engine_args(), "starts": starts}
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.async_child", json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **spec.environment(), process.PARENT_VARIABLE: str(os.getpid())},
                cwd=process.REPO,
                **process.OWN_GROUP,
            )
        assert child.stdin is not None
        assert child.stdout is not None
        with child.stdin, child.stdout:
            try:
                for number in range(1, starts + 1):
                    while (line := child.stdout.readline()) and line != b"served\n":
                        pass
                    assert line, process.tail(log)
                    what = f"start {number} of {starts}, attached"
                    eventually(lambda number=number: len(daemon.records("engine.attached")) == number, 20, what)  # type: ignore[misc]
                    child.stdin.write(b"\n")
                    child.stdin.flush()
                assert child.wait(60) == 0, process.tail(log)
            finally:
                process.reap(child)
        assert daemon.records("engine.incomplete") == []


def test_a_served_engine_attaches_although_its_worker_reads_longer_than_it_warms_up(
    model: Path, tmp_path: Path
) -> None:
    attached_starts(model, tmp_path, starts=2)


@pytest.mark.stress
def test_two_hundred_starts_are_two_hundred_attached_engines(model: Path, tmp_path: Path) -> None:
    attached_starts(model, tmp_path, starts=200)
