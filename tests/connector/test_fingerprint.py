"""What of an engine its fingerprint has, and what it leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlavaConfig, PretrainedConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from kvprefetch.connector import fingerprint
from kvprefetch.connector.fingerprint import PAGE_BYTES, PAGES, of_engine, of_weights, sample
from kvprefetch.connector.keys import RankKeys

HEADS, TOKENS, WIDTH = 2, 32, 16


def spec(**changes: Any) -> FullAttentionSpec:
    fields: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**fields, **changes})


def engine(*, layers: tuple[str, ...] = ("a", "b"), **changes: Any) -> dict[str, str]:
    """The fingerprint of an engine that differs in this from the others."""
    isa, put_factor = changes.pop("isa", "amx"), changes.pop("put_factor", 1)
    cache_dtype = changes.pop("cache_dtype", "auto")
    one = changes.pop("spec", spec())
    served = changes.pop("served", one)
    caches = changes.pop("caches", torch.zeros(4, HEADS, one.block_size, WIDTH))
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **changes.pop("parallel", {})}
    model = {
        "dtype": torch.bfloat16, "quantization": None, "max_model_len": 512,
        "hf_config": LlamaConfig(hidden_size=64, num_hidden_layers=2), "multimodal_config": None, **changes,
    }  # fmt: skip
    backend = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa=isa)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**model), parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(layers, backend)),
    )  # fmt: skip
    group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=served)
    kv: Any = SimpleNamespace(kv_cache_groups=[group])
    keys = RankKeys("k@", put_factor, 0)
    return of_engine(config, kv, 0, keys, dict.fromkeys(layers, caches))


def differing(**changes: Any) -> set[str]:
    mine, theirs = engine(), engine(**changes)
    return {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"dtype": torch.float16}, {"dtype"}),
        ({"quantization": "fp8"}, {"quantization"}),
        ({"parallel": {"tensor_parallel_size": 2}}, {"tp_shards"}),
        ({"parallel": {"pipeline_parallel_size": 2}}, {"pp_size"}),
        ({"layers": ("a", "c")}, {"layers"}),
        ({"layers": ("b", "a")}, {"layers"}),
        ({"spec": spec(dtype=torch.float16)}, {"kv_dtype"}),
        ({"spec": spec(sliding_window=128)}, {"layers"}),
        ({"spec": spec(num_kv_heads=4, head_size=4)}, {"layers"}),
        ({"caches": torch.zeros(4, TOKENS, HEADS, WIDTH).transpose(1, 2)}, {"layout"}),
        ({"isa": "vec"}, {"attention"}),
        ({"multimodal_config": SimpleNamespace(mm_processor_kwargs={"max_pixels": 7})}, {"config"}),
        ({"hf_config": LlamaConfig(hidden_size=64, num_hidden_layers=2, rms_norm_eps=1e-5)}, {"config"}),
    ],
)
def test_what_the_bytes_depend_on_makes_a_difference(changes: dict[str, Any], names: set[str]) -> None:
    assert differing(**changes) == names


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 4096},
        {"cache_dtype": "bfloat16"},
        {"parallel": {"tensor_parallel_size": 2}, "put_factor": 2},  # both ranks hold all of it
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs=None, media_io_kwargs={}, limit_per_prompt=7)},
        {"spec": spec(block_size=64)},  # whose hashes are others
        {"hf_config": LlamaConfig(hidden_size=64, num_hidden_layers=2, use_cache=False, name_or_path="/elsewhere")},
        {"served": UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={"a": spec(), "b": spec()})},
    ],
)
def test_what_they_do_not_depend_on_makes_none(changes: dict[str, Any]) -> None:
    assert differing(**changes) == set()


def test_kinds_of_quantized_kv_are_told_apart() -> None:
    quantized = [
        engine(spec=spec(dtype=torch.uint8), cache_dtype=kind) for kind in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
    ]
    assert [each["kv_dtype"] for each in quantized] == ["fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "nvfp4"]


def test_a_dimension_of_one_element_may_lie_anywhere() -> None:
    one = {"spec": spec(num_kv_heads=1)}
    tokens_first = torch.zeros(4, TOKENS, 1, WIDTH).transpose(1, 2)
    heads_first = torch.zeros(4, 1, TOKENS, WIDTH)
    assert engine(**one, caches=tokens_first) == engine(**one, caches=heads_first)


def test_with_long_rope_the_factors_follow_from_the_length() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 4, "short_factor": [1.0] * 4,
            "original_max_position_embeddings": 512}  # fmt: skip
    config = LlamaConfig(hidden_size=64, num_attention_heads=8, rope_parameters=rope)
    assert engine(hf_config=config) != engine(hf_config=config, max_model_len=4096)


class Odd(PretrainedConfig):
    """As a model's own code may have one: it cannot be made without arguments, and holds what JSON cannot."""

    model_type = "odd"

    def __init__(self, **fields: Any) -> None:
        self.width = fields.pop("width")
        self.kinds = set(fields.pop("kinds"))
        self.maker = object()
        super().__init__(**fields)


def test_a_configuration_of_a_model_s_own_code_is_told_as_well_and_alike_by_every_process() -> None:
    program = (
        "from tests.connector.test_fingerprint import Odd, engine; "
        "print(engine(hf_config=Odd(width=1, kinds='abcdef'))['config'])"
    )
    seen = {
        subprocess.check_output([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert engine(hf_config=Odd(width=1, kinds="a")) != engine(hf_config=Odd(width=1, kinds="b"))
    assert engine(hf_config=Odd(width=1, kinds="a")) != engine(hf_config=Odd(width=2, kinds="a"))


def test_a_configuration_within_another_is_told_without_where_it_is_from() -> None:
    def within(**changes: Any) -> dict[str, str]:
        text = {"model_type": "llama", "hidden_size": 64, **changes}
        return engine(hf_config=LlavaConfig(text_config=text))

    assert within() == within(_name_or_path="/elsewhere", dtype="float16", transformers_version="1")
    assert within() != within(hidden_size=128)


def test_every_value_fits_the_hello() -> None:
    from kvprefetch.shmring.messages import WorkerShape

    found = engine(quantization="q" * 200)
    WorkerShape(block_bytes=1, key_prefix="k", put_factor=1, put_turn=0, fingerprint={**found, "weights": "0" * 16})


# --- weights ----------------------------------------------------------------------------------------------------------


def weights_of(folder: Path, load_format: str = "auto") -> dict[str, str]:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), revision=None),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )
    return of_weights(config)


def test_of_large_files_pages_all_over_them_count(tmp_path: Path) -> None:
    files = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for file in files:
        file.write_bytes(os.urandom(PAGES * PAGE_BYTES))
    before = sample(files)
    assert sample(files) == before
    step = 2 * PAGE_BYTES
    for place in (0, 100 * step, (PAGES - 1) * step):
        file, at = (files[0], place) if place < PAGES * PAGE_BYTES else (files[1], place - PAGES * PAGE_BYTES)
        content = file.read_bytes()
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert sample(files) != before
        file.write_bytes(content)
    assert sample(files) == before
    files[1].write_bytes(files[1].read_bytes() + b"x")
    assert sample(files) != before, "and their sizes"


def test_of_small_files_every_byte_counts(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    content = os.urandom(3 * PAGE_BYTES + 17)
    found = set()
    for at in range(0, len(content), 97):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        found.add(sample([file]))
    assert len(found) == len(range(0, len(content), 97))


def test_the_files_are_those_that_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "consolidated.safetensors").write_bytes(b"mistral's own")
    alone = weights_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"a")
    (tmp_path / "pytorch_model.bin").write_bytes(b"b")
    both = weights_of(tmp_path)
    assert alone != both
    (tmp_path / "pytorch_model.bin").write_bytes(b"c")
    (tmp_path / "consolidated.safetensors").write_bytes(b"d")
    assert weights_of(tmp_path) == both
    assert weights_of(tmp_path / "model.safetensors").keys() == {"weights"}


def test_a_model_by_its_name_is_found_where_it_was_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "models--someone--a-model"
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("0" * 40)
    (snapshot / "model.safetensors").write_bytes(b"a")
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="someone/a-model", revision=None),
        load_config=SimpleNamespace(load_format="auto", download_dir=str(tmp_path)),
    )
    assert of_weights(config) == weights_of(snapshot)


def test_nothing_is_said_of_weights_that_are_not_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert weights_of(tmp_path) == {}
    assert weights_of(Path("someone/a-model-that-is-not-here")) == {}
    assert weights_of(tmp_path, "dummy") == {"weights": "dummy"}
    (tmp_path / "model.safetensors").write_bytes(b"a")
    monkeypatch.setattr(fingerprint, "sample", lambda _: (_ for _ in ()).throw(OSError("gone")))
    assert weights_of(tmp_path) == {}
