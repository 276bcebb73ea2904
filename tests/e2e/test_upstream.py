"""With `key_format` "vllm" in a store of vLLM's own MooncakeStoreConnector: keys and bytes are equal.

Either connector reads what the other wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BLOCK, Site, each_reads_what_the_other_wrote
from tests.lab.bed import engine as bed
from tests.lab.connectors import ours, upstream
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
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
    each_reads_what_the_other_wrote(cluster, plain, mine, theirs, 300 // BLOCK, 21, {0: None})
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
    reference = engines(bed.spec(num_gpu_blocks=400))
    theirs = engines(bed.spec(connector=upstream(), **options).but(mooncake_config=cluster.config))
    mine = engines(bed.spec(connector=ours(shared.socket, key_format="vllm"), **options))
    each_reads_what_the_other_wrote(cluster, reference, mine, theirs, 2 * (300 // BLOCK), 51, {0: None}, dcp=2)
    for engine in (mine, theirs, reference):
        assert all(rank["faults"] == [] for rank in bed.report(engine))
        engine.stop()
