"""What the store is known not to have for us, for a short time: so that a miss or a foreign object costs one question.

Pure: time is handed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

MISS_NS = 1_000_000_000
LASTING_NS = 30_000_000_000  # an object of another size, a corrupt one, one whose owner hangs: each try costs much
MAX_ENTRIES = 16_384


class NegativeCache:
    """Digests of one engine that are misses for it."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, tuple[int, bool]] = OrderedDict()

    def add(self, digest: bytes, now_ns: int, *, lasting: bool = False) -> None:
        if (known := self._until.pop(digest, None)) is not None and known[1]:
            lasting = True
        self._until[digest] = (now_ns + (LASTING_NS if lasting else MISS_NS), lasting)
        while len(self._until) > MAX_ENTRIES:
            self._until.popitem(last=False)

    def first(self, digests: Sequence[bytes], now_ns: int) -> int:
        """How many leading digests are not known to be misses."""
        if not self._until or self._until.keys().isdisjoint(digests):
            return len(digests)
        for index, digest in enumerate(digests):
            if (known := self._until.get(digest)) is not None:
                if known[0] > now_ns:
                    return index
                del self._until[digest]
        return len(digests)

    def stored(self, digests: Iterable[bytes]) -> None:
        """We put these. What lay under the key before stays there, so only plain misses are forgotten."""
        for digest in digests:
            if (known := self._until.get(digest)) is not None and not known[1]:
                del self._until[digest]

    def forget(self, digest: bytes) -> None:
        """It arrived after all."""
        self._until.pop(digest, None)

    def clear(self) -> None:
        """Every key was removed."""
        self._until.clear()

    def __len__(self) -> int:
        return len(self._until)
