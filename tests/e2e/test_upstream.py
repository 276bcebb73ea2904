"""With `key_format` "vllm" in a store of vLLM's own MooncakeStoreConnector: keys and bytes are equal.

Either connector reads what the other wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import PATIENT, hits, served
from tests.lab import control
from tests.lab.connectors import ours, upstream
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.auditor import Auditor
from tests.support.compiler import needs_cxx

OURS_FIRST = make_prompts(4, 300, seed=21)
UPSTREAM_FIRST = make_prompts(4, 300, seed=22)


@pytest.fixture(scope="module")
def daemon(cluster: Store, module_auditor: Auditor) -> Iterator[Daemon]:
    with Daemon(mooncake_config=cluster.config, staging="64MiB", extra=PATIENT) as daemon:
        yield daemon
        assert daemon.sigterm(30) == 0


@pytest.fixture(scope="module")
def mine(model: Path, daemon: Daemon, engines: Callable[..., Engine]) -> Engine:
    return engines(EngineSpec(model=model, kv_transfer=ours(daemon.socket, key_format="vllm")))


@pytest.fixture(scope="module")
def theirs(model: Path, cluster: Store, engines: Callable[..., Engine]) -> Engine:
    return engines(EngineSpec(model=model, kv_transfer=upstream(), mooncake_config=cluster.config))


def keys(model: Path, prompts: list[list[int]]) -> list[str]:
    return [key for prompt in prompts for key in control.block_keys(model, prompt)]


@pytest.mark.shows("vLLM's own connector reads ours, and the reverse")
def test_each_reads_what_the_other_wrote_with_equal_tokens(
    model: Path, cluster: Store, plain: Engine, mine: Engine, theirs: Engine
) -> None:
    before = 0
    for prompts, writer, reader in ((OURS_FIRST, mine, theirs), (UPSTREAM_FIRST, theirs, mine)):
        right = plain.run(prompts).tokens
        assert writer.run(prompts).tokens == right
        names = keys(model, prompts)
        before += len(names)
        assert cluster.wait_keys(before) == before
        served(reader.run(prompts), right, hits(prompts))


def test_both_write_the_same_bytes_under_the_same_keys(
    model: Path, cluster: Store, mine: Engine, theirs: Engine
) -> None:
    prompts = make_prompts(3, 200, seed=23)
    names = keys(model, prompts)
    digests = []
    for writer in (mine, theirs):
        assert writer.reset_prefix_cache()
        before = cluster.keys
        writer.run(prompts, concurrency=1)
        assert cluster.wait_keys(before + len(names)) == before + len(names)
        digests.append(control.read_digests(cluster.config, names))
        control.remove(cluster.config, names)
    assert None not in digests[0]
    assert digests[0] == digests[1]


@needs_cxx
def test_ranks_that_hold_the_same_heads_store_one_value_for_all(
    model: Path, cluster: Store, plain: Engine, theirs: Engine, daemon: Daemon, engines: Callable[..., Engine]
) -> None:
    """One KV head on two ranks: each saves its share of the blocks, and upstream's engine of one rank reads them all.

    Upstream's own engine of two ranks would bind each rank, and with it Mooncake's threads, to a core.
    """
    transfer = ours(daemon.socket, key_format="vllm")
    two = engines(EngineSpec(model=model, kv_transfer=transfer, tensor_parallel_size=2))
    before = cluster.keys
    for seed, writer, reader in ((25, two, theirs), (26, theirs, two)):
        prompts = make_prompts(3, 300, seed=seed)
        right = plain.run(prompts).tokens
        assert writer.run(prompts).tokens == right
        before += len(keys(model, prompts))
        assert cluster.wait_keys(before) == before
        assert None not in control.read_digests(cluster.config, keys(model, prompts))
        second = reader.run(prompts)
        assert second.cached_tokens == hits(prompts), f"written by {writer.spec.kv_transfer}"
        assert second.tokens == right
    two.stop()


def test_two_exchanged_values_change_the_tokens_of_both(
    model: Path, cluster: Store, plain: Engine, mine: Engine, theirs: Engine
) -> None:
    """The control: a comparison that cannot fail would pass here too."""
    prompts = make_prompts(2, 300, seed=24)
    right = plain.run(prompts).tokens
    before = cluster.keys
    mine.run(prompts)
    names = [control.block_keys(model, prompt) for prompt in prompts]
    wanted = before + sum(map(len, names))
    assert cluster.wait_keys(wanted) == wanted
    control.swap_values(cluster.config, names[0][1], names[1][1])
    for reader in (mine, theirs):
        assert reader.reset_prefix_cache()
        wrong = reader.run(prompts)
        assert min(wrong.cached_tokens) > 0
        assert all(got != want for got, want in zip(wrong.tokens, right, strict=True))
