"""Queues before a store that stands still, comes back, holds objects of another size, or dies."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import answers, hits
from tests.e2e.deep import Pair, fill, finished, patient, wishing
from tests.lab.bed import engine as bed
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine
from tests.lab.process import frozen
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.auditor import Auditor

PROMPTS = make_prompts(24, 300, seed=71)
HITS = hits(PROMPTS)
RIGHT = answers(PROMPTS, 8)
AFTERWARDS = make_prompts(8, 300, seed=74)
WAIT_S = 1.0
# A transfer whose peer is gone waits inside Mooncake for up to 60 s; its slots come back with it.
DEAD_PEER_S = 75.0


@pytest.fixture(scope="module")
def daemon(cluster: Store) -> Iterator[Daemon]:
    # 128 slots to fetch into, 216 blocks in the prompts: blocks staged for one pass do not serve the next.
    with Daemon(mooncake_config=cluster.config, staging="16MiB", extra=("--save-share", "0.5")) as daemon:
        yield daemon
        assert daemon.sigterm(DEAD_PEER_S) == 0


@pytest.fixture(scope="module")
def pair(cluster: Store, daemon: Daemon, engines: Callable[..., Engine], module_auditor: Auditor) -> Iterator[Pair]:
    """An engine with its prompts in the store; its requests wait for a second at most."""
    engine = engines(bed.spec(connector=patient(daemon, WAIT_S, key_format="vllm")))
    pair = Pair(engine, daemon, module_auditor, WAIT_S)
    fill(pair, cluster, PROMPTS)
    yield pair
    engine.stop()


@pytest.mark.shows("store that hangs or dies")
def test_a_store_that_stands_still_delays_nobody_for_long(cluster: Store, pair: Pair) -> None:
    """With `adaptive` no request waits for a bound of ten minutes, with `best_effort` none waits at all."""

    def counters_after(**wishes: Any) -> Counter[str]:
        assert pair.engine.reset_prefix_cache()
        served = pair.engine.run(PROMPTS[:4], max_tokens=8, sampling=wishing(**wishes), timeout_s=60)
        assert served.tokens == RIGHT[:4]
        return Counter(pair.engine.call("tests.e2e.probes:counters"))

    with frozen(cluster.node_pid):
        before = counters_after(wait_policy="adaptive", wait_timeout_ms=600_000)
        after = counters_after(wait_policy="best_effort")
        assert after["waits"] == before["waits"], "best_effort waited"
        assert counters_after(wait_policy="soon")["bad_overrides"] >= 1
    pair.assert_idle(DEAD_PEER_S)


@pytest.mark.stress
def test_a_master_that_comes_back_empty_is_joined_again_by_all_that_stayed(
    cluster: Store, pair: Pair, engines: Callable[..., Engine]
) -> None:
    """The storage node and two daemons join it again; then one engine loads what the other saves."""
    with Daemon(mooncake_config=cluster.config, staging="16MiB", extra=("--save-share", "0.5")) as there:
        other = Pair(
            engines(pair.engine.spec.but(kv_transfer=patient(there, WAIT_S, key_format="vllm"))),
            there,
            pair.auditor,
            WAIT_S,
        )
        assert sum(other.run(PROMPTS, max_tokens=8).cached_tokens) > 0, "the first engine saved them"
        before = [len(each.records("store.recovered")) for each in (pair.daemon, there)]
        cluster.kill_master()
        for each in (pair, other):
            result = each.run(PROMPTS, max_tokens=8)
            assert result.tokens == RIGHT
            assert sum(result.cached_tokens) < sum(HITS), "the store was needed"
        cluster.start_master()
        for count, daemon in zip(before, (pair.daemon, there), strict=True):
            assert daemon.wait_record("store.recovered", count=count + 1, timeout_s=30) is not None
        fill(pair, cluster, AFTERWARDS)
        result = other.run(AFTERWARDS, max_tokens=8)
        assert result.tokens == answers(AFTERWARDS, 8)
        assert result.cached_tokens == hits(AFTERWARDS)
        other.engine.stop()


@pytest.mark.shows("store that hangs or dies")
@pytest.mark.parametrize("victim", ["storage node", "master"])  # this comes last: it is not brought back
def test_a_killed_store_holds_nobody_past_the_deadline(cluster: Store, pair: Pair, victim: str) -> None:
    pair.begin(PROMPTS, max_tokens=8)
    pair.engine.wait_event("first_token")
    os.kill(cluster.node_pid if victim == "storage node" else cluster.master_pid, signal.SIGKILL)
    during = pair.collect()
    assert finished(during)
    assert during.tokens == RIGHT
    pair.assert_idle(DEAD_PEER_S)
    after = pair.run(PROMPTS, max_tokens=8, idle_timeout_s=DEAD_PEER_S)
    assert finished(after)
    assert after.tokens == RIGHT
    assert sum(after.cached_tokens) < sum(HITS), "the store was needed"
