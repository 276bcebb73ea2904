"""Engine and daemon of different protocols: both sides log one line, and the engine serves without the connector."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvprefetch
from kvprefetch.connector.link import FINAL_RETRY_S
from kvprefetch.shmring.wire.records import PROTOCOL
from tests.e2e.conftest import PATIENT, At, hits, wait_attached
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts
from tests.support.auditor import ask_daemon
from tests.support.package import copy_package

PROMPTS = make_prompts(4, 300, seed=53)
HITS = hits(PROMPTS)
LOOKED_AT_S = 5.0


@pytest.fixture(scope="module")
def right(plain: Engine) -> list[list[int]]:
    return plain.run(PROMPTS).tokens


def another_protocol(folder: Path, number: int) -> dict[str, str]:
    """Copy the package with this protocol number; return the environment of a process that uses the copy."""
    records = copy_package(folder) / "shmring" / "wire" / "records.py"
    changed, count = re.subn(r"^PROTOCOL = \d+$", f"PROTOCOL = {number}", records.read_text(), flags=re.MULTILINE)
    assert count == 1
    records.write_text(changed)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def tries(daemon: Daemon) -> dict[int, int]:
    """How often each process that the daemon refuses has tried."""
    return {int(each["pid"]): int(each["tries"]) for each in ask_daemon(daemon.socket).refused}


def assert_refused(engine: Engine, daemon: Daemon, line: str) -> None:
    """Each process logs one line, and the daemon one for each of them; no process asks twice within five seconds."""
    assert FINAL_RETRY_S > LOOKED_AT_S
    assert daemon.wait_record("peer.refused", count=2) is not None
    before = tries(daemon)
    time.sleep(LOOKED_AT_S)
    assert all(count - before[pid] <= 1 for pid, count in tries(daemon).items())
    refused = daemon.records("peer.refused")
    assert len({record["pid"] for record in refused}) == len(refused) == 2
    assert {str(record["error"]) for record in refused} == {refused[0]["error"]}
    assert line in str(refused[0]["error"])
    logged = [each for each in engine.log.read_text().splitlines() if "protocol differs" in each]
    assert len(logged) == 2, "one of the scheduler, one of the worker"
    assert all(f"kvprefetch: the daemon refused: {refused[0]['error']}" in each for each in logged)


@pytest.mark.stress  # each process imports vLLM anew: a minute on two cores
@pytest.mark.shows("upgrade of the daemon")
def test_an_engine_serves_on_beside_an_older_daemon_and_attaches_to_its_successor(
    at: At, model: Path, right: list[list[int]], engines: Callable[..., Engine], tmp_path: Path
) -> None:
    old = Daemon(memory="64MiB", staging="16MiB", env=another_protocol(tmp_path, PROTOCOL - 1))
    with old:
        # As a user starts it, each process with imports of its own; so is the one below, for its environment.
        engine = engines(EngineSpec(model=model, kv_transfer=ours(old.socket)), attached=False, forked=False)
        assert engine.run(PROMPTS).tokens == right
        assert_refused(engine, old, f"engine={PROTOCOL} ('{kvprefetch.__version__}') daemon={PROTOCOL - 1} ")
        assert "restart the daemon" in str(old.records("peer.refused")[0]["error"])
        assert old.sigterm() == 0
        with Daemon(memory="64MiB", staging="16MiB", socket=old.socket, extra=PATIENT) as daemon:
            site = at(daemon)
            wait_attached(engine, FINAL_RETRY_S + 5)
            assert engine.reset_prefix_cache()
            assert engine.run(PROMPTS).tokens == right, "saving"
            site.fresh(engine)
            again = engine.run(PROMPTS)
            assert (again.tokens, again.cached_tokens) == (right, HITS)
            engine.stop()


@pytest.mark.stress
def test_an_older_engine_serves_on_beside_the_daemon(
    model: Path, right: list[list[int]], engines: Callable[..., Engine], tmp_path: Path
) -> None:
    with Daemon(memory="64MiB", staging="16MiB") as daemon:
        spec = EngineSpec(model=model, kv_transfer=ours(daemon.socket), env=another_protocol(tmp_path, PROTOCOL - 1))
        engine = engines(spec, attached=False)
        assert engine.run(PROMPTS).tokens == right
        assert_refused(engine, daemon, f"engine={PROTOCOL - 1} ('{kvprefetch.__version__}') daemon={PROTOCOL} ")
        assert "restart the engine" in str(daemon.records("peer.refused")[0]["error"])
        assert engine.run(PROMPTS).tokens == right
        assert daemon.sigterm() == 0
        engine.stop()
