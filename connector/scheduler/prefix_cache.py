"""What the scheduler side asks of vLLM's own prefix cache."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from ..request.local_cache import LocalCache

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from ..engine.geometry import Geometry


class PrefixCache(LocalCache):
    def __init__(self, manager: KVCacheManager, geometry: Geometry) -> None:
        groups, numbers = geometry.groups, map(geometry.number, range(len(geometry.groups)))
        self._manager, self._pool = manager, manager.block_pool
        self._ratio = groups.groups[groups.first_full].block_tokens // groups.hash_tokens
        # What vLLM appends to a digest for the key of a group's block.
        self._suffixes = [make_block_hash_with_group_id(BlockHash(b""), group) for group in numbers]
        self._suffix = self._suffixes[groups.first_full]
        self._dropped = 1 if groups.proof_tokens else 0  # the last block of a prefix, with drafts

    def tokens(self, request: Request) -> int:
        first = request.block_hashes[self._ratio - 1 : self._ratio]
        # A reset of the pool replaces its map.
        if not first or self._pool.cached_block_hash_to_block.get_one_block(first[0] + self._suffix) is None:
            return 0  # without the first block there is no prefix; vLLM's own look costs much more
        tokens: int = self._manager.get_computed_blocks(request)[1]
        return tokens

    def guess(self, request: Request, most: int) -> int | None:
        # vLLM evicts the last blocks of a prefix first, so where one is, those before it are.  Each look is one at a
        # dictionary, at which other threads may look, too.
        hashes, ratio, suffix = request.block_hashes, self._ratio, self._suffix
        find = self._pool.cached_block_hash_to_block.get_one_block
        held, absent = 0, most
        if not most or find(hashes[ratio - 1] + suffix) is None:
            return 0
        if len(self._suffixes) > 1:
            return None
        while held < absent:
            middle = (held + absent) // 2
            if find(hashes[(middle + 1) * ratio - 1] + suffix) is None:
                absent = middle
            else:
                held = middle + 1
        return max(0, held - self._dropped)

    def blocks(self) -> int:
        return len(self._pool.cached_block_hash_to_block)

    def holds(self, block_id: int, name: bytes) -> bool:
        return bool(self._pool.blocks[block_id].block_hash == name[:-1] + self._suffixes[name[-1]])

    def find(self, name: bytes) -> int | None:
        block = self._pool.cached_block_hash_to_block.get_one_block(name[:-1] + self._suffixes[name[-1]])
        return None if block is None else int(block.block_id)

    def forget(self, failed: Collection[int], admitted: Iterable[tuple[Sequence[bytes], Sequence[Any]]]) -> None:
        # vLLM has a block under its name before it is filled, and leaves it there when the load failed: the request
        # computes it anew, unless it ends or is preempted before.  Then vLLM has no table of it any more: what it
        # computed goes by name.  Loads that fail by blocks are of one group.
        self._manager.evict_blocks({*failed})
        bad = set[bytes]()
        for hashes, table in admitted:
            names = hashes[self._ratio - 1 :: self._ratio]
            both = enumerate(zip_longest(names, (block.block_id for block in table)))
            unfilled = (at for at, (name, block) in both if name in bad or block in failed)
            bad.update(names[next(unfilled, len(names)) :])
        for name in bad:
            while (block := self.find(name + b"\0")) is not None:
                self._manager.evict_blocks({block})
