"""Engines whose KV differs on one key prefix: each has its own tokens, whatever the other one stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.checkpoint import TINY, TINY_TP2, make_checkpoint
from benchmarks.lab.connectors import ours
from benchmarks.lab.daemon import Daemon
from benchmarks.lab.engine import Engine, EngineSpec
from benchmarks.lab.prompts import make_prompts
from tests.e2e.conftest import Site, whole_blocks

PROMPTS = make_prompts(4, 300, seed=2)


def pair_of(differing: str, model: Path, folder: Path) -> tuple[EngineSpec, EngineSpec]:
    """Engines of which one finds what the other stored under its own keys, of the right size."""
    one = EngineSpec(model=model)
    if differing == "weights":
        weights = folder / model.name
        make_checkpoint(folder / "written", TINY, seed=1).rename(weights)
        return one, one.but(model=weights)
    if differing == "config":
        rope: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
        return one, one.but(extra={"hf_overrides": rope})
    if differing == "dtype":
        return one.but(dtype="float16"), one.but(dtype="bfloat16")
    half = one.but(dtype="bfloat16")
    return half.but(extra={"kv_cache_dtype": "fp8_e4m3"}), half.but(extra={"kv_cache_dtype": "fp8_e5m2"})


@pytest.mark.parametrize("differing", ["weights", "config", "dtype", "kv_dtype"])
def test_an_engine_loads_nothing_that_one_unlike_it_stored(
    site: Site, engines: Callable[..., Engine], tmp_path: Path, differing: str
) -> None:
    transfer = ours(site.daemon.socket, cache_prefix=f"namespace-{differing}")
    one, spec = pair_of(differing, site.model, tmp_path)
    first = site.engine(one.but(kv_transfer=transfer))
    saved = first.run(PROMPTS).tokens
    site.fresh(first)
    assert first.run(PROMPTS).cached_tokens == [whole_blocks(prompt) for prompt in PROMPTS]
    plain = engines(spec)
    right = plain.run(PROMPTS).tokens
    plain.stop()
    assert right != saved, "or it would not matter"
    before = len(site.daemon.records("namespace.refused"))
    second = site.engine(spec.but(kv_transfer=transfer))
    got = second.run(PROMPTS)
    assert got.tokens == right
    assert got.cached_tokens == [0] * len(PROMPTS)
    [line] = site.daemon.records("namespace.refused")[before:]
    assert f"{differing}=" in line["differences"]
    assert second.reset_prefix_cache()
    assert second.run(PROMPTS).cached_tokens == [0] * len(PROMPTS), "nothing of its own was stored either"
    second.stop()
    site.fresh(first)
    again = first.run(PROMPTS)
    assert again.tokens == saved
    assert again.cached_tokens == [whole_blocks(prompt) for prompt in PROMPTS]
    first.stop()


def test_ranks_that_split_the_model_otherwise_share_nothing(site: Site, tmp_path: Path) -> None:
    """One rank, then two: the first rank's key is the same."""
    model = make_checkpoint(tmp_path, TINY_TP2)
    one = site.engine(EngineSpec(model=model, kv_transfer=ours(site.daemon.socket)))
    right = one.run(PROMPTS).tokens
    site.fresh(one)
    one.stop()
    before = len(site.daemon.records("namespace.refused"))
    two = site.engine(EngineSpec(model=model, kv_transfer=ours(site.daemon.socket), tensor_parallel_size=2))
    assert two.run(PROMPTS).tokens == right
    [line] = site.daemon.records("namespace.refused")[before:]
    assert "tp_shards=1 here=2" in line["differences"]
    two.stop()


def test_an_equal_engine_on_another_folder_and_after_a_restart_shares_what_is_stored(
    site: Site, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """Where the weights lie, and by what symbolic link, is no difference; nor is the daemon's life."""
    link = tmp_path / site.model.name
    link.symlink_to(site.model)
    with Daemon(memory="128MiB", staging="32MiB", disk=str(tmp_path / "disk")) as daemon:
        first = engines(EngineSpec(model=site.model, kv_transfer=ours(daemon.socket)))
        right = first.run(PROMPTS).tokens
        site.auditor.assert_idle(daemon.pid, daemon.socket)
        first.stop()
        assert daemon.sigterm(60) == 0
        daemon.start()
        second = engines(EngineSpec(model=link, kv_transfer=ours(daemon.socket)))
        got = second.run(PROMPTS)
        assert got.tokens == right
        assert got.cached_tokens == [whole_blocks(prompt) for prompt in PROMPTS]
        second.stop()
        assert daemon.sigterm(60) == 0
