"""Tokens never change with two KV groups: sliding windows, or chunks, beside full attention."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import (
    BLOCK,
    Site,
    answers,
    each_reads_what_the_other_wrote,
    failed_loads_are_recomputed,
    fingerprint,
    hits,
    loaded_on_two_ranks,
    preempted_and_aborted,
    saved_then_loaded,
    served,
    warmed_prompts_are_hits,
)
from tests.lab.connectors import ours, upstream
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.hybrid import WINDOW, make_gemma3, make_llama4, make_mimo
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.auditor import Auditor
from tests.support.compiler import needs_cxx

PROMPTS = make_prompts(6, 300, seed=81)
LONG = [prompt + more for prompt, more in zip(PROMPTS, make_prompts(6, 300, seed=82), strict=True)]
WINDOW_BLOCKS = -(-(WINDOW - 1) // BLOCK)


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


@pytest.mark.stress  # as test_upstream, in the default run
@pytest.mark.shows("vLLM's own connector reads ours, and the reverse", "full attention and sliding windows")
def test_each_connector_reads_what_the_other_wrote(
    gemma: Path, cluster: Store, reference: Engine, shared: Daemon, engines: Callable[..., Engine]
) -> None:
    mine = engines(EngineSpec(model=gemma, kv_transfer=ours(shared.socket, key_format="vllm")))
    theirs = engines(EngineSpec(model=gemma, kv_transfer=upstream(), mooncake_config=cluster.config))
    each_reads_what_the_other_wrote(cluster, reference, mine, theirs, 300 // BLOCK + WINDOW_BLOCKS, seed=84)


@pytest.mark.stress  # of the gallery; the default run has windows
@pytest.mark.parametrize(
    ("every", "prepare", "stored", "starts"),
    [
        pytest.param(
            2,
            "",
            2 * (300 // BLOCK),
            (0, 1),
            marks=[
                pytest.mark.shows("saved, then loaded: tokens equal", "full attention and chunks"),
                pytest.mark.shows("vLLM's own connector reads ours, and the reverse", "full attention and chunks"),
            ],
            id="chunks",
        ),
        pytest.param(
            3,
            "tests.lab.hybrid:windows_among_chunks",
            2 * (300 // BLOCK) + WINDOW_BLOCKS,
            (0, 1, 3),
            marks=[
                pytest.mark.shows("saved, then loaded: tokens equal", "full attention, sliding windows and chunks"),
                pytest.mark.shows(
                    "vLLM's own connector reads ours, and the reverse", "full attention, sliding windows and chunks"
                ),
            ],
            id="chunks and windows",
        ),
    ],
)
def test_chunks_beside_local_hits_and_vllms_own_connector(
    every: int,
    prepare: str,
    stored: int,
    starts: tuple[int, ...],
    tmp_path: Path,
    cluster: Store,
    shared: Daemon,
    engines: Callable[..., Engine],
    module_auditor: Auditor,
) -> None:
    """Prompts end in the first block of a chunk, in its last, and between; a longer one goes on from what is local.

    `stored`: the keys of a prompt of 300 tokens; `starts`: where each group's blocks begin in its load.
    """
    model = make_llama4(tmp_path / f"llama4-{every}", every)
    spec = EngineSpec(model=model, prepare=prepare)
    site, plain = Site(shared, model, module_auditor, engines), engines(spec)
    mine = site.engine(spec.but(kv_transfer=ours(shared.socket, key_format="vllm")))
    theirs = engines(spec.but(kv_transfer=upstream(), mooncake_config=cluster.config))
    groups: dict[int, int | None] = dict.fromkeys(range(len(starts)))
    each_reads_what_the_other_wrote(cluster, plain, mine, theirs, stored, seed=87, written=groups)
    theirs.stop()
    ends = [prompt[:length] for prompt, length in zip(LONG, (300, 257, 256, 500, 129, 385), strict=True)]
    saved_then_loaded(site, plain, mine, ends, LONG, foreign=())
    right = plain.run(PROMPTS).tokens
    assert mine.run(PROMPTS).tokens == right  # which saves windows before their ends
    for start in starts:
        site.a_foreign_block_shows(mine, PROMPTS, right, start)
    site.assert_idle()
    for engine in (mine, plain):
        engine.stop()
