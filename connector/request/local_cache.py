"""What the scheduler side asks of the engine's own prefix cache."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any


class LocalCache:
    """The cache of an engine without one: it is empty."""

    def tokens(self, request: Any) -> int:
        """Tokens of the request that the cache holds."""
        return 0

    def guess(self, request: Any, most: int) -> int | None:
        """Return how many leading blocks of `most` it seems to hold, on any thread; None where that is not known."""
        return 0

    def blocks(self) -> int:
        """Blocks that the cache holds at all."""
        return 0

    def holds(self, block_id: int, name: bytes) -> bool:
        """Whether the cache has this block under this name."""
        return False

    def find(self, name: bytes) -> int | None:
        """Return a block that the cache has under this name."""
        return None

    def forget(self, failed: Collection[int], admitted: Iterable[tuple[Sequence[bytes], Sequence[Any]]]) -> None:
        """A load left these blocks unfilled: no later request finds them, nor what was computed on them.

        `admitted`: the hashes of each request that may have used them, and vLLM's blocks that it was given first.
        """
