"""The paged cache's bytes against upstream's RankLocalStoreLayout, in every layout, of one KV group or several."""

from __future__ import annotations

import ctypes
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvprefetch.connector.copy.paged import LayoutUnsupported, PagedCache
from kvprefetch.connector.engine import groups as groups_of_engine
from tests.support.layouts import SIZES, caches

data = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data")

from vllm.v1 import kv_cache_interface as kinds  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

BLOCKS = SIZES["B"]
# How many tokens an entry stands for, by the name of its time.
COMPRESSED = next(
    each
    for each in ("tokens_per_state", "compress_ratio")
    if each in inspect.signature(kinds.MLAAttentionSpec).parameters
)


def upstream_value(kv_caches: dict[str, torch.Tensor], block: int) -> bytes:
    """The bytes that upstream's worker puts for a block: it registers the layers of all KV groups for each."""
    layout = data.RankLocalStoreLayout(data.KeyMetadata("m", 0, 0, 0, 0), TOKENS, TOKENS)
    layout.register_kv_caches([kinds.group_kernel_blocks(cache, BLOCKS) for cache in kv_caches.values()], BLOCKS)
    addresses, lengths = layout.prepare_value_for_block(block)
    return b"".join(ctypes.string_at(a, n) for a, n in zip(addresses, lengths, strict=True))


def test_kernel_blocks_smaller_than_manager_blocks() -> None:
    kv_caches = caches("LBHNC", kernel_ratio=2)
    paged = PagedCache(kv_caches, list(kv_caches), BLOCKS)
    rows = np.zeros((1, paged.block_bytes), dtype=np.uint8)
    paged.save(rows, [0], [5])
    assert rows[0].tobytes() == upstream_value(kv_caches, 5)


def test_layers_that_share_memory_stand_once_in_the_value() -> None:
    kv_caches = caches("LBHNC")
    kv_caches["shared"] = kv_caches["layer.1"]
    paged = PagedCache(kv_caches, list(kv_caches), BLOCKS)
    rows = np.zeros((1, paged.block_bytes), dtype=np.uint8)
    paged.save(rows, [0], [1])
    assert rows[0].tobytes() == upstream_value(kv_caches, 1)
    assert paged.block_bytes == len(upstream_value(kv_caches, 1))


def broken() -> list[tuple[str, Any]]:
    sound = caches("LBHNC")
    first = sound["layer.0"]
    return [
        ("KV-cache layout is not served", caches("BHLNC")),
        ("layer has no KV cache", {"layer.0": first, "layer.1": first}),
        ("not one tensor", {**sound, "layer.1": [first]}),
        ("do not divide", {**sound, "layer.1": first[:-1]}),
        ("more than one allocation", {**sound, "layer.1": first.clone()}),
        ("KV-cache layout is not served", {name: cache[..., ::2] for name, cache in sound.items()}),
    ]


@pytest.mark.parametrize(("reason", "kv_caches"), broken())
def test_what_cannot_be_served_is_refused_in_one_line(reason: str, kv_caches: Any) -> None:
    with pytest.raises(LayoutUnsupported, match=reason) as caught:
        PagedCache(kv_caches, ["layer.0", "layer.1", "layer.2"], BLOCKS)
    assert "\n" not in str(caught.value)


# --- caches of one group or several that vLLM laid out and allocated -------------------------------------------------

TOKENS = 16  # of a block in caches that vLLM laid out
HEADS = {"block_size": TOKENS, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
FULL = kinds.FullAttentionSpec(**HEADS)
WINDOW = kinds.SlidingWindowSpec(**HEADS, sliding_window=40)
# Blocks of twice the tokens and half the width.
WIDE = kinds.SlidingWindowSpec(**{**HEADS, "block_size": 2 * TOKENS, "num_kv_heads": 1}, sliding_window=40)
MLA = kinds.MLAAttentionSpec(**{**HEADS, "num_kv_heads": 1, "head_size": 24})
MLA_WINDOW = kinds.SlidingWindowMLASpec(**{**HEADS, "num_kv_heads": 1, "head_size": 24}, sliding_window=40)
STATE = kinds.MambaSpec(
    block_size=TOKENS,
    shapes=((5, 3), (4, 4)),
    dtypes=(torch.bfloat16, torch.float32),
    page_size_padded=FULL.page_size_bytes,
    mamba_cache_mode="align",
)
INDEXER = kinds.MLAAttentionSpec(
    **{**HEADS, "num_kv_heads": 1, "head_size": 4}, cache_role=kinds.SparseCacheRole.INDEXER
)

# DeepSeek-V4's pages, as its layers have them on a GPU (tests/support/gallery.py): of tokens of the window, compressed
# ones, the indexer's, and the compressors' states.
_BYTES = {"num_kv_heads": 1, "dtype": torch.uint8, "alignment": 576}
_CONTENT = {
    "head_size": 512,
    "cache_dtype_str": "fp8_ds_mla",
    "model_version": "deepseek_v4",
    "state_content_bytes": 584,
}
_STATES = {"num_kv_heads": 1, "dtype": torch.float32, "alignment": 576}
RECENT = kinds.SlidingWindowMLASpec(**_BYTES, **_CONTENT, block_size=64, sliding_window=128)
FOURTHS, COARSE = (
    kinds.MLAAttentionSpec(**_BYTES, **_CONTENT, block_size=256, **{COMPRESSED: tokens}) for tokens in (4, 128)
)
SMALL_INDEXER = kinds.MLAAttentionSpec(**_BYTES, block_size=256, head_size=132, **{COMPRESSED: 4})
OF_COARSE = kinds.SlidingWindowMLASpec(**_STATES, block_size=8, head_size=1024, sliding_window=128)
OF_FOURTHS, OF_INDEXER = (
    kinds.SlidingWindowMLASpec(**_STATES, block_size=4, head_size=size, sliding_window=8) for size in (2048, 512)
)

# Groups as (specification, or one for each page of a layer; layers).
ALONE = [(FULL, 3)]
WINDOWS = [(FULL, 2), (WINDOW, 2), (WINDOW, 1)]
UNLIKE = [(FULL, 2), (WIDE, 2)]
STATES = [(FULL, 2), (STATE, 2), (STATE, 1)]
LATENT = [(MLA, 2), (MLA_WINDOW, 2)]
PACKED = [((MLA, INDEXER), 2), ((MLA_WINDOW,), 1)]
COMPRESSING = [
    *(((RECENT,), count) for count in (4, 3)),
    ((COARSE, FOURTHS, SMALL_INDEXER), 3),
    ((OF_COARSE,), 4),
    ((OF_FOURTHS, OF_INDEXER), 3),
]
COMPACT = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
LAID_OUT = [
    *((groups, layout) for groups in (ALONE, WINDOWS) for layout in [*COMPACT, "LHBNC"]),
    *((groups, layout) for groups in (UNLIKE, STATES, LATENT) for layout in COMPACT),
    *((groups, layout) for groups in (PACKED, COMPRESSING) for layout in ("BLHNC", "BLNHC")),
]


def laid_out(groups: list[tuple[Any, int]], layout: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """vLLM's configuration of these groups, and the cache of each layer, of random bytes."""
    made = []
    for number, (spec, count) in enumerate(groups):
        if isinstance(spec, tuple):
            layers = {f"g{number}.{i}.{kind}": each for i in range(count) for kind, each in enumerate(spec)}
            wrapped = kinds.UniformTypeKVCacheSpecs(block_size=spec[0].block_size, kv_cache_specs=layers)
            made.append(kinds.KVCacheGroupSpec(list(layers), wrapped))
        else:
            made.append(kinds.KVCacheGroupSpec([f"g{number}.{i}" for i in range(count)], spec))
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        num_gpu_blocks_override=BLOCKS,
        prefix_cache_retention_interval=0,
    )
    attention: Any = SimpleNamespace(hisparse_config=None)
    config: Any = SimpleNamespace(cache_config=cache, attention_config=attention)
    found = get_kv_cache_config_from_groups(config, made, 1 << 20)
    caches = allocate_kv_cache(found, torch.device("cpu"), KVCacheLayout[layout])
    storage = next(iter(caches.values())).untyped_storage()
    ctypes.memmove(storage.data_ptr(), np.random.default_rng(1).bytes(storage.nbytes()), storage.nbytes())
    return found, caches


def content(caches: dict[str, torch.Tensor], layers: list[str], block: int) -> list[bytes]:
    """What the layers read of a block."""
    return [caches[layer][block].contiguous().view(torch.uint8).numpy().tobytes() for layer in layers]


def paged_cache(config: Any, caches: dict[str, torch.Tensor]) -> PagedCache:
    return PagedCache(caches, [name for group in config.kv_cache_groups for name in group.layer_names], BLOCKS)


@pytest.mark.parametrize(("groups", "layout"), LAID_OUT)
def test_a_saved_block_of_any_group_is_upstreams_value_and_comes_back(groups: Any, layout: str) -> None:
    """And other blocks stay."""
    config, caches = laid_out(groups, layout)
    paged = paged_cache(config, caches)
    assert paged.block_bytes == config.kv_cache_tensors[0].size // BLOCKS, "as the scheduler side has it"
    rows = np.zeros((BLOCKS, paged.block_bytes), dtype=np.uint8)
    paged.save(rows, range(BLOCKS), range(BLOCKS))
    assert [row.tobytes() for row in rows] == [upstream_value(caches, block) for block in range(BLOCKS)]
    assert paged.fence() is None
    layers = [group.layer_names for group in config.kv_cache_groups]
    before = [[content(caches, names, block) for block in range(BLOCKS)] for names in layers]
    storage = next(iter(caches.values())).untyped_storage()
    storage.fill_(0)
    paged.load(rows, [2, 5], [2, 5])
    for group, names in enumerate(layers):
        for block in range(BLOCKS):
            found = content(caches, names, block)
            if block in (2, 5):
                assert found == before[group][block]
            else:
                assert not any(map(any, found))


@pytest.mark.parametrize(("groups", "layout"), LAID_OUT)
def test_what_a_group_is_said_to_write_are_the_bytes_that_its_layers_write(groups: Any, layout: str) -> None:
    config, caches = laid_out(groups, layout)
    paged = paged_cache(config, caches)
    rows = np.zeros((BLOCKS, paged.block_bytes), dtype=np.uint8)
    found = []
    for group in config.kv_cache_groups:
        next(iter(caches.values())).untyped_storage().fill_(0)
        for name in group.layer_names:
            block = caches[name][3].view(torch.uint8)
            block.copy_(torch.ones_like(block))
        paged.save(rows, [3], [3])
        found.append(np.flatnonzero(np.diff(rows[3], prepend=0, append=0)).tolist())
    whole = all(each == [0, paged.block_bytes] for each in found)
    assert whole == (groups in (ALONE, UNLIKE, LATENT))
    said = groups_of_engine.written(config, paged.places, paged.block_bytes, drafts=0)
    assert said == ([] if whole else found)


def test_layers_whose_blocks_cross_those_of_others_are_refused() -> None:
    """With an outermost layer the pages of all layers must be equal; vLLM refuses others itself."""
    config, caches = laid_out(WINDOWS, "LBHNC")
    half = {name: cache for name, cache in caches.items() if not name.startswith("g1")}
    for name in ("g1.0", "g1.1"):  # half as many bytes for each block
        flat = caches["g0.0"].flatten()
        half[name] = flat[: BLOCKS * FULL.page_size_bytes // 4].view(BLOCKS, 1, 1, -1)
    with pytest.raises(LayoutUnsupported, match="blocks of unlike sizes overlap"):
        paged_cache(config, half)
    shifted = dict(caches)
    shifted["g1.0"] = torch.as_strided(caches["g0.0"], caches["g0.0"].shape, caches["g0.0"].stride(), 8)
    with pytest.raises(LayoutUnsupported, match="a layer's blocks overlap another's"):
        paged_cache(config, shifted)
