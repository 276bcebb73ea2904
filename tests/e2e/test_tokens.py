"""Tokens never change: recomputed, loaded either way, beside another connector, on two ranks; resets, modes, roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.daemon.cli.test_mode import switch
from tests.e2e.conftest import (
    BLOCK,
    Site,
    answers,
    hits,
    loaded_on_two_ranks,
    saved_then_loaded,
    served,
    warmed_prompts_are_hits,
    whole_blocks,
)
from tests.lab.connectors import multi, ours
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts

PROMPTS = make_prompts(6, 300, seed=1)
RIGHT = answers(PROMPTS)


def counters(engine: Engine) -> dict[str, int]:
    found: dict[str, int] = engine.call("tests.e2e.probes:counters")
    return found


@pytest.mark.shows("saved, then loaded: tokens equal")
@pytest.mark.parametrize("load_mode", ["sync", "async"])
def test_loaded_tokens_equal_recomputed_ones(site: Site, plain: Engine, load_mode: str) -> None:
    """With a block of another prompt in a load they differ: were the loaded KV wrong, the comparison would see it.

    The worker is a process of its own in one case.
    """
    extra = {"load_mode": load_mode, "cache_prefix": load_mode}
    engine = site.engine(extra=extra, own_worker=load_mode == "sync")
    saved_then_loaded(site, plain, engine, PROMPTS)
    engine.stop()


@pytest.mark.stress  # as test_groups, in the default run; tests/daemon/cli/test_prefetch.py has one group, without vLLM
@pytest.mark.shows("warmed prompts")
def test_a_warmed_prompt_is_a_hit_at_once(site: Site, tmp_path: Path) -> None:
    engine = site.bed(extra={"cache_prefix": "warm"})
    counts = warmed_prompts_are_hits(site, engine, PROMPTS, RIGHT, tmp_path / "prompts.jsonl")
    blocks = sum(whole_blocks(prompt) // BLOCK for prompt in PROMPTS)
    assert (counts["announced"], counts["fetched"]) == (blocks, blocks)
    engine.stop()


def test_a_request_s_own_hints_decide_what_is_fetched_for_it(site: Site) -> None:
    """`fetch: false` is a miss without a hint, and `max_load_tokens` caps a load; the tokens are RIGHT either way."""
    engine = site.bed(extra={"cache_prefix": "own hints"})

    def run(expected: list[int], **payload: Any) -> int:
        """Return how many hints the daemon got."""
        site.fresh(engine)
        before = counters(engine).get("hints", 0)
        action = {"action_type": "kv.prefetch", "action_version": "1.0", "payload": payload}
        params = {"kv_hints": {"protocol_version": "0.1", "actions": [action]}}
        served(engine.run(PROMPTS, sampling={"extra_args": {"kv_transfer_params": params}}), RIGHT, expected)
        return counters(engine).get("hints", 0) - before

    engine.run(PROMPTS)
    assert run([0] * len(PROMPTS), fetch=False) == 0
    assert run([2 * BLOCK] * len(PROMPTS), max_load_tokens=3 * BLOCK - 1) == len(PROMPTS)
    assert run(hits(PROMPTS), priority=-1) == len(PROMPTS)
    site.assert_idle()
    engine.stop()


@pytest.mark.shows("child of MultiConnector")
def test_as_a_child_of_multi_connector(site: Site, plain: Engine, tmp_path: Path) -> None:
    """Beside vLLM's ExampleConnector: whichever serves, tokens are right and nothing of ours stays behind."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    mine = ours(site.daemon.socket, cache_prefix="multi")
    right = plain.run(PROMPTS).tokens
    for children in ((mine, example), (example, mine)):
        engine = site.engine(EngineSpec(model=site.model, kv_transfer=multi(*children)))
        assert engine.call("tests.e2e.probes:workers_found") == [True]
        assert engine.run(PROMPTS).tokens == right
        site.fresh(engine)
        second = engine.run(PROMPTS)
        assert second.tokens == right
        assert min(second.cached_tokens) > 0
        site.assert_idle()
        engine.stop()


@pytest.mark.shows("two tensor-parallel ranks")
def test_on_two_ranks(site: Site) -> None:
    """tests/e2e/test_groups.py has two ranks that compute."""
    loaded_on_two_ranks(site, PROMPTS[:4], "two heads")


@pytest.mark.shows("prompts of every length, chunked prefill")
def test_every_prompt_length_hits_its_whole_blocks(site: Site) -> None:
    """Prompts of 1 to 100 blocks, whole or not, with chunked prefill: exactly floor((tokens - 1) / block) blocks."""
    lengths = [1, 31, 32, 33, 64, 65, 96, 97, 500, 512, 513, 1000, 1024, 1025, 2049, 3200, 3201]
    prompts = [make_prompts(1, length, seed=length)[0] for length in lengths]
    sizes: dict[str, Any] = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 2,
        "num_gpu_blocks": 260,
    }
    engine = site.bed(extra={"cache_prefix": "lengths"}, **sizes)
    assert engine.run(prompts, max_tokens=8).tokens == answers(prompts, 8)
    site.fresh(engine)
    second = served(engine.run(prompts, max_tokens=8), answers(prompts, 8), hits(prompts))
    assert max(second.cached_tokens) == 100 * BLOCK
    site.assert_idle()
    engine.stop()


@pytest.mark.shows("reset of the connector")
def test_after_a_reset_of_the_connector_nothing_old_is_served(site: Site) -> None:
    engine = site.bed(extra={"cache_prefix": "reset", "key_format": "fingerprint"})
    other = site.bed(extra={"cache_prefix": "keeps", "key_format": "fingerprint"})
    for each in (engine, other):
        each.run(PROMPTS)
        site.fresh(each)
    assert engine.reset_prefix_cache(reset_connector=True)
    served(engine.run(PROMPTS), RIGHT, [0] * len(PROMPTS))
    site.fresh(engine)
    assert engine.run(PROMPTS).cached_tokens == hits(PROMPTS), "what the new weights gave is stored again"
    assert other.run(PROMPTS).cached_tokens == hits(PROMPTS), "another namespace keeps its keys"
    for each in (engine, other):
        each.stop()


@pytest.mark.shows("`mode` shadow")
def test_shadow_looks_up_and_never_loads(site: Site) -> None:
    filler = site.bed(extra={"cache_prefix": "shadow"})
    filler.run(PROMPTS)
    site.fresh(filler)
    filler.stop()
    switch(site.daemon.socket, "shadow")
    shadow = site.bed(extra={"cache_prefix": "shadow"})
    served(shadow.run(PROMPTS), RIGHT, [0] * len(PROMPTS))
    switch(site.daemon.socket, "on")
    found = counters(shadow)
    assert found["hints"] == len(PROMPTS)
    assert found.get("loads", 0) == found.get("saves", 0) == 0
    site.assert_idle()
    shadow.stop()


@pytest.mark.shows("producers and consumers")
def test_producers_never_load_and_consumers_never_save(site: Site) -> None:
    producer = site.bed(role="kv_producer", extra={"cache_prefix": "roles"})
    consumer = site.bed(role="kv_consumer", extra={"cache_prefix": "roles"})
    assert consumer.run(PROMPTS).cached_tokens == [0] * len(PROMPTS)
    for _ in range(2):
        assert producer.run(PROMPTS).cached_tokens == [0] * len(PROMPTS)
        site.fresh(producer)
    site.fresh(consumer)
    served(consumer.run(PROMPTS), RIGHT, hits(PROMPTS))
    assert counters(consumer).get("saves", 0) == 0
    for each in (producer, consumer):
        each.stop()
