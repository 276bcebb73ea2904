"""Llama 4's keys have what its constructor makes of files and options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.llama4 import Llama4ForCausalLM

from tests.connector.test_identity import configured, keys
from tests.lab.hybrid import make_llama4


def test_llama_4_is_scaled_by_what_its_files_and_options_come_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines share exactly where vLLM's own constructor gives their layers the same. It builds no layers here."""

    def llama(name: str, **generation: Any) -> Path:
        path = make_llama4(tmp_path / name)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
        (path / "generation_config.json").write_text(json.dumps(generation))
        return path

    plain, tuned = llama("plain"), llama("tuned", attn_temperature_tuning=True)
    engines: tuple[tuple[Path, dict[str, Any]], ...] = (
        (plain, {}),
        (plain, {"max_model_len": 32_768}),
        (plain, {"max_model_len": 40_000}),
        (plain, {"override_generation_config": {"attn_temperature_tuning": True}}),
        (plain, {"generation_config": str(tuned)}),
        (tuned, {}),
        (tuned, {"override_generation_config": {"attn_temperature_tuning": False}}),
    )
    monkeypatch.setattr(LlamaForCausalLM, "__init__", lambda *args, **options: None)
    monkeypatch.setattr(Llama4ForCausalLM, "set_moe_parameters", lambda self: None)
    found: dict[bool, set[tuple[str, ...]]] = {False: set(), True: set()}
    for path, options in engines:
        config = configured(path, **options)
        name = keys(config)
        Llama4ForCausalLM(vllm_config=config)
        found[config.model_config.hf_config.attn_temperature_tuning].add(name)
    assert [len(each) for each in found.values()] == [1, 1]
    assert found[False] != found[True]
