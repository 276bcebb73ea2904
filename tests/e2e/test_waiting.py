"""Requests whose blocks are late, on a real engine: hints sent again to a new daemon, a store that stands still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import whole_blocks
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.process import frozen
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.auditor import Auditor

PROMPTS = make_prompts(4, 300, seed=71)
# A transfer whose peer stood still may wait inside Mooncake for up to 60 s; its slots come back with it.
DEAD_PEER_S = 75.0
HITS = [whole_blocks(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def right(plain: Engine) -> list[list[int]]:
    return plain.run(PROMPTS).tokens


@pytest.fixture(scope="module")
def cluster() -> Iterator[Store]:
    with Store(memory="256 MB") as store:
        yield store


def counters(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = engine.call("tests.e2e.probes:counters")
    return found


def fill(engine: Engine, daemon: Daemon, cluster: Store, auditor: Auditor) -> None:
    """All prompts are in the store and no longer in the engine."""
    engine.run(PROMPTS)
    assert cluster.wait_keys(sum(HITS) // 32) == sum(HITS) // 32
    auditor.assert_idle(daemon.pid, daemon.socket)
    assert engine.reset_prefix_cache()


@pytest.mark.stress  # whether the daemon is back before the last one's turn comes is a race on a busy machine
def test_a_daemon_that_restarts_under_a_queue_is_hinted_again(
    model: Path, cluster: Store, right: list[list[int]], engines: Callable[..., Engine], module_auditor: Auditor
) -> None:
    """The old daemon knew the waiting requests, the new one does not: each is hinted again when its turn comes."""
    with Daemon(mooncake_config=cluster.config, staging="64MiB") as daemon:
        engine = engines(EngineSpec(model=model, max_num_seqs=1, kv_transfer=ours(daemon.socket)))
        fill(engine, daemon, cluster, module_auditor)
        # Long answers, one after the other: the last one's turn comes well after the restart.
        engine.begin(PROMPTS, max_tokens=1500)
        engine.wait_event("first_token")
        daemon.sigkill()
        daemon.start()
        served = engine.finish()
        assert [tokens[:32] for tokens in served.tokens] == right
        assert served.cached_tokens[-1] == HITS[-1]
        assert counters(engine)["late_hints"] >= 1
        module_auditor.assert_idle(daemon.pid, daemon.socket)
        engine.stop()


def test_a_store_that_stands_still_delays_nobody_for_long(
    model: Path, cluster: Store, right: list[list[int]], engines: Callable[..., Engine], module_auditor: Auditor
) -> None:
    """Adaptive: no request waits for the bound, which is ten minutes away, and each may choose for itself."""
    with Daemon(mooncake_config=cluster.config, staging="64MiB") as daemon:
        transfer = ours(daemon.socket, wait_policy="adaptive", wait_timeout_ms=600_000)
        engine = engines(EngineSpec(model=model, kv_transfer=transfer))
        fill(engine, daemon, cluster, module_auditor)

        def run(**wishes: Any) -> list[list[int]]:
            assert engine.reset_prefix_cache()
            params = {"extra_args": {"kv_transfer_params": {"kvprefetch": wishes}}} if wishes else {}
            return engine.run(PROMPTS, sampling=params, timeout_s=60).tokens

        with frozen(cluster.owner_pid):
            assert run() == right
            before = counters(engine)
            assert run(wait_policy="best_effort") == right
            after = counters(engine)
            assert after.get("waits", 0) == before.get("waits", 0), "best_effort waited"
            assert run(wait_policy="soon") == right
            assert counters(engine)["bad_overrides"] >= 1
        module_auditor.assert_idle(daemon.pid, daemon.socket, DEAD_PEER_S)
        engine.stop()
