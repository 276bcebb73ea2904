"""What the scheduler side asks of vLLM's own prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from .saves import LocalCache

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from .support import Geometry


class PrefixCache(LocalCache):
    """The engine's own prefix cache."""

    def __init__(self, manager: KVCacheManager, geometry: Geometry) -> None:
        self._manager, self._pool = manager, manager.block_pool
        self._ratio = geometry.hashes_per_block
        # What vLLM appends to a digest for the key of a group's block.
        self._suffix, self._named = make_block_hash_with_group_id(BlockHash(b""), geometry.group), False
        if (groups := geometry.groups) is not None:  # then a digest's last byte is the number of its group
            self._ratio, self._named = groups.groups[geometry.group].block_tokens // groups.hash_tokens, True

    def tokens(self, request: Request) -> int:
        first = request.block_hashes[self._ratio - 1 : self._ratio]
        # A reset of the pool replaces its map.
        if not first or self._pool.cached_block_hash_to_block.get_one_block(first[0] + self._suffix) is None:
            return 0  # without the first block there is no prefix; vLLM's own look costs much more
        tokens: int = self._manager.get_computed_blocks(request)[1]
        return tokens

    def blocks(self) -> int:
        return len(self._pool.cached_block_hash_to_block)

    def holds(self, block_id: int, digest: bytes) -> bool:
        if self._named:
            expected = make_block_hash_with_group_id(BlockHash(digest[:-1]), digest[-1])
            return bool(self._pool.blocks[block_id].block_hash == expected)
        return bool(self._pool.blocks[block_id].block_hash == digest + self._suffix)
