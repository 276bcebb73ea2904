"""Long queues before a small staging area: shared prefixes, aborts, priorities, requests that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.e2e.conftest import PATIENT, answers, hits, served
from tests.e2e.deep import Pair, fill, finished, patient
from tests.lab.bed import engine as bed
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine
from tests.lab.passes import Abort
from tests.lab.process import frozen
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.auditor import Auditor

QUEUE = make_prompts(200, 300, seed=61)  # 9 blocks each
LARGE = make_prompts(3, 1000, seed=62)  # 31 blocks each
[PREFIX] = make_prompts(1, 540, seed=63)
SHARED = [PREFIX + own for own in make_prompts(40, 60, seed=64)]  # 90 % in common: 16 of 18 blocks
SHARED_BLOCKS = 16 + 40 * 2
STAGED_BLOCKS = 18  # slots of the narrow daemon: two prompts of the queue, or one with the shared prefix
WAIT_S = 30.0


@pytest.fixture(scope="module")
def wide(cluster: Store, engines: Callable[..., Engine], module_auditor: Auditor) -> Iterator[Pair]:
    """Staging for everything at once, and everything in the store."""
    with Daemon(mooncake_config=cluster.config, staging="256MiB", extra=("--save-share", "0.75", *PATIENT)) as daemon:
        engine = engines(bed.spec(connector=patient(daemon, WAIT_S, key_format="vllm")))
        pair = Pair(engine, daemon, module_auditor, WAIT_S)
        fill(pair, cluster, QUEUE, LARGE, SHARED)
        yield pair
        engine.stop()
        assert daemon.sigterm(60) == 0


@pytest.fixture(scope="module")
def narrow(cluster: Store, wide: Pair, engines: Callable[..., Engine], module_auditor: Auditor) -> Iterator[Pair]:
    """Staging for two prompts of the queue, the scheduler that knows priorities, and a KV pool for six prompts."""
    slots = STAGED_BLOCKS * 4 // 3  # a quarter is for saves
    with Daemon(mooncake_config=cluster.config, staging=f"{slots * 64}KiB", extra=PATIENT) as daemon:
        engine = engines(
            bed.spec(
                connector=patient(daemon, WAIT_S, key_format="vllm"),
                scheduling_policy="priority",
                max_model_len=1100,
                num_gpu_blocks=64,
            )
        )
        pair = Pair(engine, daemon, module_auditor, WAIT_S)
        yield pair
        engine.stop()
        assert daemon.sigterm(60) == 0


@pytest.mark.shows("queues longer than staging")
def test_staging_for_two_with_two_hundred_waiting(cluster: Store, narrow: Pair) -> None:
    """All two hundred wait at once (the store stands still until they do); then each gets all of its blocks."""
    before = narrow.counters()
    assert before["slots"] == STAGED_BLOCKS
    with frozen(cluster.node_pid):
        narrow.begin(QUEUE, max_tokens=8)
        narrow.wait_requests(len(QUEUE))
    served(narrow.finish(), answers(QUEUE, 8), hits(QUEUE))
    fetched = narrow.counters()["fetched_blocks"] - before["fetched_blocks"]
    assert 9 * len(QUEUE) <= fetched <= 9 * len(QUEUE) * 5 // 4, "hardly a block is fetched twice"


def test_a_prefix_shared_by_ninety_percent_through_staging_for_one(cluster: Store, narrow: Pair) -> None:
    """Room for one request of forty: the blocks they share stay, those of their own come and go."""
    before = narrow.counters()["fetched_blocks"]
    with frozen(cluster.node_pid):
        narrow.begin(SHARED, max_tokens=8)
        narrow.wait_requests(len(SHARED))
    served(narrow.finish(), answers(SHARED, 8), hits(SHARED))
    assert narrow.counters()["fetched_blocks"] - before <= 2 * SHARED_BLOCKS, "the shared blocks are fetched once"


def test_a_request_larger_than_staging_gets_what_fits(narrow: Pair) -> None:
    result = narrow.run(LARGE, max_tokens=8)
    assert finished(result)
    assert result.tokens == answers(LARGE, 8)
    assert min(result.cached_tokens) > 0


def test_urgent_requests_overtake_a_full_queue(cluster: Store, narrow: Pair) -> None:
    """Urgent requests arrive last, when fetches for others are under way: they are served next, data included."""
    count, urgent = 60, range(50, 60)
    priorities = [0 if index in urgent else 10 for index in range(count)]
    arrivals = [0.2 if index in urgent else 0.0 for index in range(count)]
    with frozen(cluster.node_pid):
        narrow.begin(QUEUE[:count], max_tokens=8, priorities=priorities, arrivals_s=arrivals)
        narrow.wait_requests(count)
    result = served(narrow.finish(), answers(QUEUE[:count], 8), hits(QUEUE[:count]))
    last = max(result.requests[index].first_token_s or 0.0 for index in urgent)
    before = [index for index in range(50) if (result.requests[index].first_token_s or 0.0) < last]
    assert len(before) <= 8, "only requests that were under way when they arrived, or ran beside them"


@pytest.mark.shows("aborts")
def test_an_abort_storm_leaves_the_others_right_and_nothing_held(cluster: Store, narrow: Pair) -> None:
    """While the store stands still until only the others are left; `test_lifecycle.py` aborts while it serves."""
    survivors = range(0, len(QUEUE), 8)
    aborts = [Abort(index, after_steps=index * 7 % 40) for index in range(len(QUEUE)) if index not in survivors]
    with frozen(cluster.node_pid):
        narrow.begin(QUEUE, max_tokens=8, aborts=aborts)
        for _ in aborts:
            narrow.engine.wait_event("finished")
    result = narrow.finish()
    aborted = [request.index for request in result.requests if request.finish_reason == "abort"]
    assert len(aborted) >= len(aborts) - 2, "all but those that an earlier pass left in staging, two at most"
    assert not set(aborted) & set(survivors)
    for index in set(range(len(QUEUE))) - set(aborted):
        assert result.requests[index].finish_reason == "length"
        assert result.tokens[index] == answers(QUEUE, 8)[index]
