"""The paged cache's bytes, against upstream's RankLocalStoreLayout, in every layout vLLM knows."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from kvprefetch.connector.paged import LayoutUnsupported, PagedCache
from tests.support.layouts import SERVED, SIZES, caches

data = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data")

BLOCKS, LAYERS, HEADS, TOKENS, CONTENT = (SIZES[name] for name in "BLHNC")


def upstream_value(kv_caches: dict[str, torch.Tensor], block: int) -> bytes:
    """The bytes upstream's connector puts for a block."""
    from vllm.v1.kv_cache_interface import group_kernel_blocks

    layout = data.RankLocalStoreLayout(data.KeyMetadata("m", 0, 0, 0, 0), TOKENS, TOKENS)
    layout.register_kv_caches([group_kernel_blocks(cache, BLOCKS) for cache in kv_caches.values()], BLOCKS)
    addresses, lengths = layout.prepare_value_for_block(block)
    return b"".join(ctypes.string_at(a, n) for a, n in zip(addresses, lengths, strict=True))


def memory(kv_caches: dict[str, torch.Tensor]) -> bytes:
    storage = next(iter(kv_caches.values())).untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", SERVED)
def test_a_saved_block_is_upstreams_value(layout: str, dtype: torch.dtype) -> None:
    kv_caches = caches(layout, dtype)
    paged = PagedCache(kv_caches, list(kv_caches), BLOCKS)
    rows = np.zeros((5, paged.block_bytes), dtype=np.uint8)
    paged.save(rows, [4, 0, 2], [6, 3, 0])
    for slot, block in ((4, 6), (0, 3), (2, 0)):
        assert rows[slot].tobytes() == upstream_value(kv_caches, block)
    assert not rows[1].any()
    assert paged.fence() is None


def test_kernel_blocks_smaller_than_manager_blocks() -> None:
    kv_caches = caches("LBHNC", kernel_ratio=2)
    paged = PagedCache(kv_caches, list(kv_caches), BLOCKS)
    rows = np.zeros((1, paged.block_bytes), dtype=np.uint8)
    paged.save(rows, [0], [5])
    assert rows[0].tobytes() == upstream_value(kv_caches, 5)


@pytest.mark.parametrize("layout", SERVED)
def test_a_round_trip_changes_only_the_blocks_loaded(layout: str) -> None:
    kv_caches = caches(layout)
    before = memory(kv_caches)
    paged = PagedCache(kv_caches, list(kv_caches), BLOCKS)
    rows = np.zeros((BLOCKS, paged.block_bytes), dtype=np.uint8)
    paged.save(rows, range(BLOCKS), range(BLOCKS))
    others = rows.copy()
    next(iter(kv_caches.values())).untyped_storage().fill_(0)
    paged.load(rows, [2, 5], [2, 5])
    again = np.zeros_like(rows)
    paged.save(again, range(BLOCKS), range(BLOCKS))
    for block in range(BLOCKS):
        assert again[block].any() == (block in (2, 5))
    paged.load(others, range(BLOCKS), range(BLOCKS))
    assert memory(kv_caches) == before


def test_layers_that_share_memory_stand_once_in_the_value() -> None:
    kv_caches = caches("LBHNC")
    kv_caches["shared"] = kv_caches["layer.1"]
    paged = PagedCache(kv_caches, list(kv_caches), BLOCKS)
    rows = np.zeros((1, paged.block_bytes), dtype=np.uint8)
    paged.save(rows, [0], [1])
    assert rows[0].tobytes() == upstream_value(kv_caches, 1)
    assert paged.block_bytes == len(upstream_value(kv_caches, 1))


def test_layers_of_other_groups_are_left_out() -> None:
    kv_caches = caches("LBNHC")
    paged = PagedCache(kv_caches, ["layer.0", "layer.2"], BLOCKS)
    assert paged.block_bytes == 2 * HEADS * TOKENS * CONTENT * 2


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


def test_slots_of_another_size_are_refused() -> None:
    kv_caches = caches("LBHNC")
    paged = PagedCache(kv_caches, list(kv_caches), BLOCKS)
    with pytest.raises(ValueError, match="slot size differs"):
        paged.load(np.zeros((1, paged.block_bytes - 1), dtype=np.uint8), [0], [0])
