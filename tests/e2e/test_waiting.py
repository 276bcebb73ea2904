"""Late blocks on a real engine: hints go again to a new daemon, and a store may stand still."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import At, Site, hits
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine
from tests.lab.process import frozen
from tests.lab.prompts import make_prompts
from tests.lab.store import Store

PROMPTS = make_prompts(4, 300, seed=71)
# A transfer whose peer stood still may wait inside Mooncake for up to 60 s; its slots come back with it.
DEAD_PEER_S = 75.0
HITS = hits(PROMPTS)


@pytest.fixture(scope="module")
def right(plain: Engine) -> list[list[int]]:
    return plain.run(PROMPTS).tokens


def counters(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = engine.call("tests.e2e.probes:counters")
    return found


def fill(engine: Engine, site: Site, cluster: Store) -> None:
    """Save all prompts, and empty the engine's own cache."""
    engine.run(PROMPTS)
    assert cluster.wait_keys(sum(HITS) // 32) == sum(HITS) // 32
    site.fresh(engine)


@pytest.mark.stress  # whether the daemon is back before the last one's turn comes is a race on a busy machine
def test_a_daemon_that_restarts_under_a_queue_is_hinted_again(at: At, cluster: Store, right: list[list[int]]) -> None:
    """The old daemon knew the waiting requests, the new one does not: each is hinted again when its turn comes."""
    with Daemon(mooncake_config=cluster.config, staging="64MiB") as daemon:
        site = at(daemon)
        engine = site.engine(max_num_seqs=1)
        fill(engine, site, cluster)
        # Long answers, one after the other: the last one's turn comes well after the restart.
        engine.begin(PROMPTS, max_tokens=1500)
        engine.wait_event("first_token")
        daemon.sigkill()
        daemon.start()
        served = engine.finish()
        assert [tokens[:32] for tokens in served.tokens] == right
        assert served.cached_tokens[-1] == HITS[-1]
        assert counters(engine)["late_hints"] >= 1
        site.assert_idle()
        engine.stop()


@pytest.mark.shows("store that hangs or dies")
def test_a_store_that_stands_still_delays_nobody_for_long(at: At, cluster: Store, right: list[list[int]]) -> None:
    """With `adaptive` no request waits for the bound of ten minutes, and each may choose its own policy."""
    with Daemon(mooncake_config=cluster.config, staging="64MiB") as daemon:
        site = at(daemon)
        engine = site.engine(extra={"wait_policy": "adaptive", "wait_timeout_ms": 600_000})
        fill(engine, site, cluster)

        def run(**wishes: Any) -> list[list[int]]:
            assert engine.reset_prefix_cache()
            params = {"extra_args": {"kv_transfer_params": {"kvprefetch": wishes}}} if wishes else {}
            return engine.run(PROMPTS, sampling=params, timeout_s=60).tokens

        with frozen(cluster.node_pid):
            assert run() == right
            before = counters(engine)
            assert run(wait_policy="best_effort") == right
            after = counters(engine)
            assert after.get("waits", 0) == before.get("waits", 0), "best_effort waited"
            assert run(wait_policy="soon") == right
            assert counters(engine)["bad_overrides"] >= 1
        site.assert_idle(DEAD_PEER_S)
        engine.stop()
