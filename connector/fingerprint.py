"""What the bytes of a block depend on beside its tokens, by name: only engines with equal ones may share stored KV.

Of the weights, 4 MiB spread over their files are read: those of another fine-tune, of a later checkpoint, or with an
adapter merged in differ there, and it takes milliseconds where the files were just loaded.  Weights that an engine
replaces while it runs are not seen; they come with a reset (docs/OPERATIONS.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .keys import RankKeys

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

PAGES, PAGE_BYTES = 1024, 4096
_DIGEST_BYTES = 8
# Of a model's configuration: what says where it is from, or which libraries read it.
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
# What else decides the embeddings of an image or a video, whose hash has only what its request says of it.
_MEDIA = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate")
# Of a layer's cache: what its block's size follows from, which is part of every hash, and what is compared by itself.
_ELSEWHERE = ("block_size", "page_size_padded", "block_stride_alignment", "max_tp_shards", "dtype")


def of_engine(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, group: int, keys: RankKeys, kv_caches: Mapping[str, Any]
) -> dict[str, str]:
    """All but the weights. `kv_caches`: tensors by layer, as `register_kv_caches` has them."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    served = kv_cache_config.kv_cache_groups[group]
    layers = served.layer_names
    specs = getattr(served.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(layers, served.kv_cache_spec)
    found = {
        "dtype": _name(model.dtype),
        "kv_dtype": ",".join(sorted({_kv_dtype(specs[layer], vllm_config.cache_config) for layer in layers})),
        "quantization": str(model.quantization or "none"),
        # Ranks that hold the same heads have the same bytes, however many they are.
        "tp_shards": str(parallel.tensor_parallel_size // keys.put_factor),
        "pp_size": str(parallel.pipeline_parallel_size),
        "layers": _digest([[layer, *_kind(specs[layer])] for layer in layers]),
        "layout": ",".join(sorted({_layout(kv_caches[layer]) for layer in layers})),
        "config": _digest(_config(model)),
    }
    context = vllm_config.compilation_config.static_forward_context
    backends = {_backend(context[layer]) for layer in layers if hasattr(context.get(layer), "attn_backend")}
    if backends:
        found["attention"] = ",".join(sorted(backends))
    return {name: value[:64] for name, value in found.items()}


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_dtype(spec: Any, cache_config: Any) -> str:
    """Quantized KV is bytes to torch, whatever is in them."""
    quantized: str = "fp8_e4m3" if cache_config.cache_dtype == "fp8" else cache_config.cache_dtype
    return quantized if _name(spec.dtype) == "uint8" else _name(spec.dtype)


def _kind(spec: KVCacheSpec) -> list[str]:
    fields = {name: value for name, value in vars(spec).items() if name not in _ELSEWHERE}
    return [type(spec).__name__, *(f"{name}={value}" for name, value in sorted(fields.items()))]


def _layout(cache: Any) -> str:
    """The order in which a block's dimensions lie in memory; those of one element lie anywhere."""
    dimensions = [each for each in range(1, cache.dim()) if cache.shape[each] > 1]
    return "".join(map(str, sorted(dimensions, key=cache.stride, reverse=True)))


def _backend(layer: Any) -> str:
    """On a CPU, the instructions that it uses decide how it packs keys."""
    return ":".join(filter(None, (layer.attn_backend.get_name(), str(getattr(layer, "isa", "")))))


def _config(model: Any) -> dict[str, Any]:
    # Not to_diff_dict: it makes another one with the class's defaults, which may need arguments, or the network.
    config = _lasting(model.hf_config.to_dict())
    media = model.multimodal_config
    config.update({name: value for name in _MEDIA if (value := getattr(media, name, None))})
    if "longrope" in json.dumps(config, default=str):  # vLLM chooses its factors by this length
        config["max_model_len"] = model.max_model_len
    return config


def _lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration, and those within it, what is the model's own."""
    return {
        name: _lasting(value) if isinstance(value, dict) and "model_type" in value else value
        for name, value in config.items()
        if name not in _VOLATILE
    }


def _text(value: object) -> object:
    """Of what JSON has no word for; the order of a set and the address of an object are each process's own."""
    if isinstance(value, (set, frozenset)):
        return sorted(str(_text(each)) for each in value)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=_text).encode()
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest()


def of_weights(vllm_config: VllmConfig) -> dict[str, str]:
    """Of their files, where they are files on this machine; else nothing."""
    with contextlib.suppress(Exception):  # not here, or not readable: then nothing is said of them
        load = vllm_config.load_config
        if load.load_format == "dummy":
            return {"weights": "dummy"}
        if files := _files(_folder(vllm_config.model_config, load.download_dir)):
            return {"weights": sample(files)}
    return {}


def _folder(model: Any, download_dir: str | None) -> Path:
    if os.path.exists(model.model):
        return Path(model.model)
    from vllm.transformers_utils.repo_utils import hf_api

    folder: str = hf_api().snapshot_download(
        model.model, revision=model.revision, cache_dir=download_dir, local_files_only=True
    )
    return Path(folder)


def _files(folder: Path) -> list[Path]:
    """Of what is there in several formats, the one that vLLM loads."""
    if folder.is_file():
        return [folder]
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf"):
        found = sorted(folder.glob(pattern))
        if files := [file for file in found if not file.name.startswith("consolidated")] or found:
            return files
    return []


def sample(files: Sequence[Path]) -> str:
    """Digest of the files' sizes and of PAGES pages at even distances. Raises OSError."""
    sizes = [file.stat().st_size for file in files]
    step = max(PAGE_BYTES, sum(sizes) // PAGES)
    digest = hashlib.blake2b(repr(sizes).encode(), digest_size=_DIGEST_BYTES)
    before = 0
    for file, size in zip(files, sizes, strict=True):
        with file.open("rb", buffering=0) as content:
            for at in range(-before % step, size, step):
                digest.update(os.pread(content.fileno(), PAGE_BYTES, at))
        before += size
    return digest.hexdigest()
