"""The parts of an engine that its fingerprint covers, and those that it leaves out."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterator
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.config.speculative import SpeculativeConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvprefetch.connector.copy.paged import PagedCache
from kvprefetch.connector.engine import groups
from kvprefetch.connector.identity import fingerprint
from kvprefetch.kv.groups import Group, Groups, Kind
from tests.connector.test_checkpoint import write_tensors

BLOCKS, HEADS, TOKENS, WIDTH = 4, 2, 32, 16
ONE_GROUP = Groups((Group(Kind.FULL, TOKENS),), TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def write_model(folder: Path, size: int = 64, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, **config}))
    (folder / "preprocessor_config.json").write_text("{}")
    write_tensors(folder / "model.safetensors", {"norm": size})
    return folder


def spec(**changes: Any) -> FullAttentionSpec:
    fields: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": 8, "dtype": torch.bfloat16}
    return FullAttentionSpec(**{**fields, **changes})


def context(ranks: int, interleave: int = 1) -> dict[str, int]:
    """Options of an engine in which so many ranks share the tokens of a block, in runs of so many."""
    return {"decode_context_parallel_size": ranks, "cp_kv_cache_interleave_size": interleave}


def running(*, layers: tuple[str, ...] = ("a", "b"), **changes: Any) -> dict[str, str]:
    """A rank's part of the fingerprint of an engine with these differences."""
    isa, replicas = changes.pop("isa", "amx"), changes.pop("replicas", 1)
    one = changes.pop("spec", spec())
    served = changes.pop("served", one)
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **context(1), **changes.pop("parallel", {})}
    backend = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa=isa)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(cache_dtype=changes.pop("cache_dtype", "auto")),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(layers, backend)),
    )
    kv: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=list(layers), kv_cache_spec=served)])
    layout, written = changes.pop("layout", "1:2,2:32,3:16"), changes.pop("written", [])
    assert not changes
    return fingerprint.of_engine(config, kv, rules=ONE_GROUP, replicas=replicas, layout=layout, written=written)


def grouped(*members: tuple[Any, tuple[str, ...]], hash_tokens: int = TOKENS) -> dict[str, str]:
    """A rank's part of the fingerprint of an engine with these groups: their specification and layers."""
    made = [KVCacheGroupSpec(list(layers), one) for one, layers in members]
    kv = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=made)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, **context(1)),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    rules = groups.of_engine(kv, hash_tokens, drafts=False)
    return fingerprint.of_engine(config, kv, rules=rules, replicas=1, layout="1:2")


def model_config(folder: Path | str, **changes: Any) -> SimpleNamespace:
    fields = {
        "model": str(folder),
        "revision": None,
        "model_weights": "",
        "hf_config_path": None,
        "code_revision": None,
        "trust_remote_code": False,
        "architecture": "LlamaForCausalLM",
        "dtype": torch.bfloat16,
        "quantization": None,
        "quantization_config": None,
        "model_class_overrides": {},
        "hf_overrides": {},
        "hf_config": LlamaConfig(),
        "multimodal_config": None,
        "config_format": "auto",
        "tokenizer": None,
        "max_model_len": 512,
        **changes,
    }
    return SimpleNamespace(**fields)


def described(folder: Path | str, *, load_format: str = "auto", draft: Any = None, **changes: Any) -> Any:
    """The configuration of an engine that serves this model, as far as the fingerprint reads it."""
    return SimpleNamespace(
        model_config=model_config(folder, **changes),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        speculative_config=None if draft is None else SimpleNamespace(draft_model_config=draft, draft_load_config=None),
    )


def loaded(folder: Path | str, *, since_ns: int | None = None, **changes: Any) -> dict[str, str]:
    """The part of the fingerprint that files and options decide, of an engine that serves this model."""
    return fingerprint.of_model(described(folder, **changes), time.time_ns() if since_ns is None else since_ns)


def window(**changes: Any) -> SlidingWindowSpec:
    fields: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": 8, "dtype": torch.bfloat16}
    return SlidingWindowSpec(**{**fields, "sliding_window": 64, **changes})


def state(**changes: Any) -> MambaSpec:
    fields: dict[str, Any] = {"block_size": TOKENS, "shapes": ((4,), (2, 2)), "dtypes": (torch.bfloat16, torch.float32)}
    return MambaSpec(**{**fields, "mamba_cache_mode": "align", **changes})


def differing(mine: dict[str, str], theirs: dict[str, str]) -> set[str]:
    return {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}


# --- what the running rank knows --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"parallel": {"tensor_parallel_size": 2}}, {"tp_shards"}),
        ({"parallel": {"pipeline_parallel_size": 2}}, {"pp_size"}),
        ({"parallel": context(2)}, {"dcp"}),
        ({"layers": ("a", "c")}, {"layers"}),
        ({"spec": spec(dtype=torch.float16)}, {"kv_dtype"}),
        ({"spec": spec(sliding_window=128)}, {"layers"}),
        ({"spec": spec(tokens_per_state=Fraction(1, 2))}, {"layers"}),
        ({"spec": spec(kv_quant_mode=KVQuantMode.NVFP4)}, {"layers"}),
        ({"spec": spec(num_kv_heads=4, head_size=4)}, {"layers"}),
        ({"layout": "2:32,1:2,3:16"}, {"layout"}),
        ({"written": [[0, 512]]}, {"written"}),
        ({"isa": "vec"}, {"attention"}),
    ],
)
def test_what_the_bytes_depend_on_makes_a_difference(changes: dict[str, Any], names: set[str]) -> None:
    assert differing(running(), running(**changes)) == names


def test_engines_whose_ranks_have_other_tokens_of_a_block_share_nothing() -> None:
    """As many ranks and equal blocks: only the interleaving says which tokens, or a layer that each rank has whole."""
    whole = spec(dcp_sharded=False)
    engines: tuple[dict[str, Any], ...] = (
        {"parallel": context(2)},
        {"parallel": context(2, 16)},
        {"parallel": context(4)},
        {"parallel": context(2), "served": whole, "spec": whole},
    )
    found = [running(**each) for each in engines]
    assert all(differing(found[0], other) == {"dcp"} for other in found[1:])
    assert len({fingerprint.digest(each) for each in found}) == len(engines)


@pytest.mark.parametrize(
    ("members", "names"),
    [
        (((spec(), ("a", "b")), (window(), ("c", "d"))), set()),
        (((spec(), ("a", "b")), (window(extra_retained_tokens=3), ("c", "d"))), {"groups"}),
        (((spec(), ("a", "b")), (window(sliding_window=96), ("c", "d"))), {"groups", "layers"}),
        (((spec(), ("a", "b")), (window(), ("c",)), (window(), ("d",))), {"groups"}),
        (((window(), ("c", "d")), (spec(), ("a", "b"))), {"groups", "layers"}),
        (((spec(), ("a", "b")), (state(), ("c", "d"))), {"groups", "kv_dtype", "layers"}),
        (((spec(), ("a", "b", "c", "d")),), {"groups", "layers"}),
    ],
)
def test_groups_that_differ_in_their_bytes_or_rules_make_a_difference(members: Any, names: set[str]) -> None:
    assert differing(grouped((spec(), ("a", "b")), (window(), ("c", "d"))), grouped(*members)) == names


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"dtypes": (torch.bfloat16, torch.bfloat16)}, {"groups", "kv_dtype"}),
        ({"shapes": ((2, 2), (4,))}, {"layers"}),
        ({"mamba_type": MambaAttentionBackendEnum.GDN_ATTN}, {"layers"}),
    ],
)
def test_states_that_differ_make_a_difference(changes: dict[str, Any], names: set[str]) -> None:
    found = [grouped((spec(), ("a", "b")), (one, ("c", "d"))) for one in (state(), state(**changes))]
    assert differing(*found) == names


def test_hashes_of_other_lengths_make_a_difference() -> None:
    found = [grouped((spec(), ("a",)), (window(), ("b",)), hash_tokens=tokens) for tokens in (TOKENS, TOKENS // 2)]
    assert differing(*found) == {"groups"}


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_dtype": "bfloat16"},
        {"parallel": {"tensor_parallel_size": 2}, "replicas": 2},  # both ranks hold all of it
        {"spec": spec(block_size=64)},  # its hashes are others
        {"served": UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs={"a": spec(), "b": spec()})},
    ],
)
def test_what_they_do_not_depend_on_makes_none(changes: dict[str, Any]) -> None:
    assert running() == running(**changes)


DEFAULTS = {"rotated": False, "kind": None, "buffer": 8}


def test_a_field_that_no_list_has_makes_a_difference_once_it_is_not_its_default() -> None:
    """A later vLLM's: nobody has looked at what it does to the bytes. With a default it shares what this one stored."""
    fields = [(name, "Any", dataclasses.field(default=value)) for name, value in DEFAULTS.items()]
    later = dataclasses.make_dataclass(
        "FullAttentionSpec", fields, bases=(FullAttentionSpec,), frozen=True, kw_only=True
    )
    values: dict[str, Any] = {"block_size": TOKENS, "num_kv_heads": HEADS, "head_size": 8, "dtype": torch.bfloat16}
    assert running(spec=later(**values)) == running()
    assert differing(running(spec=later(**values, rotated=True)), running()) == {"layers"}
    with pytest.raises(TypeError, match="cannot be compared: type=object"):
        running(spec=later(**values, kind=object()))


def test_kinds_of_quantized_kv_are_told_apart() -> None:
    quantized = [
        running(spec=spec(dtype=torch.uint8), cache_dtype=kind) for kind in ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
    ]
    assert [each["kv_dtype"] for each in quantized] == ["fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "nvfp4"]


def test_a_byte_of_fp8_means_another_value_on_mi300(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized: dict[str, Any] = {"spec": spec(dtype=torch.uint8), "cache_dtype": "fp8"}
    plain, unquantized = running(**quantized), running()
    monkeypatch.setattr(current_platform, "is_fp8_fnuz", lambda: True)
    assert differing(plain, running(**quantized)) == {"kv_dtype"}
    assert running() == unquantized


def test_a_layout_is_the_order_of_a_block_s_dimensions_in_memory() -> None:
    def layout(cache: torch.Tensor) -> str:
        return PagedCache({"a": cache}, ["a"], BLOCKS).layout

    heads_first = layout(torch.zeros(BLOCKS, HEADS, TOKENS, WIDTH))
    tokens_first = layout(torch.zeros(BLOCKS, TOKENS, HEADS, WIDTH).transpose(1, 2))
    split = layout(torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, WIDTH))
    assert (heads_first, tokens_first, split) == ("1:2,2:32,3:16", "2:32,1:2,3:16", "1:2,2:2,3:16,4:16")
    one_head = torch.zeros(BLOCKS, TOKENS, 1, WIDTH).transpose(1, 2)
    assert layout(one_head) == layout(torch.zeros(BLOCKS, 1, TOKENS, WIDTH)), "one element may lie anywhere"


# --- what the model's files and options say ---------------------------------------------------------------------------


def media(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"mm_processor_kwargs": None, "media_io_kwargs": {}, "limit_per_prompt": 7, **options})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"dtype": torch.float16}, {"dtype"}),
        ({"quantization": "fp8"}, {"quantization"}),
        ({"quantization_config": {"linear": "fp8"}}, {"config"}),
        ({"quantization_config": QuantizationConfigArgs(linear="fp8_per_tensor")}, {"config"}),  # type: ignore[arg-type]
        ({"architecture": "TransformersForCausalLM"}, {"architecture"}),
        ({"hf_overrides": {"rope_parameters": {"rope_theta": 500.0}}}, {"config"}),
        ({"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}}, {"config"}),
    ],
)
def test_an_option_that_decides_bytes_makes_a_difference(model: Path, changes: dict[str, Any], names: set[str]) -> None:
    assert differing(loaded(model), loaded(model, **changes)) == names


def test_an_option_that_decides_none_makes_none(model: Path) -> None:
    assert loaded(model, max_model_len=4096) == loaded(model)
    later = LlamaConfig(hidden_size=128, new_in_this_release=7)
    assert loaded(model, hf_config=later) == loaded(model), "the model's file counts, not what a library makes of it"


def test_what_becomes_of_an_image_makes_a_difference(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    plain = loaded(folder, multimodal_config=media())
    assert plain == loaded(folder, multimodal_config=media(limit_per_prompt=8))
    for options in (
        {"mm_processor_kwargs": {"max_pixels": 7}},
        {"media_io_kwargs": {"video": {"num_frames": 3}}},
        {"video_pruning_rate": 0.5, "video_pruning_method": "evs"},
    ):
        assert differing(plain, loaded(folder, multimodal_config=media(**options))) == {"config"}
    text = loaded(folder)
    (folder / "preprocessor_config.json").write_text('{"do_resize": false}')
    assert differing(plain, loaded(folder, multimodal_config=media())) == {"config"}
    assert loaded(folder) == text


def test_files_make_a_difference(model: Path, tmp_path: Path) -> None:
    plain = loaded(model)
    assert loaded(write_model(tmp_path / "equal")) == plain, "wherever they lie"
    assert differing(plain, loaded(write_model(tmp_path / "weights", size=128))) == {"weights"}
    assert differing(plain, loaded(write_model(tmp_path / "config", rope_theta=5.0))) == {"config"}
    assert differing(plain, loaded(model, hf_config_path=str(tmp_path / "config"))) == {"config"}
    tower = LlamaConfig(audio_model_id=str(tmp_path / "weights"))
    assert differing(plain, loaded(model, hf_config=tower)) == {"config", "weights"}, "loaded with the model's"


def test_code_counts_where_it_is_trusted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    before, trusted = loaded(folder), loaded(folder, trust_remote_code=True)
    assert differing(before, trusted) == {"code"}
    (folder / "modeling_mine.py").write_text("x = 1")
    assert loaded(folder) == before
    assert differing(trusted, loaded(folder, trust_remote_code=True)) == {"code"}


def test_a_draft_model_counts_as_a_model_does(model: Path, tmp_path: Path) -> None:
    """Its layers are in the block. vLLM's own function is among its overrides."""
    folder, other = write_model(tmp_path / "draft"), write_model(tmp_path / "other", size=128)
    overrides = SpeculativeConfig.hf_config_override
    later = functools.partial(overrides, transformers_mtp_overrides=None)  # vLLM 0.33's
    found = [loaded(model, draft=model_config(each, hf_overrides=overrides)) for each in (folder, other)]
    assert differing(loaded(model), found[0]) == differing(*found) == {"draft"}
    assert loaded(model, draft=model_config(folder, hf_overrides=later)) == found[0]
    given = functools.partial(overrides, transformers_mtp_overrides={"n_predict": 2})
    assert loaded(model, draft=model_config(folder, hf_overrides=given)) != found[0]
    assert loaded(model, draft=model_config(model)) == loaded(model), "what comes with the model is in its files"


def test_with_long_rope_the_factors_follow_from_the_length(model: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": [1.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 512,
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=8, rope_parameters=rope)
    assert loaded(model, hf_config=config) != loaded(model, hf_config=config, max_model_len=4096)


class Odd(Enum):
    ONE = 1


def test_values_that_json_has_no_word_for_are_the_same_in_every_process() -> None:
    value: Any = {"dtype": torch.float16, "kinds": {"a", "b"}, "odd": Odd.ONE}
    plain: Any = {"dtype": "torch.float16", "kinds": ["a", "b"], "odd": "ONE"}
    assert fingerprint.digest(value) == fingerprint.digest(plain)


def unknown(model: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "hf_overrides is a function", {"hf_overrides": lambda config: config}
    yield "hf_overrides is a function", {"hf_overrides": functools.partial(SpeculativeConfig.hf_config_override, len)}
    yield "cannot be compared: type=object", {"hf_overrides": {"width": object()}}
    yield "not files of the model's folder: load_format=dummy", {"load_format": "dummy"}
    yield "not files of the model's folder: model_weights=s3://", {"model_weights": "s3://bucket/model"}
    yield "No such file", {"multimodal_config": media(mm_encoder_fp8_scale_path=str(model / "none.json"))}


def test_what_cannot_be_known_is_an_error(model: Path) -> None:
    for error, changes in unknown(model):
        with pytest.raises(Exception, match=error):
            loaded(model, **changes)


def test_every_value_fits_a_line_of_the_log() -> None:
    found = fingerprint.fitting({"quantization": "q" * 200, "architecture": "größer", "layout": "", "dtype": "float16"})
    assert {"dtype": "float16", "layout": ""}.items() <= found.items()
    assert found["quantization"] != fingerprint.fitting({"quantization": "q" * 201})["quantization"]
    assert all(len(value) <= 64 and value.isascii() for value in found.values())
