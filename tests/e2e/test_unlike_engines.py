"""Engines with different KV, on one store and with one `cache_prefix`: each loads only its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Site, fingerprint, hits, served
from tests.lab.checkpoint import TINY, TINY_TP2, make_checkpoint
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts
from tests.support.compiler import needs_cxx

PROMPTS = make_prompts(4, 300, seed=2)
HITS = hits(PROMPTS)


def pair_of(differing: str, model: Path, folder: Path) -> tuple[EngineSpec, EngineSpec]:
    """Return two engines with blocks of one size and, in vLLM's format, the same keys."""
    one = EngineSpec(model=model)
    if differing == "weights":
        weights = folder / model.name
        make_checkpoint(folder / "written", replace(TINY, seed=1)).rename(weights)
        return one, one.but(model=weights)
    if differing == "config":
        rope: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
        return one, one.but(extra={"hf_overrides": rope})
    if differing == "dtype":
        return one.but(dtype="float16"), one.but(dtype="bfloat16")
    half = one.but(dtype="bfloat16")
    return half.but(extra={"kv_cache_dtype": "fp8_e4m3"}), half.but(extra={"kv_cache_dtype": "fp8_e5m2"})


@pytest.mark.shows("engines with other KV share nothing")
@pytest.mark.parametrize(
    "differing",
    # tests/connector/test_fingerprint.py shows each of the others without an engine.
    ["weights", *(pytest.param(each, marks=pytest.mark.stress) for each in ("config", "dtype", "kv_dtype"))],
)
def test_engines_whose_kv_differs_each_store_and_load_their_own(
    site: Site, engines: Callable[..., Engine], tmp_path: Path, differing: str
) -> None:
    transfer = ours(site.daemon.socket, cache_prefix=f"namespace-{differing}")
    one, spec = pair_of(differing, site.model, tmp_path)
    first = site.engine(one.but(kv_transfer=transfer))
    saved = first.run(PROMPTS).tokens
    site.fresh(first)
    assert first.run(PROMPTS).cached_tokens == HITS
    plain = engines(spec)
    right = plain.run(PROMPTS).tokens
    plain.stop()
    assert right != saved, "or it would not matter"
    second = site.engine(spec.but(kv_transfer=transfer))
    served(second.run(PROMPTS), right, [0] * len(PROMPTS))
    mine, theirs = fingerprint(first), fingerprint(second)
    assert mine[differing] != theirs[differing]
    for engine, tokens in ((second, right), (first, saved)):
        site.fresh(engine)
        served(engine.run(PROMPTS), tokens, HITS)
        engine.stop()


@pytest.mark.stress  # two engines of two ranks; a fingerprint's test tells these layouts apart
@pytest.mark.shows("engines with other KV share nothing")
@needs_cxx
def test_ranks_that_split_the_model_otherwise_share_nothing(site: Site, tmp_path: Path) -> None:
    """One rank, then two: the first rank's key in vLLM's format is the same."""
    model = make_checkpoint(tmp_path, TINY_TP2)
    one = site.engine(EngineSpec(model=model, kv_transfer=ours(site.daemon.socket)))
    right = one.run(PROMPTS).tokens
    site.fresh(one)
    one.stop()
    two = site.engine(EngineSpec(model=model, kv_transfer=ours(site.daemon.socket), tensor_parallel_size=2))
    for hit_tokens in ([0] * len(PROMPTS), HITS):
        served(two.run(PROMPTS), right, hit_tokens)
        site.fresh(two)
    two.stop()


# As vLLM 0.33 does: a field with a default in the specification of every layer's KV.
LATER_VLLM = """
import importlib.abc, importlib.machinery, sys

class Later(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        path = self.get_filename(name)
        field = b"    page_size_padded: int | None = None\\n"
        source = self.get_data(path)
        assert field in source
        return self.source_to_code(source.replace(field, field + b"    is_draft: bool = False\\n", 1), path)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.v1.kv_cache_interface":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = Later(name, spec.origin)
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.stress
@needs_cxx
def test_an_equal_engine_of_another_folder_after_a_restart_and_of_a_later_vllm_shares_what_is_stored(
    site: Site, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """Another folder, a restart, a later vLLM and a split into ranks with the same heads make no difference."""
    link = tmp_path / site.model.name
    link.symlink_to(site.model)
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "sitecustomize.py").write_text(LATER_VLLM)
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path / "later"), os.environ.get("PYTHONPATH")]))}
    with Daemon(memory="128MiB", staging="32MiB", disk=str(tmp_path / "disk")) as daemon:
        first = engines(EngineSpec(model=site.model, kv_transfer=ours(daemon.socket)))
        right = first.run(PROMPTS).tokens
        site.auditor.assert_idle(daemon.pid, daemon.socket)
        first.stop()
        assert daemon.sigterm(60) == 0
        daemon.start()
        transfer = ours(daemon.socket)
        second = engines(EngineSpec(model=link, kv_transfer=transfer, env=env, tensor_parallel_size=2))
        assert second.call("tests.e2e.probes:kv_spec_fields").count("is_draft") == 1
        served(second.run(PROMPTS), right, HITS)
        second.stop()
        assert daemon.sigterm(60) == 0
