"""Models of the bed, and their paged tensors as arrays of words, laid out as vLLM lays them out."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.lab import hybrid
from tests.lab.bed import oracle
from tests.lab.checkpoint import TINY, TINY_TP2, make_checkpoint

MODELS: dict[str, Callable[[Path], Path]] = {
    "full": lambda folder: make_checkpoint(folder, TINY),
    "two heads": lambda folder: make_checkpoint(folder, TINY_TP2),
    "windows": lambda folder: _once(folder / "gemma3", hybrid.make_gemma3),
    "chunks": lambda folder: _once(folder / "llama4", hybrid.make_llama4),
    "chunks in two of three layers": lambda folder: _once(folder / "llama4-3", lambda at: hybrid.make_llama4(at, 3)),
    "unlike heads": lambda folder: _once(folder / "mimo", hybrid.make_mimo),
    "states": lambda folder: _once(folder / "granite", hybrid.make_granite),
    "linear states": lambda folder: _once(folder / "qwen3-next", hybrid.make_qwen3_next),
}
"""Layouts of models that vLLM's CPU build has: writes (or finds) the checkpoint in a folder, returns its own folder."""

PACKED = ["BLNHC", "BLHNC"]
"""Orders of memory that vLLM has where a group's layers have pages of unlike sizes."""


BESIDE = {"states and a ring": "states"}
"""Given layouts that are added to those of a model."""


def given_specs(name: str) -> dict[str, Any]:
    """Return what layers of a layout keep, of one that only GPUs have: vLLM's specifications by layer.

    They stand in the place of those of a tiny model, or beside them (BESIDE); nothing else of the engine knows.
    """
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    full: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    small = {**full, "head_size": 128}
    packed = {**full, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}
    index = {**full, "dtype": torch.uint8, "head_size": 132}
    if name == "mla":
        return _layers(4, latent=kinds.MLAAttentionSpec(**full))
    if name == "mla draft":  # a drafter that runs without context parallelism
        draft = kinds.MLAAttentionSpec(**full, dcp_sharded=False)
        return _layers(4, latent=kinds.MLAAttentionSpec(**full)) | _layers(1, draft=draft)
    if name == "fp8":
        quantised = {"dtype": torch.float8_e4m3fn, "kv_quant_mode": kinds.KVQuantMode.FP8_PER_TENSOR}
        return _layers(4, attn=kinds.FullAttentionSpec(**{**small, **quantised, "num_kv_heads": 2}))
    if name == "mla fp8":
        return _layers(4, latent=kinds.MLAAttentionSpec(**packed))
    if name == "mla indexer":  # DeepSeek-V3.2
        indexer = kinds.MLAAttentionSpec(**index, cache_role=kinds.SparseCacheRole.INDEXER)
        return _layers(3, latent=kinds.MLAAttentionSpec(**packed), indexer=indexer)
    if name == "compressed":  # DeepSeek-V4 (tests/support/gallery.py), with fewer layers
        of_bytes: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.uint8, "alignment": 576}
        content = {"head_size": 512, "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
        of_bytes_too = {**of_bytes, **content, "state_content_bytes": 584}
        states: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.float32, "alignment": 576}
        window = kinds.SlidingWindowMLASpec
        recent = window(**of_bytes_too, block_size=64, sliding_window=128)
        coarse, fourths = (
            kinds.MLAAttentionSpec(**of_bytes_too, block_size=256, tokens_per_state=tokens) for tokens in (128, 4)
        )
        indexer = kinds.MLAAttentionSpec(**of_bytes, block_size=256, head_size=132, tokens_per_state=4)
        return {
            **_layers(7, recent=recent),
            **_layers(3, coarse=coarse, fourths=fourths, indexer=indexer),
            **_layers(4, of_coarse=window(**states, block_size=8, head_size=1024, sliding_window=128)),
            **_layers(
                3,
                of_fourths=window(**states, block_size=4, head_size=2048, sliding_window=8),
                of_indexer=window(**states, block_size=4, head_size=512, sliding_window=8),
            ),
        }
    state: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1024, "head_size_v": 0, "dtype": torch.float32}
    if name == "bounded replay":  # DeepSeek-V4.1, with fewer layers
        latent = {**packed, "head_size": 512, "state_content_bytes": 584, "alignment": 576}
        latent["model_version"] = "deepseek_v4"
        recent = kinds.SlidingWindowMLASpec(**{**latent, "block_size": 32}, sliding_window=128, bounded_replay=True)
        halves, own = (kinds.MLAAttentionSpec(**latent, tokens_per_state=tokens) for tokens in (2, 1))
        indexer = kinds.MLAAttentionSpec(**index, tokens_per_state=2, alignment=576)
        ring = kinds.CircularBufferSpec(**state, block_size=8)
        return {**_layers(5, recent=recent), **_layers(2, halves=halves, indexer=indexer, ring=ring), "m.9.own": own}
    if name == "ring":  # GLM's with an indexer over pools of keys
        pools = kinds.MLAAttentionSpec(**index, tokens_per_state=4)
        ring = kinds.CircularBufferSpec(
            **{**state, "head_size": 128, "num_kv_heads": 2, "dtype": torch.bfloat16}, block_size=8, dcp_sharded=False
        )
        return _layers(3, tail=ring, latent=kinds.MLAAttentionSpec(**packed), pools=pools)
    if name == "states and a ring":  # Qwen4's with an indexer
        pools = kinds.MLAAttentionSpec(**{**index, "block_size": 32}, tokens_per_state=4)
        return _layers(2, tail=kinds.CircularBufferSpec(**state, block_size=8), pools=pools)
    raise KeyError(name)


def _layers(count: int, **specs: Any) -> dict[str, Any]:
    return {f"model.layers.{number}.{name}": spec for number in range(count) for name, spec in specs.items()}


def _once(folder: Path, make: Callable[[Path], Path]) -> Path:
    return folder if (folder / "config.json").is_file() else make(folder)


@dataclass(frozen=True)
class Layer:
    """One layer's KV: `words` is a view (blocks, heads, tokens, words of a row) into the paged tensor."""

    name: str
    key: np.uint64
    words: NDArray[Any]
    heads: range
    """Numbers of the KV heads that this rank keeps, among the model's."""
    row_tokens: int = 1
    """Tokens that a row stands for; it depends on the last of them."""
    drafter: bool = False
    """Whether a token's KV also depends on the token after it, as with EAGLE: it is written once that is sampled."""


class Shard(NamedTuple):
    """Which tokens a rank has, with context parallelism: of `size` runs of `run` tokens each the one `number`."""

    size: int = 1
    number: int = 0
    run: int = 1

    def places(self, position: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return whether this rank has the tokens at these positions, and how many of its own are before each."""
        every = self.size * self.run
        return position // self.run % self.size == self.number, position // every * self.run + position % self.run


WHOLE = Shard()


@dataclass(frozen=True)
class Group:
    """Layers with one block table. `kind`: full, window, chunk, state or ring; `span`: tokens of a window or a chunk.

    A state is one row a block, after the last token that the block has.  A ring is one block a request, with the last
    tokens: of the `span` that will be compressed to one row, those that are there so far are read.  `block_tokens`: of
    all ranks that share them.
    """

    number: int
    block_tokens: int
    kind: str
    span: int
    layers: tuple[Layer, ...]
    checkpoint: Callable[[int, int], int] = lambda start, end: 0
    """Of states: how many tokens the state covers that a step from `start` to `end` also keeps; 0 if it keeps none."""
    shard: Shard = WHOLE
    cached: bool = True
    """Whether vLLM's prefix cache has it. Otherwise a request finds nothing of a hit, and computes what it needs."""

    def first_needed(self, computed: int) -> int:
        """Return the first token whose KV the next token reads, where so many are computed."""
        if self.kind == "window":
            return max(0, computed - self.span + 1)
        if self.kind in ("chunk", "ring"):
            return computed // self.span * self.span
        if self.kind == "state":
            return max(0, computed - 1)
        return 0


def groups_of(
    kv_cache_config: Any,
    tensors: Mapping[str, Any],
    ranks: int,
    rank: int,
    kv_heads: int,
    drafters: Container[str] = (),
    shard: Shard = WHOLE,
) -> tuple[Group, ...]:
    """Return the groups of an engine with these tensors (vLLM's, by layer), on tensor-parallel rank `rank`.

    `kv_heads`: of the model, in each of its layers with attention; `drafters`: names of a drafter's layers; `shard`: of
    groups whose tokens ranks share.
    """
    from vllm.v1 import kv_cache_interface as kinds

    found, pooled = [], 1
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", dict.fromkeys(group.layer_names, spec))
        layers = []
        for name in group.layer_names:
            if name in specs:
                words, heads = words_of(tensors[name]), _heads(specs[name], ranks, rank, kv_heads)
                row_tokens = max(1, int(specs[name].tokens_per_state))
                pooled = max(pooled, row_tokens)
                layers.append(Layer(name, oracle.key_of(name), words, heads, row_tokens, name in drafters))
        one = next(iter(specs.values()))
        kind, span = "full", 0
        if isinstance(one, (kinds.SlidingWindowSpec, kinds.SlidingWindowMLASpec)):
            kind, span = "window", one.sliding_window
        elif isinstance(one, kinds.ChunkedLocalAttentionSpec):
            kind, span = "chunk", one.attention_chunk_size
        elif isinstance(one, kinds.MambaSpec):
            kind = "state"
        elif isinstance(one, kinds.CircularBufferSpec):
            kind = "ring"
        elif not isinstance(one, kinds.FullAttentionSpec):
            raise ValueError(f"the bed has no oracle for {type(one).__name__}")
        rest: dict[str, Any] = (
            {"checkpoint": _checkpoint(kv_cache_config, one)} if getattr(one, _CHECKPOINTS, 0) else {}
        )
        own = shard if spec.dcp_sharded else WHOLE
        rest |= {"cached": bool(spec.prefix_cacheable), "shard": own}
        found.append(Group(number, spec.block_size * own.size, kind, span, tuple(layers), **rest))
    return tuple(replace(each, span=pooled) if each.kind == "ring" else each for each in found)


_CHECKPOINTS = "num_prefill_checkpoint_blocks"  # vLLM 0.31 keeps states at the end of a step only


def _checkpoint(kv_cache_config: Any, spec: Any) -> Callable[[int, int], int]:
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

    def kept(start: int, end: int) -> int:
        offsets, _ = compute_mamba_prefill_checkpoints(
            [end],
            [end - start],
            kv_cache_config.hash_block_size,
            spec.block_size,
            spec.prefill_checkpoint_alignment,
            False,
            kv_cache_config.cache_hit_alignment_tokens,
        )
        return start + offsets[0] if offsets[0] else 0

    return kept


def _heads(spec: Any, ranks: int, rank: int, kv_heads: int) -> range:
    """Return which heads a rank keeps: ranks share one where there are fewer heads, and all keep the one of MLA."""
    from vllm.v1 import kv_cache_interface as kinds

    count = spec.num_heads
    alike = isinstance(spec, (kinds.MLAAttentionSpec, kinds.SlidingWindowMLASpec, kinds.CircularBufferSpec))
    if alike or ranks == 1:
        return range(count)
    attention = not isinstance(spec, kinds.MambaSpec)
    first = rank * kv_heads // ranks if attention and kv_heads < ranks else rank * count
    return range(first, first + count)


def words_of(tensor: Any) -> NDArray[Any]:
    """View vLLM's tensor (blocks, heads, tokens, row) as words, the longest that divide a row: of 8 bytes, 4 or 1."""
    import torch

    raw = tensor.view(torch.uint8).numpy()
    row = raw.shape[-1]
    for size, dtype in ((8, np.uint64), (4, np.uint32), (1, np.uint8)):
        if row % size == 0 and all(stride % size == 0 for stride in raw.strides[:-1]):
            found: NDArray[Any] = raw.view(dtype)
            assert np.shares_memory(found, raw)
            return found
    raise AssertionError("a byte divides everything")
