"""The scheduler's contract with a real engine: failed allocations, evictions, long queues, resets."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import PATIENT, At, Site, hits, served
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineError
from tests.lab.prompts import make_prompts
from tests.support.auditor import ask_daemon

PROMPTS = make_prompts(6, 300, seed=41)
HITS = hits(PROMPTS)


@pytest.fixture(scope="module")
def right(plain: Engine) -> list[list[int]]:
    return plain.run(PROMPTS).tokens


@pytest.fixture(scope="module")
def filled(site: Site, right: list[list[int]]) -> Engine:
    """An engine whose prompts are in the store."""
    engine = site.engine()
    assert engine.run(PROMPTS).tokens == right
    site.fresh(engine)
    return engine


def test_a_failed_allocation_after_an_answer_is_answered_again(
    site: Site, filled: Engine, right: list[list[int]]
) -> None:
    site.fresh(filled)
    filled.call("tests.e2e.probes:fail_next_allocation")
    served(filled.run(PROMPTS), right, HITS)
    site.assert_idle()


def test_a_local_prefix_evicted_after_the_hint_is_fetched_again(
    site: Site, filled: Engine, right: list[list[int]]
) -> None:
    site.fresh(filled)
    half = [prompt[:160] for prompt in PROMPTS]
    filled.run(half, max_tokens=1)
    site.assert_idle()
    filled.call("tests.e2e.probes:evict_on_arrival")
    served(filled.run(PROMPTS, concurrency=1), right, HITS)
    site.assert_idle()
    filled.stop()


@pytest.mark.shows("queues longer than staging")
def test_a_queue_longer_than_the_staging_area_is_served_in_full(at: At, plain: Engine) -> None:
    """Staging for about two requests, forty waiting."""
    prompts = make_prompts(40, 300, seed=44)
    right = plain.run(prompts, max_tokens=8).tokens
    with Daemon(memory="128MiB", staging="2MiB", extra=PATIENT) as daemon:  # 32 slots of 64 KiB; a prompt has 9 blocks
        site = at(daemon)
        engine = site.engine()
        passes = 0
        while sum(line["stored_blocks"] for line in daemon.records("save.done")) < 40 * 9:
            passes += 1
            assert passes <= 12, "saving by credit makes progress in every pass"
            assert engine.run(prompts, max_tokens=8).tokens == right
            site.fresh(engine)
        served(engine.run(prompts, max_tokens=8), right, hits(prompts))
        assert ask_daemon(daemon.socket).engines[0]["slots"] == 24
        site.assert_idle()
        engine.stop()


def test_a_request_larger_than_the_staging_area_is_served_in_part(at: At, plain: Engine) -> None:
    prompts = make_prompts(2, 1000, seed=45)
    right = plain.run(prompts, max_tokens=8).tokens
    with Daemon(memory="128MiB", staging="1MiB", extra=PATIENT) as daemon:  # 12 slots to fetch into, 31 blocks a prompt
        site = at(daemon)
        engine = site.engine()
        for _ in range(12):
            assert engine.run(prompts, max_tokens=8).tokens == right
            site.fresh(engine)
        last = engine.run(prompts, max_tokens=8)
        assert last.tokens == right
        assert 0 < min(last.cached_tokens) <= max(last.cached_tokens) <= 12 * 32
        engine.stop()


@pytest.mark.shows("reset of the connector")
def test_after_a_reset_of_the_connector_nothing_old_is_served(site: Site, right: list[list[int]]) -> None:
    engine = site.engine(extra={"cache_prefix": "reset"})
    other = site.engine(extra={"cache_prefix": "keeps"})
    for each in (engine, other):
        each.run(PROMPTS)
        site.fresh(each)
    assert engine.reset_prefix_cache(reset_connector=True)
    served(engine.run(PROMPTS), right, [0] * len(PROMPTS))
    site.fresh(engine)
    assert engine.run(PROMPTS).cached_tokens == HITS, "what the new weights gave is stored again"
    assert other.run(PROMPTS).cached_tokens == HITS, "another namespace keeps its keys"
    for each in (engine, other):
        each.stop()


@pytest.mark.shows("`mode` shadow")
@pytest.mark.usefixtures("filled")
def test_shadow_looks_up_and_never_loads(site: Site, right: list[list[int]]) -> None:
    shadow = site.engine(extra={"mode": "shadow"})
    served(shadow.run(PROMPTS), right, [0] * len(PROMPTS))
    counters = shadow.call("tests.e2e.probes:counters")
    assert counters["hints"] == len(PROMPTS)
    assert counters.get("loads", 0) == counters.get("saves", 0) == 0
    site.assert_idle()
    shadow.stop()


@pytest.mark.shows("producers and consumers")
def test_producers_never_load_and_consumers_never_save(site: Site, right: list[list[int]]) -> None:
    producer = site.engine(role="kv_producer", extra={"cache_prefix": "roles"})
    consumer = site.engine(role="kv_consumer", extra={"cache_prefix": "roles"})
    assert consumer.run(PROMPTS).cached_tokens == [0] * len(PROMPTS)
    for _ in range(2):
        assert producer.run(PROMPTS).cached_tokens == [0] * len(PROMPTS)
        site.fresh(producer)
    site.fresh(consumer)
    served(consumer.run(PROMPTS), right, HITS)
    assert consumer.call("tests.e2e.probes:counters").get("saves", 0) == 0
    for each in (producer, consumer):
        each.stop()


def test_bad_connector_configuration_stops_the_start_in_one_line(site: Site) -> None:
    with pytest.raises(EngineError, match=r"wait_timeout_ms.*'soon'"):
        site.engine(extra={"wait_timeout_ms": "soon"})
