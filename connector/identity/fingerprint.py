"""Fingerprint of an engine: by name, everything that decides a block's bytes beside its tokens.

Only engines with equal fingerprints may read each other's stored KV, so its digest stands in their keys.  The model's
files are read, not a library's classes for them: a release that adds a field with a default changes nothing.  For the
same reason the fields of vLLM's own objects are named one by one.

After an error the engine has no fingerprint.  Nothing is guessed or left out: two engines that differ in the missing
part would read each other's blocks.

Each block's hash covers images, cache salts and prompt embeddings, and its name LoRA adapters (adapters.py): they are
not here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine import groups
from . import checkpoint, identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from ...kv.groups import Groups

# Fields of a layer's KV spec that decide the meaning of its bytes.
DECIDING = (
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "kv_quant_mode",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
    "sliding_window",
    "attention_chunk_size",
    "non_causal",
    "cache_dtype_str",
    "model_version",
    "cache_role",
    "is_index_group_leader",
    "bounded_replay",
    "shapes",
    "mamba_type",
    "mamba_cache_mode",
    "num_heads",
    "tp_replicated",
)
# Those that decide none: `layout` and `kv_dtype` have what they come to, or they say how long a block is kept.
OTHERS = (
    "block_size",
    "dcp_sharded",
    "block_stride_alignment",
    "is_draft",
    "max_tp_shards",
    "dtype",
    "page_size_padded",
    "alignment",
    "storage_block_size",
    "topk_buffer_width",
    "extra_retained_tokens",
    "non_causal_multi_token_decode",
    "dtypes",
    "num_speculative_blocks",
    "num_prefill_checkpoint_blocks",
    "prefill_checkpoint_alignment",
)
# Options beside `hf_overrides` that decide what a model computes.
_OPTIONS = ("quantization_config", "model_class_overrides")
# Options that decide the embedding of an image or a video; its hash has only what its request says of it.
_MEDIA = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")
# Fields of a model's configuration that name other models whose weights are loaded with its own (Ultravox).
_TOWERS = ("text_model_id", "audio_model_id")


def of_engine(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    *,
    rules: Groups,
    replicas: int,
    layout: str,
    written: Sequence[Sequence[int]] = (),
) -> dict[str, str]:
    """Return the part that the running rank knows. Ranks with the same bytes (`replicas` of them) have the same.

    `rules`: of the KV groups; `layout`: of the rank's paged cache (`PagedCache.layout`); `written`: of a value
    (`WorkerInfo.written`).
    """
    parallel = vllm_config.parallel_config
    served = kv_cache_config.kv_cache_groups
    specs: dict[str, KVCacheSpec] = {}
    for group in served:
        specs |= groups.specs_by_layer(group)
    found = {
        "kv_dtype": ",".join(sorted({_kv_dtype(spec, vllm_config.cache_config) for spec in specs.values()})),
        # Ranks that hold the same heads have the same bytes, whatever their number.
        "tp_shards": str(parallel.tensor_parallel_size // replicas),
        "pp_size": str(parallel.pipeline_parallel_size),
        "layers": _digest([[layer, *_kind(spec)] for layer, spec in specs.items()]),
        "layout": layout,
    }
    if (size := parallel.decode_context_parallel_size) > 1:  # which tokens of a block a rank has
        shards = [str(size if each.kv_cache_spec.dcp_sharded else 1) for each in served]
        found["dcp"] = f"{','.join(shards)}:{parallel.cp_kv_cache_interleave_size}"
    if len(rules) > 1:
        # Layers of unlike groups lie in the same memory, in the groups' order.
        pages = [[each.kv_cache_spec.page_size_bytes, each.layer_names] for each in served]
        found["groups"] = _digest([rules.hash_tokens, [rule[:3] for rule in rules.groups], pages])
    if written:
        # Another engine's pages with other padding have zeros where this one's daemon looks for lost pages.
        found["written"] = _digest(written)
    context = vllm_config.compilation_config.static_forward_context
    backends = {_backend(context[layer]) for layer in specs if hasattr(context.get(layer), "attn_backend")}
    if backends:
        found["attention"] = ",".join(sorted(backends))
    return found


def of_model(vllm_config: VllmConfig, since_ns: int = 1 << 63) -> dict[str, str]:
    """Return the part that the model's files and options decide. Reads the files.

    Raises ValueError where a file changed since the engine was configured (`since_ns`): it may have loaded another one.
    Without that time no engine has begun.
    """
    said = identity.of_engine(vllm_config, os.environ)
    if said.alone:
        cure = "(start without it, or install its code as a package that is not editable)"
        raise ValueError(f"nothing says what this does to KV {cure}: {'; '.join(said.alone)}")
    model, load, speculative = vllm_config.model_config, vllm_config.load_config, vllm_config.speculative_config
    found = said.decides | _of_model(model, load, since_ns)
    # A draft model's layers are in the block, too; a draft that comes with the model is in the model's files.
    draft = None if speculative is None else speculative.draft_model_config
    if draft is not None and (draft.model, draft.revision) != (model.model, model.revision):
        found["draft"] = _digest(_of_model(draft, speculative.draft_load_config or load, since_ns))
    return found


def fitting(fingerprint: Mapping[str, str]) -> dict[str, str]:
    """Return the fingerprint as the log shows it: the digest of a value that is long or not plain ASCII."""
    return {
        name: value if re.fullmatch(r"[!-~]{0,64}", value) else _digest(value) for name, value in fingerprint.items()
    }


def digest(fingerprint: Mapping[str, str]) -> str:
    """Return the 32 hex digits that stand for a fingerprint in keys."""
    return _digest(dict(fingerprint))


def _of_model(model: Any, load: Any, since_ns: int) -> dict[str, str]:
    if getattr(model, "model_weights", ""):
        said = f"model_weights={model.model_weights} (load from files)"
        raise ValueError(f"the weights are not files of the model's folder: {said}")
    names = [(model.model, model.revision)]
    names += [(name, None) for each in _TOWERS if (name := getattr(model.hf_config, each, None))]
    folders = [checkpoint.folder(*one, load.download_dir) for one in names]
    # download_dir is where weights go; the rest of a model is in the Hub's own cache.
    own, *towers = ([checkpoint.folder(*one, None), weights] for one, weights in zip(names, folders, strict=True))
    beside = own[:1]
    if model.hf_config_path:
        beside.insert(0, checkpoint.folder(model.hf_config_path, getattr(model, "_hf_config_revision", None), None))
    config = _config(model, [*beside, folders[0]], own)
    if towers:
        config["towers"] = [checkpoint.configuration(each, checkpoint.CONFIGURATION) for each in towers]
    found = {
        "architecture": str(model.architecture),
        "dtype": _name(model.dtype),
        "quantization": str(model.quantization or "none"),
        "config": _digest(config),
        "weights": checkpoint.weights(folders, load.load_format),
    }
    if rest := _rest([*beside, folders[0]]):
        found["files"] = _digest(rest)
    if tokenizer := _tokenizer(model, own):
        found["tokenizer"] = tokenizer
    if model.trust_remote_code:
        others = [(name, None) for name in checkpoint.repositories(config)]
        if model.code_revision and not Path(model.model).exists():
            others.append((model.model, model.code_revision))
        beside += (checkpoint.folder(*one, None) for one in others)
        found["code"] = checkpoint.code(beside) or "none"
    for each in dict.fromkeys([*folders, *beside, *(place[0] for place in towers)]):
        checkpoint.check_unchanged(each, since_ns)
    return found


def _config(model: Any, folders: Sequence[Path], own: Sequence[Path]) -> dict[str, Any]:
    """`folders`: where config.json is from; `own`: the model's, where its processors are from."""
    media = model.multimodal_config
    found: dict[str, Any] = {"files": checkpoint.configuration(folders, checkpoint.CONFIGURATION)}
    if {"config.json", "params.json"} <= found["files"].keys():
        form = str(model.config_format)
        found["config_format"] = "mistral" if form == "auto" and any(own[-1].glob("consolidated*")) else form
    if model.hf_config_path and (said := checkpoint.configuration(own, checkpoint.CONFIGURATION[2:], needed=False)):
        found["own"] = said
    if media is not None:
        found["files"] |= checkpoint.configuration(own, checkpoint.PROCESSORS, needed=False)
        if processor := checkpoint.processor_class(own, found["files"]):
            found["processor_class"] = processor
    if overrides := _overrides(model.hf_overrides):
        found["hf_overrides"] = overrides
    found.update({name: value for name in _OPTIONS if (value := getattr(model, name, None))})
    found.update({name: value for name in _MEDIA if (value := getattr(media, name, None))})
    if "video_pruning_rate" in found:
        found["video_pruning_method"] = getattr(media, "video_pruning_method", None)
    if scales := getattr(media, "mm_encoder_fp8_scale_path", None):
        found["mm_encoder_fp8_scales"] = checkpoint.digest_of(Path(scales).read_bytes())
    # vLLM chooses these kinds' factors by this length.
    if re.search("longrope|max_trained_positions", json.dumps(model.hf_config.to_dict(), default=str)):
        found["max_model_len"] = model.max_model_len
    return found


def _rest(folders: Sequence[Path]) -> dict[str, str]:
    """Return the digests of data files that other parts do not have, unless a line says that they decide nothing."""
    found = checkpoint.data(folders)
    lines = {name: identity.rule("files", name) for name in found}
    counted = (name for name, line in lines.items() if line is None or line.verdict == "decides")
    return {name: checkpoint.sample([found[name]]) for name in counted}


def _tokenizer(model: Any, own: Sequence[Path]) -> str:
    """Return the digest of the tokenizer's files where the model may read them: it does, or an option names another."""
    chosen, reads = getattr(model, "tokenizer", None) or model.model, identity.reads_tokenizer(model)
    if chosen == model.model and not reads:
        return ""
    mine = next(filter(None, map(checkpoint.tokenizer, own)), "")
    if chosen == model.model:
        return mine
    used = checkpoint.tokenizer(checkpoint.folder(chosen, getattr(model, "tokenizer_revision", None), None))
    return used if reads or used != mine else ""


def _overrides(given: Any) -> object:
    """Return a comparable form of `hf_overrides`: vLLM's own function, which draft models have, by its name."""
    if not callable(given):
        if isinstance(given, dict) and (file := given.get("quantization_config_file")):
            return given | {"quantization_config_file": checkpoint.digest_of(Path(file).read_bytes())}
        return given
    if isinstance(given, functools.partial):  # so from vLLM 0.33 on
        bound = [*map(_overrides, given.args), {name: value for name, value in given.keywords.items() if value}]
        return [_overrides(given.func), *bound] if any(bound) else _overrides(given.func)
    if getattr(given, "__module__", "").partition(".")[0] == "vllm":
        return f"{given.__module__}.{given.__qualname__}"
    raise ValueError("hf_overrides is a function (give it as JSON)")


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_dtype(spec: Any, cache_config: Any) -> str:
    """Name the format of quantized KV, which is plain bytes to torch; of states the format of each part."""
    if hasattr(spec, "dtypes"):
        return "+".join(map(_name, spec.dtypes))
    if _name(spec.dtype) != "uint8":
        return _name(spec.dtype)
    from vllm.platforms import current_platform

    quantized: str = "fp8_e4m3" if cache_config.cache_dtype == "fp8" else cache_config.cache_dtype
    # MI300's format: a byte means half the value.
    return f"{quantized}fnuz" if quantized.startswith("fp8") and current_platform.is_fp8_fnuz() else quantized


def _kind(spec: KVCacheSpec) -> tuple[str, dict[str, object]]:
    """Leave out fields that are off or absent: releases with and without them share. So it is with a field that no
    list has, until its value is not its default.
    """
    found = {name: value for name in DECIDING if (value := getattr(spec, name, None))}
    for field in dataclasses.fields(spec):
        if field.name not in DECIDING + OTHERS and (value := getattr(spec, field.name)) != field.default:
            found[field.name] = value
    return type(spec).__name__, found


def _backend(layer: Any) -> str:
    """On a CPU the instruction set decides how the backend packs keys."""
    return ":".join(filter(None, (layer.attn_backend.get_name(), str(getattr(layer, "isa", "")))))


def _digest(value: object) -> str:
    return checkpoint.digest_of(identity.text(value).encode())
