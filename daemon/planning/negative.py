"""Digests that the store recently did not deliver, so that a miss or a foreign object costs one store call. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MISS_NS = 1_000_000_000
LASTING_NS = 30_000_000_000  # for objects of another size, corrupt ones, and those on a hung node: each try costs much
MAX_ENTRIES = 16_384


class NegativeCache:
    """The misses of one engine."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, tuple[int, bool]] = OrderedDict()
        self._stored: OrderedDict[bytes, int] = OrderedDict()  # when
        self._cleared_ns = -1

    def add(self, digest: bytes, now_ns: int, *, asked_ns: int | None = None, lasting: bool = False) -> None:
        """Note a miss; one that was lasting before stays so.

        `asked_ns`: when the store was asked. A plain miss of a digest that was stored since is none, nor is any miss of
        before the last `clear`.
        """
        if asked_ns is not None and (
            asked_ns <= self._cleared_ns or (not lasting and self._stored.get(digest, -1) > asked_ns)
        ):
            return
        lasting |= self._until.pop(digest, (0, False))[1]
        self._until[digest] = (now_ns + (LASTING_NS if lasting else MISS_NS), lasting)
        if len(self._until) > MAX_ENTRIES:
            self._until.popitem(last=False)

    def first(self, digests: Sequence[bytes], now_ns: int) -> int:
        """Return the index of the first known miss, or the number of digests."""
        if not self._until or self._until.keys().isdisjoint(digests):
            return len(digests)
        for index, digest in enumerate(digests):
            if (known := self._until.get(digest)) is not None:
                if known[0] > now_ns:
                    return index
                del self._until[digest]
        return len(digests)

    def lasting(self, digests: Sequence[bytes], now_ns: int) -> list[int]:
        """Return the indices of known misses that last, whatever the store says of them."""
        if not self._until or self._until.keys().isdisjoint(digests):
            return []
        known = ((index, self._until.get(digest, (0, False))) for index, digest in enumerate(digests))
        return [index for index, (until, lasting) in known if lasting and until > now_ns]

    def stored(self, digests: Iterable[bytes], now_ns: int) -> None:
        """Forget plain misses that were put. A lasting one remains: a put does not replace the store's old object."""
        for digest in digests:
            if not self._until.get(digest, (0, True))[1]:
                del self._until[digest]
            self._stored.pop(digest, None)
            self._stored[digest] = now_ns
            if len(self._stored) > MAX_ENTRIES:
                self._stored.popitem(last=False)

    def forget(self, digests: Sequence[bytes]) -> None:
        """Forget blocks that arrived after all."""
        if self._until and not self._until.keys().isdisjoint(digests):
            for digest in digests:
                self._until.pop(digest, None)

    def clear(self, now_ns: int) -> None:
        """Forget all: the engine's blocks have other keys."""
        self._until.clear()
        self._stored.clear()
        self._cleared_ns = now_ns

    def __len__(self) -> int:
        return len(self._until)
