"""Engine and daemon of different protocols: both sides log one line, and the engine serves without the connector."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvprefetch
from kvprefetch.connector.attach.link import FINAL_RETRY_S
from kvprefetch.shmring.wire.records import PROTOCOL
from tests.e2e.conftest import PATIENT, At, hits, served, wait_attached
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts
from tests.support.auditor import ask_daemon
from tests.support.package import copy_package

PROMPTS = make_prompts(4, 300, seed=53)
LOOKED_AT_S = 5.0


def older(folder: Path) -> dict[str, str]:
    """Copy the package with the protocol before; return the environment of a process that uses the copy."""
    records = copy_package(folder) / "shmring" / "wire" / "records.py"
    changed, count = re.subn(r"^PROTOCOL = \d+$", f"PROTOCOL = {PROTOCOL - 1}", records.read_text(), flags=re.MULTILINE)
    assert count == 1
    records.write_text(changed)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


def tries(daemon: Daemon) -> dict[int, int]:
    """How often each process that the daemon refuses has tried."""
    return {int(each["pid"]): int(each["tries"]) for each in ask_daemon(daemon.socket).refused}


@pytest.mark.stress  # each process imports vLLM anew: a minute on two cores
@pytest.mark.shows("upgrade of the daemon")
def test_an_engine_serves_on_beside_an_older_daemon_and_attaches_to_its_successor(
    at: At, model: Path, plain: Engine, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """Each process logs one line, and the daemon one for each of them; no process asks twice within five seconds."""
    right = plain.run(PROMPTS).tokens
    with Daemon(memory="64MiB", staging="16MiB", env=older(tmp_path)) as old:
        # As a user starts it, each process with imports of its own.
        spec = EngineSpec(model=model, kv_transfer=ours(old.socket), own_worker=True)
        engine = engines(spec, attached=False, forked=False)
        assert engine.run(PROMPTS).tokens == right
        assert FINAL_RETRY_S > LOOKED_AT_S
        assert old.wait_record("peer.refused", count=2) is not None
        before = tries(old)
        time.sleep(LOOKED_AT_S)
        assert all(count - before[pid] <= 1 for pid, count in tries(old).items())
        refused = old.records("peer.refused")
        assert len({record["pid"] for record in refused}) == len(refused) == 2
        [error] = {str(record["error"]) for record in refused}
        assert f"engine={PROTOCOL} ('{kvprefetch.__version__}') daemon={PROTOCOL - 1} " in error
        assert "restart the daemon" in error
        logged = [each for each in engine.log.read_text().splitlines() if "protocol differs" in each]
        assert len(logged) == 2, "one of the scheduler, one of the worker"
        assert all(f"kvprefetch: the daemon refused: {error}" in each for each in logged)
        assert old.sigterm() == 0
        with Daemon(memory="64MiB", staging="16MiB", socket=old.socket, extra=PATIENT) as daemon:
            site = at(daemon)
            wait_attached(engine, FINAL_RETRY_S + 5)
            assert engine.reset_prefix_cache()
            assert engine.run(PROMPTS).tokens == right, "saving"
            site.fresh(engine)
            served(engine.run(PROMPTS), right, hits(PROMPTS))
            engine.stop()
