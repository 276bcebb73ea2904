"""Tokens never change with models and features of unusual KV: tiny random models, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BLOCK, Site, fingerprint, hits, served, whole_blocks
from tests.lab.adapter import make_adapter
from tests.lab.hybrid import make_eagle
from tests.lab.prompts import make_prompts

pytestmark = pytest.mark.stress

PROMPTS = make_prompts(4, 300, seed=71)


def gemma(folder: Path) -> Path:
    """Sliding windows beside full attention with heads twice as wide."""
    import torch
    import transformers

    config = transformers.Gemma4TextConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=4096, sliding_window=2 * BLOCK,
        layer_types=["sliding_attention", "full_attention"] * 2, vocab_size_per_layer_input=2048,
        hidden_size_per_layer_input=16, per_layer_config={"01": {"head_dim": 128}, "03": {"head_dim": 128}},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
    model.save_pretrained(folder / "gemma")
    return folder / "gemma"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            "windows",
            marks=pytest.mark.shows("`--disable-hybrid-kv-cache-manager`", "full attention and sliding windows"),
        ),
        pytest.param("fp8 beside bfloat16", marks=pytest.mark.shows("FP8 KV")),
        pytest.param("n-gram drafts", marks=pytest.mark.shows("n-gram drafts")),
        pytest.param("eagle drafts", marks=pytest.mark.shows("EAGLE drafts")),
    ],
)
def test_loaded_tokens_equal_recomputed_ones(site: Site, tmp_path: Path, case: str) -> None:
    drafts = {"num_speculative_tokens": 2}
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "windows": lambda: {"model": gemma(tmp_path), "extra": {"disable_hybrid_kv_cache_manager": True}},
        "fp8 beside bfloat16": lambda: {
            "dtype": "bfloat16", "extra": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "2"]},
        },
        "n-gram drafts": lambda: {
            "extra": {"speculative_config": {"method": "ngram", "prompt_lookup_max": 3, **drafts}},
        },
        "eagle drafts": lambda: {
            "extra": {
                "speculative_config": {"method": "eagle", "model": str(make_eagle(tmp_path / "eagle")), **drafts},
            },
        },
    }  # fmt: skip
    engine = site.engine(site.spec(extra={"cache_prefix": case.replace(" ", "-")}).but(**made[case]()))
    assert ("draft" in fingerprint(engine)) == (case == "eagle drafts")
    dropped = BLOCK if case == "eagle drafts" else 0  # the drafter's KV of the last block depends on the next token
    first = engine.run(PROMPTS, max_tokens=48)
    assert first.cached_tokens == [0] * len(PROMPTS)
    site.fresh(engine)
    served(engine.run(PROMPTS, max_tokens=48), first.tokens, [whole_blocks(prompt) - dropped for prompt in PROMPTS])
    site.a_foreign_block_shows(engine, PROMPTS, first.tokens, max_tokens=48)
    site.assert_idle()
    engine.stop()


@pytest.mark.shows("LoRA")
def test_equal_tokens_with_another_adapter_have_their_own_kv(site: Site, tmp_path: Path) -> None:
    engine = site.engine(
        site.spec(extra={"cache_prefix": "adapters"}).but(
            extra={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
        )
    )
    adapters = [[name, at, make_adapter(tmp_path / name, at)] for at, name in ((1, "one"), (2, "two"))]
    plain = engine.run(PROMPTS)
    adapted = [engine.run(PROMPTS, request_options={"lora": each}) for each in adapters]
    for found in (plain, *adapted):
        assert found.cached_tokens == [0] * len(PROMPTS)
    every = [plain.tokens, *(found.tokens for found in adapted)]
    assert all(len({tuple(tokens) for tokens in three}) == 3 for three in zip(*every, strict=True))
    for options, want in zip(({}, {"lora": adapters[0]}, {"lora": adapters[1]}), every, strict=True):
        site.fresh(engine)
        served(engine.run(PROMPTS, request_options=options), want, hits(PROMPTS))
    site.assert_idle()
    engine.stop()
