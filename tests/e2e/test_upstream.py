"""With `key_format` "vllm" in a store of vLLM's own MooncakeStoreConnector: keys and bytes are equal.

Either connector reads what the other wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, Site, each_reads_what_the_other_wrote, hits, served
from tests.lab import control
from tests.lab.connectors import ours, upstream
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.auditor import Auditor
from tests.support.compiler import needs_cxx


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


@pytest.mark.stress  # as test_tokens, whose two ranks are in the default run
@needs_cxx
def test_ranks_that_hold_the_same_heads_store_one_value_for_all(
    model: Path, cluster: Store, plain: Engine, theirs: Engine, shared: Daemon, engines: Callable[..., Engine]
) -> None:
    """One KV head on two ranks: each saves its share of the blocks, and upstream's engine of one rank reads them all.

    Upstream's own engine of two ranks would bind each rank, and with it Mooncake's threads, to a core.
    """
    transfer = ours(shared.socket, key_format="vllm")
    two = engines(EngineSpec(model=model, kv_transfer=transfer, tensor_parallel_size=2))
    before = cluster.keys
    for seed, writer, reader in ((25, two, theirs), (26, theirs, two)):
        prompts = make_prompts(3, 300, seed=seed)
        right = plain.run(prompts).tokens
        assert writer.run(prompts).tokens == right
        keys = [key for prompt in prompts for key in control.block_keys(model, prompt)]
        before += len(keys)
        assert cluster.wait_keys(before) == before
        assert None not in control.read_digests(cluster.config, keys)
        served(reader.run(prompts), right, hits(prompts))
    two.stop()
