"""With `key_format` "vllm" in a store of vLLM's own MooncakeStoreConnector: keys and bytes are equal.

Either connector reads what the other wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BLOCK, RUNS_GRANITE, Site, answers, each_reads_what_the_other_wrote
from tests.lab.bed import engine as bed
from tests.lab.connectors import ours, upstream
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.hybrid import WINDOW
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.auditor import Auditor


@pytest.fixture(scope="module")
def theirs(model: Path, cluster: Store, engines: Callable[..., Engine]) -> Engine:
    return engines(EngineSpec(model=model, kv_transfer=upstream(), mooncake_config=cluster.config))


@pytest.mark.shows("vLLM's own connector reads ours, and the reverse")
def test_each_reads_what_the_other_wrote_with_equal_tokens(
    model: Path,
    cluster: Store,
    plain: Engine,
    shared: Daemon,
    theirs: Engine,
    engines: Callable[..., Engine],
    module_auditor: Auditor,
) -> None:
    """And with a block of another prompt in a load of ours, tokens differ."""
    site = Site(shared, model, module_auditor, engines)
    mine = site.engine(extra={"key_format": "vllm"})
    each_reads_what_the_other_wrote(
        cluster, lambda some: plain.run(some).tokens, mine, theirs, 300 // BLOCK, 21, {0: None}
    )
    prompts = make_prompts(2, 300, seed=24)
    right = mine.run(prompts).tokens
    site.a_foreign_block_shows(mine, prompts, right)
    mine.stop()


def test_ranks_that_share_the_tokens_of_a_block_are_upstreams(
    cluster: Store, shared: Daemon, engines: Callable[..., Engine]
) -> None:
    """With decode context parallelism each rank's bytes have upstream's key, in both directions."""
    options: dict[str, Any] = {"tensor_parallel": 2, "block_size": BLOCK // 2, "num_gpu_blocks": 400}
    options["extra"] = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 8}
    theirs = engines(bed.spec(connector=upstream(), **options).but(mooncake_config=cluster.config))
    mine = engines(bed.spec(connector=ours(shared.socket, key_format="vllm"), **options))
    each_reads_what_the_other_wrote(cluster, answers, mine, theirs, 2 * (300 // BLOCK), 51, {0: None}, dcp=2)
    for engine in (mine, theirs):
        assert all(rank["faults"] == [] for rank in bed.report(engine))
        engine.stop()


# By layout of the bed: groups, keys of a prompt of 300 tokens, and options of an engine.
FULL, WINDOWED = 300 // BLOCK, -(-(WINDOW - 1) // BLOCK)
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "windows": (2, FULL + WINDOWED, {}),
    "chunks": (2, 2 * FULL, {}),
    "chunks in two of three layers": (3, 2 * FULL + WINDOWED, {"prepare": "tests.lab.hybrid:windows_among_chunks"}),
    "states": (2, FULL + 1, {}),
    "states and a window": (
        4,
        FULL + WINDOWED + 2,
        {"layout": "states", "prepare": "tests.lab.hybrid:windows_among_states"},
    ),
    "linear states": (2, FULL + 1, {"dtype": "bfloat16"}),
}
SHOWING = {
    "windows": [
        pytest.mark.shows("vLLM's own connector reads ours, and the reverse", "full attention and sliding windows")
    ],
    "chunks": [pytest.mark.shows("vLLM's own connector reads ours, and the reverse", "full attention and chunks")],
    "chunks in two of three layers": [
        pytest.mark.shows(
            "vLLM's own connector reads ours, and the reverse", "full attention, sliding windows and chunks"
        )
    ],
    "states": [
        RUNS_GRANITE,
        pytest.mark.shows("vLLM's own connector reads ours, and the reverse", "full attention and Mamba"),
    ],
    "states and a window": [
        RUNS_GRANITE,
        pytest.mark.shows(
            "vLLM's own connector reads ours, and the reverse", "full attention, sliding windows and Mamba"
        ),
    ],
    "linear states": [
        pytest.mark.shows("vLLM's own connector reads ours, and the reverse", "full attention and linear attention")
    ],
}


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=marks) for layout, marks in SHOWING.items()])
def test_of_several_groups_each_reads_what_the_other_wrote(
    cluster: Store, shared: Daemon, engines: Callable[..., Engine], layout: str
) -> None:
    """On the bed: each block that either loads is compared."""
    groups, stored, options = LAYOUTS[layout]
    plain = bed.spec(**{"layout": layout, **options})
    mine = engines(plain.but(kv_transfer=ours(shared.socket, key_format="vllm")))
    theirs = engines(plain.but(kv_transfer=upstream(), mooncake_config=cluster.config))
    seed = 100 + 10 * list(LAYOUTS).index(layout)  # two layouts have one model's name
    each_reads_what_the_other_wrote(cluster, answers, mine, theirs, stored, seed, dict.fromkeys(range(groups)))
    for each in (mine, theirs):
        assert bed.report(each)[0]["faults"] == []
        each.stop()
