"""The look at the engine's own prefix cache, with vLLM's real pool of blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvprefetch.connector.prefix_cache import PrefixCache
from kvprefetch.kv.groups import Group, Groups, Kind

TOKENS = 16


def test_after_a_reset_it_looks_at_what_the_engine_cached_since() -> None:
    """vLLM replaces the map of cached blocks at each reset."""
    pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=TOKENS)
    manager: Any = SimpleNamespace(block_pool=pool, get_computed_blocks=lambda _: (None, TOKENS))
    groups = Groups((Group(Kind.FULL, TOKENS),), TOKENS)
    cache = PrefixCache(manager, groups)

    def put(digest: bytes) -> list[Any]:
        blocks = pool.get_new_blocks(1)
        pool.cached_block_hash_to_block.insert(make_block_hash_with_group_id(BlockHash(digest), 0), blocks[0])
        return blocks

    def tokens(digest: bytes) -> int:
        return cache.tokens(SimpleNamespace(block_hashes=[digest]))  # type: ignore[arg-type]

    old, new = b"a" * 32, b"b" * 32
    pool.free_blocks(put(old))
    assert (cache.blocks(), tokens(old)) == (1, TOKENS)
    assert pool.reset_prefix_cache()
    assert (cache.blocks(), tokens(old)) == (0, 0)
    put(new)
    assert (cache.blocks(), tokens(old), tokens(new)) == (1, 0, TOKENS)
