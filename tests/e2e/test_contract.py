"""The scheduler's contract with a real engine: failed allocations, evictions, long queues, resets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import PATIENT, Site, whole_blocks
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineError, EngineSpec
from tests.lab.prompts import make_prompts
from tests.support.auditor import Auditor, ask_daemon

PROMPTS = make_prompts(6, 300, seed=41)
HITS = [whole_blocks(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def right(plain: Engine) -> list[list[int]]:
    return plain.run(PROMPTS).tokens


@pytest.fixture(scope="module")
def filled(site: Site, right: list[list[int]]) -> Engine:
    """An engine whose prompts are in the store."""
    engine = site.engine(site.spec())
    assert engine.run(PROMPTS).tokens == right
    site.fresh(engine)
    return engine


def test_a_failed_allocation_after_an_answer_is_answered_again(
    site: Site, filled: Engine, right: list[list[int]]
) -> None:
    site.fresh(filled)
    filled.call("tests.e2e.probes:fail_next_allocation")
    second = filled.run(PROMPTS)
    assert second.tokens == right
    assert second.cached_tokens == HITS
    site.assert_idle()


def test_a_local_prefix_evicted_after_the_hint_is_fetched_again(
    site: Site, filled: Engine, right: list[list[int]]
) -> None:
    site.fresh(filled)
    half = [prompt[:160] for prompt in PROMPTS]
    filled.run(half, max_tokens=1)
    site.assert_idle()
    filled.call("tests.e2e.probes:evict_on_arrival")
    second = filled.run(PROMPTS, concurrency=1)
    assert second.tokens == right
    assert second.cached_tokens == HITS
    site.assert_idle()
    filled.stop()


def test_a_queue_longer_than_the_staging_area_is_served_in_full(
    model: Path, engines: Callable[..., Engine], module_auditor: Auditor, plain: Engine
) -> None:
    """Staging for about two requests, forty waiting."""
    prompts = make_prompts(40, 300, seed=44)
    right = plain.run(prompts, max_tokens=8).tokens
    with Daemon(memory="128MiB", staging="2MiB", extra=PATIENT) as daemon:  # 32 slots of 64 KiB; a prompt has 9 blocks
        engine = engines(EngineSpec(model=model, kv_transfer=ours(daemon.socket)))
        passes = 0
        while sum(line["stored_blocks"] for line in daemon.records("save.done")) < 40 * 9:
            passes += 1
            assert passes <= 12, "saving by credit makes progress in every pass"
            assert engine.run(prompts, max_tokens=8).tokens == right
            module_auditor.assert_idle(daemon.pid, daemon.socket)
            assert engine.reset_prefix_cache()
        second = engine.run(prompts, max_tokens=8)
        assert second.tokens == right
        assert second.cached_tokens == [whole_blocks(prompt) for prompt in prompts]
        assert ask_daemon(daemon.socket).engines[0]["slots"] == 24
        module_auditor.assert_idle(daemon.pid, daemon.socket)
        engine.stop()


def test_a_request_larger_than_the_staging_area_is_served_in_part(
    model: Path, engines: Callable[..., Engine], module_auditor: Auditor, plain: Engine
) -> None:
    prompts = make_prompts(2, 1000, seed=45)
    right = plain.run(prompts, max_tokens=8).tokens
    with Daemon(
        memory="128MiB", staging="1MiB", extra=PATIENT
    ) as daemon:  # 12 slots to fetch into; a prompt has 31 blocks
        engine = engines(EngineSpec(model=model, kv_transfer=ours(daemon.socket)))
        for _ in range(12):
            assert engine.run(prompts, max_tokens=8).tokens == right
            module_auditor.assert_idle(daemon.pid, daemon.socket)
            assert engine.reset_prefix_cache()
        last = engine.run(prompts, max_tokens=8)
        assert last.tokens == right
        assert 0 < min(last.cached_tokens) <= max(last.cached_tokens) <= 12 * 32
        engine.stop()


def test_after_a_reset_of_the_connector_nothing_old_is_served(site: Site, right: list[list[int]]) -> None:
    engine = site.engine(site.spec(extra={"cache_prefix": "reset"}))
    other = site.engine(site.spec(extra={"cache_prefix": "keeps"}))
    for each in (engine, other):
        each.run(PROMPTS)
        site.fresh(each)
    assert engine.reset_prefix_cache(reset_connector=True)
    again = engine.run(PROMPTS)
    assert again.cached_tokens == [0] * len(PROMPTS)
    assert again.tokens == right
    site.fresh(engine)
    assert engine.run(PROMPTS).cached_tokens == HITS, "what the new weights gave is stored again"
    assert other.run(PROMPTS).cached_tokens == HITS, "another namespace keeps its keys"
    for each in (engine, other):
        each.stop()


@pytest.mark.usefixtures("filled")
def test_shadow_looks_up_and_never_loads(site: Site, right: list[list[int]]) -> None:
    shadow = site.engine(site.spec(extra={"mode": "shadow"}))
    result = shadow.run(PROMPTS)
    assert result.tokens == right
    assert result.cached_tokens == [0] * len(PROMPTS)
    counters = shadow.call("tests.e2e.probes:counters")
    assert counters["hints"] == len(PROMPTS)
    assert counters.get("loads", 0) == counters.get("saves", 0) == 0
    site.assert_idle()
    shadow.stop()


def test_producers_never_load_and_consumers_never_save(site: Site, right: list[list[int]]) -> None:
    producer = site.engine(site.spec(role="kv_producer", extra={"cache_prefix": "roles"}))
    consumer = site.engine(site.spec(role="kv_consumer", extra={"cache_prefix": "roles"}))
    assert consumer.run(PROMPTS).cached_tokens == [0] * len(PROMPTS)
    for _ in range(2):
        assert producer.run(PROMPTS).cached_tokens == [0] * len(PROMPTS)
        site.fresh(producer)
    site.fresh(consumer)
    loaded = consumer.run(PROMPTS)
    assert loaded.cached_tokens == HITS
    assert loaded.tokens == right
    assert consumer.call("tests.e2e.probes:counters").get("saves", 0) == 0
    for each in (producer, consumer):
        each.stop()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"wait_timeout_ms": "soon"}, ["wait_timeout_ms", "'soon'"]),
    ],
)
def test_bad_connector_configuration_stops_the_start_in_one_line(
    model: Path, engines: Callable[..., Engine], tmp_path: Path, extra: dict[str, str], words: list[str]
) -> None:
    transfer = ours(tmp_path / "none.sock")
    transfer["kv_connector_extra_config"].update(extra)
    with pytest.raises(EngineError) as failure:
        engines(EngineSpec(model=model, kv_transfer=transfer))
    for word in words:
        assert word in str(failure.value)
