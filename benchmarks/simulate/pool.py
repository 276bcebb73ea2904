"""The engine's KV pool with its prefix cache: reference counts for blocks in use, an LRU of free ones."""

from __future__ import annotations

from collections import OrderedDict

from benchmarks.simulate.workload import SimRequest


class KVPool:
    """`capacity` blocks. An admitted request takes all blocks that it will need, so there is no preemption."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._references: dict[bytes, int] = {}
        self._cached: OrderedDict[bytes, None] = OrderedDict()  # free and still valid: least recently used first

    def local_blocks(self, request: SimRequest) -> int:
        """Count the leading blocks of this prompt that the pool holds."""
        for block in range(request.blocks):
            digest = request.digest(block)
            if digest not in self._references and digest not in self._cached:
                return block
        return request.blocks

    def allocate(self, request: SimRequest, total: int) -> bool:
        """Take `total` blocks for this request, each shared block once; False if there is not enough room."""
        digests = [request.digest(block) for block in range(request.blocks)]
        shared = sum(digest in self._references for digest in digests)
        if self.used + total - shared > self.capacity:
            return False
        for digest in digests:
            self._cached.pop(digest, None)
            self._references[digest] = self._references.get(digest, 0) + 1
        self.used += total - shared
        request.held_blocks = total
        while self.used + len(self._cached) > self.capacity:
            self._cached.popitem(last=False)
        return True

    def release(self, request: SimRequest) -> None:
        """Give all blocks of this request back, its last block as the first to be reused."""
        self.used -= request.held_blocks - request.blocks  # blocks without a digest are its own
        for block in range(request.blocks - 1, -1, -1):
            digest = request.digest(block)
            left = self._references[digest] - 1
            if left:
                self._references[digest] = left
            else:
                del self._references[digest]
                self._cached[digest] = None
                self.used -= 1
        request.held_blocks = 0
