"""Tokens never change with two KV groups: sliding windows, or chunks, beside full attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import (
    BLOCK,
    Site,
    answers,
    failed_loads_are_recomputed,
    fingerprint,
    hits,
    loaded_on_two_ranks,
    preempted_and_aborted,
    saved_then_loaded,
    served,
    warmed_prompts_are_hits,
)
from tests.lab.engine import Engine, EngineSpec
from tests.lab.hybrid import make_gemma3, make_llama4, make_mimo, make_qwen3_next
from tests.lab.prompts import make_prompts
from tests.support.compiler import needs_cxx

PROMPTS = make_prompts(6, 300, seed=81)
LONG = [prompt + more for prompt, more in zip(PROMPTS, make_prompts(6, 300, seed=82), strict=True)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("models") / "gemma3")


@pytest.fixture(scope="module")
def reference(gemma: Path, engines: Callable[..., Engine]) -> Engine:
    """The plain engine, whose tokens are right."""
    return engines(EngineSpec(model=gemma))


@pytest.mark.shows("saved, then loaded: tokens equal", "full attention and sliding windows")
def test_loaded_tokens_equal_recomputed_ones_beside_local_hits(site: Site, gemma: Path, reference: Engine) -> None:
    engine = site.engine(model=gemma, extra={"cache_prefix": "groups"})
    saved_then_loaded(site, reference, engine, PROMPTS, LONG)
    engine.stop()


@pytest.mark.shows("warmed prompts", "full attention and sliding windows")
def test_a_warmed_prompt_is_a_hit_at_once(site: Site, tmp_path: Path) -> None:
    engine = site.bed(layout="windows", extra={"cache_prefix": "warm groups"})
    warmed_prompts_are_hits(site, engine, PROMPTS, answers(PROMPTS), tmp_path / "prompts.jsonl")
    engine.stop()


@pytest.mark.shows("aborts", "full attention and sliding windows")
@pytest.mark.shows("preemption", "full attention and sliding windows")
@pytest.mark.shows("aborts", "full attention and chunks")
@pytest.mark.shows("preemption", "full attention and chunks")
@pytest.mark.parametrize("layout", ["windows", "chunks"])
def test_under_preemption_and_with_aborted_requests(site: Site, layout: str) -> None:
    preempted_and_aborted(site, [prompt[:200] for prompt in PROMPTS], 160, layout)


@pytest.mark.shows("loads that fail", "full attention and sliding windows")
def test_requests_whose_loads_failed_are_recomputed(site: Site) -> None:
    engine = site.bed(layout="windows", extra={"cache_prefix": "failing groups"})
    failed_loads_are_recomputed(site, engine, PROMPTS, answers(PROMPTS))
    engine.stop()


@pytest.mark.shows("two tensor-parallel ranks", "full attention and sliding windows")
def test_on_two_ranks(site: Site) -> None:
    """Both hold the one head."""
    loaded_on_two_ranks(site, PROMPTS, "windows")


@needs_cxx
def test_ranks_load_their_own_heads_where_layers_differ_in_them(site: Site, tmp_path: Path) -> None:
    """Both ranks hold the one head of full attention, and each holds one of a window's two: nothing is mixed."""
    spec = site.spec(model=make_mimo(tmp_path / "mimo"), tensor_parallel_size=2, extra={"cache_prefix": "heads"})
    engine = site.engine(spec)
    right = engine.run(PROMPTS).tokens
    site.fresh(engine)
    served(engine.run(PROMPTS), right, hits(PROMPTS))
    assert fingerprint(engine)["kv_shards"] == "1,2"
    site.assert_idle()
    engine.stop()


@pytest.mark.stress  # of the gallery; the default run has windows
@pytest.mark.shows("saved, then loaded: tokens equal", "full attention and chunks")
def test_chunks_beside_local_hits(site: Site, engines: Callable[..., Engine], tmp_path: Path) -> None:
    """Prompts end in the first block of a chunk, in its last, and between; a longer one goes on from what is local."""
    model = make_llama4(tmp_path / "llama4")
    engine, plain = site.engine(model=model, extra={"cache_prefix": "chunks"}), engines(EngineSpec(model=model))
    ends = [prompt[:length] for prompt, length in zip(LONG, (300, 257, 256, 500, 129, 385), strict=True)]
    saved_then_loaded(site, plain, engine, ends, LONG, foreign=())
    right = plain.run(PROMPTS).tokens
    assert engine.run(PROMPTS).tokens == right
    for start in (0, 1):  # of each group's blocks in a load
        site.a_foreign_block_shows(engine, PROMPTS, right, start)
    site.assert_idle()
    for each in (engine, plain):
        each.stop()


@pytest.mark.stress  # of the gallery; the default run has Mamba's states
@pytest.mark.shows("saved, then loaded: tokens equal", "full attention and linear attention")
def test_states_of_linear_attention(site: Site, engines: Callable[..., Engine], tmp_path: Path) -> None:
    """vLLM's CPU build runs it in bfloat16 alone. Requests run one by one: a sum has the same order each time."""
    # Of these prompts no step has a block's end inside it.
    spec: dict[str, Any] = {"model": make_qwen3_next(tmp_path / "qwen3-next"), "dtype": "bfloat16"}
    spec |= {"max_num_batched_tokens": BLOCK + 8}
    engine, plain = site.engine(extra={"cache_prefix": "linear"}, **spec), engines(EngineSpec(**spec))
    saved_then_loaded(site, plain, engine, PROMPTS, foreign=(0,), concurrency=1)
    for each in (engine, plain):
        each.stop()
