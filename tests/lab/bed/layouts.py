"""Models of the bed, and their paged tensors as arrays of words, laid out as vLLM lays them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
}
"""Name: writes (or finds) the checkpoint in a folder and returns its own folder."""


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


@dataclass(frozen=True)
class Group:
    """Layers with one block table. `kind`: full, window or chunk; `span`: tokens of a window or a chunk."""

    number: int
    block_tokens: int
    kind: str
    span: int
    layers: tuple[Layer, ...]

    def first_needed(self, computed: int) -> int:
        """Return the first token whose KV the next token reads, where so many are computed."""
        if self.kind == "window":
            return max(0, computed - self.span + 1)
        if self.kind == "chunk":
            return computed // self.span * self.span
        return 0


def groups_of(kv_cache_config: Any, tensors: Mapping[str, Any], ranks: int, rank: int) -> tuple[Group, ...]:
    """Return the groups of an engine with these tensors (vLLM's, by layer), on tensor-parallel rank `rank`."""
    from vllm.v1 import kv_cache_interface as kinds

    found = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", dict.fromkeys(group.layer_names, spec))
        layers = []
        for name in group.layer_names:
            if name in specs:
                words = words_of(tensors[name], kv_cache_config.num_blocks)
                layers.append(Layer(name, oracle.key_of(name), words, _heads(specs[name], ranks, rank)))
        one = next(iter(specs.values()))
        kind, span = "full", 0
        if isinstance(one, (kinds.SlidingWindowSpec, kinds.SlidingWindowMLASpec)):
            kind, span = "window", one.sliding_window
        elif isinstance(one, kinds.ChunkedLocalAttentionSpec):
            kind, span = "chunk", one.attention_chunk_size
        elif not isinstance(one, kinds.FullAttentionSpec):
            raise ValueError(f"the bed has no oracle for {type(one).__name__}")
        found.append(Group(number, spec.block_size, kind, span, tuple(layers)))
    return tuple(found)


def _heads(spec: Any, ranks: int, rank: int) -> range:
    """Return which heads a rank keeps, where each rank has its own; of MLA all ranks keep the same one."""
    from vllm.v1 import kv_cache_interface as kinds

    count = spec.num_heads
    alike = isinstance(spec, (kinds.MLAAttentionSpec, kinds.SlidingWindowMLASpec))
    return range(count) if alike or ranks == 1 else range(rank * count, (rank + 1) * count)


def words_of(tensor: Any, blocks: int) -> NDArray[Any]:
    """View vLLM's tensor (blocks, heads, tokens, row) as words, the longest that divide a row; a copy would be useless.

    Where a row does not fill words of 8 bytes, they have 4 or 1.
    """
    import torch

    raw = tensor.view(torch.uint8).numpy()
    if raw.shape[0] != blocks:
        raise ValueError(f"kernel blocks are not blocks: {raw.shape[0]} and {blocks}")
    row = raw.shape[-1]
    for size, dtype in ((8, np.uint64), (4, np.uint32), (1, np.uint8)):
        if row % size == 0 and all(stride % size == 0 for stride in raw.strides[:-1]):
            found: NDArray[Any] = raw.view(dtype)
            assert np.shares_memory(found, raw)
            return found
    raise AssertionError("a byte divides everything")
