"""Remembers which blocks are in the store, a whole prompt at a time: a long one costs no Python per block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...kv.groups import Groups, Numbers

PLACES = 1 << 20  # a power of two, of 8 bytes each; a page of them is memory only once it is used
NOTED_DIGESTS = 1 << 12  # that wait to be applied
_MIX = 0x9E3779B97F4A7C16  # even, as the lowest bit of each key is 1
_WORD = (1 << 64) - 1

Keys = npt.NDArray[np.uint64]


class Known:
    """A bounded set of keys: each has one place, and a newer key there replaces it. What it forgot is saved once more.

    Two blocks of a group whose digests differ behind their first 8 bytes only would pass for each other: a block would
    not be saved, and no load errs.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.clear()

    def clear(self) -> None:
        self._places: Keys = np.zeros(PLACES, np.uint64)
        self._mask = np.uint64(PLACES - 1)
        self._noted: list[tuple[list[bytes], int, int, int]] = []
        self._noted_digests = 0

    def keys(self, digests: list[bytes], group: int, blocks: range | Numbers) -> Keys:
        """Return the keys of these blocks of a prompt."""
        ratio = self._groups.ratio(group)
        if isinstance(blocks, range):
            chosen = digests[(blocks.start + 1) * ratio - 1 : blocks.stop * ratio : ratio]
        else:
            chosen = [digests[(block + 1) * ratio - 1] for block in blocks.tolist()]
        return _heads(chosen) ^ np.uint64(group * _MIX & _WORD)

    @staticmethod
    def of_names(names: list[bytes]) -> Keys:
        """Return the keys of blocks with these names."""
        groups = np.fromiter((name[-1] for name in names), np.uint64, len(names))
        return _heads(names) ^ (groups * np.uint64(_MIX))

    def note(self, digests: list[bytes], local: int, found: int, stop: int) -> None:
        """A look-up of a prompt's blocks [local, stop) found the prefix of `found` blocks, and no longer one.

        What proves that prefix (`Group.ahead`) is there, too.

        Applied when somebody asks, many at once: each digest is an object to touch. The list may grow until then.
        """
        self._noted.append((digests, local, found, stop))
        self._noted_digests += len(digests)  # the list is kept whole
        if self._noted_digests > NOTED_DIGESTS:
            self._apply()

    def _apply(self) -> None:
        noted, self._noted, self._noted_digests = self._noted, [], 0
        unit, groups = self._groups.unit_tokens, self._groups.groups
        for digests, local, found, _ in noted:
            for group, blocks in enumerate(self._groups.items(local * unit, found * unit)):
                if blocks:
                    self._mark(digests, group, range(blocks.start, blocks.stop + groups[group].ahead), known=True)
        for digests, local, found, stop in noted:
            # Last: a block that one look-up missed may be saved once more, and is never left out.
            for group, rule in enumerate(groups):
                first = max(local, found) * unit // rule.block_tokens + rule.ahead * (found > local)
                self._mark(digests, group, range(first, stop * unit // rule.block_tokens + rule.ahead), known=False)

    def _mark(self, digests: list[bytes], group: int, blocks: range, *, known: bool) -> None:
        if blocks:
            (self.add if known else self.remove)(self.keys(digests, group, blocks))

    def add(self, keys: Keys) -> None:
        if self._noted:
            self._apply()
        self._places[self._at(keys)] = keys

    def remove(self, keys: Keys) -> None:
        self._places[self._at(keys)[self.holds(keys)]] = 0

    def holds(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Return for each key whether it is in the set."""
        if self._noted:
            self._apply()
        found: npt.NDArray[np.bool_] = self._places[self._at(keys)] == keys
        return found

    def _at(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the place of each key; of another type NumPy would convert the indices first."""
        return (keys & self._mask).view(np.int64)


def _heads(digests: list[bytes]) -> Keys:
    """Return the first 8 bytes of each digest as a number, the lowest bit set."""
    of_size = np.dtype({"names": ["head"], "formats": ["<u8"], "itemsize": len(digests[0]) if digests else 8})
    keys: Keys = np.frombuffer(b"".join(digests), of_size)["head"] | np.uint64(1)
    return keys
