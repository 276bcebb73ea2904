"""Digests whose values are bad: of another size, corrupt, or on a node that hangs. A try of them costs much. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BAD_NS = 30_000_000_000
MAX_ENTRIES = 16_384


class BadValues:
    """The bad values of one engine: misses for BAD_NS, whatever the store says of them."""

    def __init__(self) -> None:
        self.until: OrderedDict[bytes, int] = OrderedDict()
        self._cleared_ns = -1

    def add(self, digest: bytes, now_ns: int, *, asked_ns: int) -> None:
        """Note a bad value, for which the store was asked at `asked_ns`; nothing of before the last `clear` counts."""
        if asked_ns <= self._cleared_ns:
            return
        self.until.pop(digest, None)
        self.until[digest] = now_ns + BAD_NS
        if len(self.until) > MAX_ENTRIES:
            self.until.popitem(last=False)

    def known(self, digests: Sequence[bytes], now_ns: int) -> list[int]:
        """Return the indices of those that are known to be bad."""
        if self.until.keys().isdisjoint(digests):
            return []
        return [index for index, digest in enumerate(digests) if self.until.get(digest, 0) > now_ns]

    def forget(self, digests: Sequence[bytes]) -> None:
        """Forget blocks that arrived after all."""
        if not self.until.keys().isdisjoint(digests):
            for digest in digests:
                self.until.pop(digest, None)

    def clear(self, now_ns: int) -> None:
        """Forget all: the engine's blocks have other keys."""
        self.until.clear()
        self._cleared_ns = now_ns
