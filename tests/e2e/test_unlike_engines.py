"""Engines with different KV, on one store and with one `cache_prefix`: each loads only its own.

Those of two vLLMs share what either stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vllm

from kvprefetch.connector.releases import TRIED
from tests.e2e.conftest import Site, fingerprint, hits, served
from tests.e2e.test_adapters import LORA, WARM
from tests.lab.adapter import make_adapter
from tests.lab.checkpoint import TINY, make_checkpoint
from tests.lab.connectors import ours
from tests.lab.engine import Engine, EngineSpec
from tests.lab.hybrid import make_llama4
from tests.lab.process import REPO
from tests.lab.prompts import make_prompts
from tests.support.command import kvprefetchd

PROMPTS = make_prompts(4, 300, seed=2)
HITS = hits(PROMPTS)
OTHERS = make_prompts(4, 300, seed=6)
INSTALLED = ".".join(vllm.__version__.split(".")[:2])


@pytest.mark.shows("engines with other KV share nothing")
def test_engines_whose_kv_differs_each_store_and_load_their_own(
    site: Site, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """Other weights, with blocks of one size and, in vLLM's format, the same keys.

    tests/connector/test_fingerprint.py shows all else that may differ without an engine.
    """
    transfer = ours(site.daemon.socket, cache_prefix="namespace-weights")
    weights = tmp_path / site.model.name
    make_checkpoint(tmp_path / "written", replace(TINY, seed=1)).rename(weights)
    one, spec = EngineSpec(model=site.model), EngineSpec(model=weights)
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
    assert fingerprint(first)["weights"] != fingerprint(second)["weights"]
    for engine, tokens in ((second, right), (first, saved)):
        site.fresh(engine)
        served(engine.run(PROMPTS), tokens, HITS)
        engine.stop()


@pytest.mark.shows("engines with other KV share nothing", "full attention and chunks")
def test_an_option_that_scales_queries_makes_another_engine(
    site: Site, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """Llama 4's files and weights are equal; its generation configuration decides what all later layers keep."""
    model = make_llama4(tmp_path / "llama4")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "floor_scale": 16, "attn_scale": 2.0}))
    transfer = ours(site.daemon.socket, cache_prefix="namespace-tuning")
    spec = EngineSpec(model=model)
    tuned = spec.but(extra={"override_generation_config": {"attn_temperature_tuning": True}})
    plain = engines(tuned)
    right = plain.run(PROMPTS).tokens
    plain.stop()
    first = site.engine(spec.but(kv_transfer=transfer))
    assert first.run(PROMPTS).tokens != right, "or it would not matter"
    site.fresh(first)
    second = site.engine(tuned.but(kv_transfer=transfer))
    served(second.run(PROMPTS), right, [0] * len(PROMPTS))
    site.fresh(second)
    assert min(served(second.run(PROMPTS), right).cached_tokens) > 0
    for engine, scaled in ((first, False), (second, True)):
        assert engine.call("tests.e2e.probes:scales_queries") == [scaled]
        assert json.loads(fingerprint(engine)["attn_temperature_tuning"]) is scaled
    first.stop()
    second.stop()


def test_explain_names_what_keeps_an_engine_from_what_another_stored(site: Site, tmp_path: Path) -> None:
    """One thing differs from the engine that stored the prompt, each time another one."""
    transfer, weights = ours(site.daemon.socket, cache_prefix="why"), tmp_path / site.model.name
    make_checkpoint(tmp_path / "written", replace(TINY, seed=1)).rename(weights)
    spec = EngineSpec(model=site.model, kv_transfer=transfer)
    adapter = {"lora": ["sql", 1, make_adapter(tmp_path / "sql", 0)]}
    unlike: dict[str, tuple[EngineSpec, dict[str, Any]]] = {
        "dtype (ours bfloat16, its float32)": (spec.but(dtype="bfloat16"), {}),
        "weights (ours ": (spec.but(model=weights), {}),
        "block_size (ours 64, its 32)": (spec.but(block_size=64), {}),
        "PYTHONHASHSEED (ours set: ": (spec.but(env={"PYTHONHASHSEED": "7"}), {}),
        "Only requests with the same adapter have its hashes.": (spec.but(extra=LORA), adapter),
    }
    first = site.engine(spec)
    first.run(PROMPTS[:1])
    site.assert_idle()
    for words, (other, options) in unlike.items():
        engine = site.engine(other)
        if options:
            engine.run(WARM, request_options=options)  # a step in which the worker reads the adapter
        engine.run(PROMPTS[:1], request_options=options)
        site.assert_idle()
        line = site.daemon.records("request.done")[-1]
        assert (line["outcome"], line["found_blocks"]) == ("miss", 0)
        told = kvprefetchd("explain", line["request_id"], "--socket", site.daemon.socket, given=json.dumps(line))
        assert words in told.stdout, told
        engine.stop()
    first.stop()


@pytest.mark.shows("one release loads what another stored")
@pytest.mark.parametrize("series", [each for each in TRIED if each != INSTALLED])
def test_what_one_release_stored_another_loads(site: Site, series: str) -> None:
    """Both ways, with equal tokens: the fingerprints are equal."""
    python = REPO / "build" / "vllm" / series / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment with vLLM {series} (`make test-vllm-versions` builds it)")
    spec = EngineSpec(model=site.model, kv_transfer=ours(site.daemon.socket, cache_prefix=f"vllm-{series}"))
    mine, theirs = site.engine(spec), site.engine(spec.but(python=python))
    assert theirs.call("tests.e2e.probes:vllm_version").startswith(f"{series}.")
    for first, second, prompts in ((mine, theirs, PROMPTS), (theirs, mine, OTHERS)):
        right = first.run(prompts).tokens
        site.fresh(first)
        served(second.run(prompts), right, hits(prompts))
    assert fingerprint(mine) == fingerprint(theirs)
    mine.stop()
    theirs.stop()
