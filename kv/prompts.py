"""The prompt of a request of an engine with several KV groups: what to ask the store for next, which prefix to stage.

Each group needs blocks of its own, so a prefix is of use only whole.  A block is named by its digest and, in a last
byte, the number of its group.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .groups import Groups, Kind, Numbers

Bits = npt.NDArray[np.bool_]
# What is known of a block.  All but the first may be there.
ABSENT, UNKNOWN, MEMORY, DISK = range(4)
SLICE = 1024  # names that are looked at together
GIVE_UP_SLICES = 16  # that are looked for in staging while the store does not answer


class Choice(NamedTuple):
    """A prefix to stage: `names` of its blocks joined, in the slot table's order; `blocks` are those of the flag.

    `on_disk`: a byte per block, 1 for one that lies only on disk.  `missing`: a block that the next longer prefix
    lacks; empty where none is known.
    """

    names: bytes
    name_bytes: int
    blocks: int
    on_disk: bytes
    missing: bytes


class Prompt:
    """A prompt's digests, and what is known of each group's blocks behind the local ones.

    Questions come in slices: first of full attention, up to its first absent block, then of the other groups, what the
    longest prefix that may be there needs.  Each time that this is not there, more of the shorter ones is asked for.
    """

    def __init__(
        self, groups: Groups, hashes: bytes, blocks: range, *, room: int, staged: Callable[[bytes], bool]
    ) -> None:
        """`blocks`: those of the unit that are not local.  `room`: blocks that can be staged at a time.

        `staged`: whether a block is in staging, or on its way: then the store is not asked for it.
        """
        unit = groups.unit_tokens
        self._groups, self._staged, self._room = groups, staged, room
        self.local_blocks, self._local, usable = blocks.start, blocks.start * unit, blocks.stop * unit
        count = usable // groups.hash_tokens
        self._digests: npt.NDArray[np.uint8] = np.frombuffer(hashes, np.uint8).reshape(count, len(hashes) // count)
        self._bases = [self._local // group.block_tokens for group in groups.groups]
        self._known: list[npt.NDArray[np.uint8]] = [
            np.full(usable // group.block_tokens - base, UNKNOWN, np.uint8)
            for group, base in zip(groups.groups, self._bases, strict=True)
        ]
        # How many blocks are known of each group of full attention.
        self._full = {number: 0 for number, each in enumerate(groups.groups) if each.kind is Kind.FULL}
        most = max(0, room) // sum(unit // groups.groups[number].block_tokens for number in self._full)
        self._end = min(usable, self._local + most * unit)  # of the longest prefix that may be there
        self._width = unit  # tokens: of prefixes that are shorter by less, blocks are asked for with its own
        # The last question: blocks of a group, and which of them are not staged.
        self._asked: list[tuple[int, Numbers, Bits]] = []
        self._chosen = self._local

    # --- questions --------------------------------------------------------------------------------------------------

    def next(self, most: int) -> list[bytes]:
        """Return up to `most` names to ask the store for; none once the longest prefix is known."""
        while wanted := self._wanted(most):
            names = list[bytes]()
            self._asked = []
            for number, some in wanted:
                if not len(blocks := some[: most - len(names)]):
                    break
                question = self._names(number, blocks)
                asked = np.array([not self._staged(name) for name in question], np.bool_)
                self._asked.append((number, blocks, asked))
                names += compress(question, asked)
            if names:
                return names
            self.found(b"", b"")
        return []

    def found(self, present: bytes, on_disk: bytes) -> None:
        """Take a byte for each name that `next` returned last; names without a byte are absent."""
        at, questions, self._asked = 0, self._asked, []
        for number, blocks, asked in questions:
            size = int(asked.sum())
            parts = (each[at : at + size].ljust(size, b"\0") for each in (present, on_disk))
            there, disk = (np.frombuffer(each, np.bool_) for each in parts)
            self._known[number][blocks] = MEMORY
            self._known[number][blocks[asked]] = np.where(there, np.where(disk, DISK, MEMORY), ABSENT)
            if number in self._full:
                self._full[number] = int(blocks[-1]) + 1
                self._shorten(number, blocks)
            at += size
        if questions and questions[0][0] not in self._full:
            self._widen()

    def lost(self, blocks: range) -> None:
        """These of the chosen blocks, in the slot table's order, will not come, but for those that are staged."""
        at = 0
        for number, items in enumerate(self._groups.items(self._local, self._chosen)):
            some = items[max(blocks.start - at, 0) : max(blocks.stop - at, 0)]
            lost: Numbers = np.arange(some.start, some.stop) - self._bases[number]
            gone = lost[np.array([not self._staged(name) for name in self._names(number, lost)], np.bool_)]
            self._known[number][gone] = ABSENT
            if number in self._full:
                self._shorten(number, gone)
            at += len(items)

    def give_up(self) -> None:
        """The store does not answer: only what is known to be there, or staged, counts."""
        for _ in range(GIVE_UP_SLICES):
            if not self.next(SLICE):
                return
            self.found(b"", b"")
        self._end = self._local

    def _wanted(self, most: int) -> list[tuple[int, Numbers]]:
        """Return unknown blocks to ask for, by group, counted from the local ones; none once `_end` is the answer."""
        for number, first in self._full.items():
            stop = self._end // self._groups.groups[number].block_tokens - self._bases[number]
            if first < stop:
                return [(number, np.arange(first, min(first + most, stop)))]
        while self._end > self._local:
            above, width = max(self._local, self._end - self._width), self._width
            self._end = self._groups.longest(self._local, above, self._end, self._known, self._room)
            if self._end == above:
                self._widen()
            elif self._unknown(self._end - self._groups.unit_tokens):
                return self._unknown(max(self._local, self._end - width))
            else:
                break
        return []

    def _unknown(self, above: int) -> list[tuple[int, Numbers]]:
        """Return the unknown blocks that prefixes of more than `above` tokens, up to `_end`, need."""
        found = []
        for number, blocks in enumerate(self._groups.wanted(self._local, above, self._end)):
            if number not in self._full:
                at = blocks - self._bases[number]
                if len(at := at[self._known[number][at] == UNKNOWN]):
                    found.append((number, at))
        return found

    def _widen(self) -> None:
        """Look at more prefixes at a time, up to those with about a slice of names."""
        unit = self._groups.unit_tokens
        others = self._groups.names(1) - len(self._full)
        self._width = min(4 * self._width, max(1, SLICE // max(1, others)) * unit)

    def _shorten(self, number: int, blocks: Numbers) -> None:
        """End the longest prefix before the first of these blocks of full attention that is absent."""
        absent = blocks[self._known[number][blocks] == ABSENT]
        if len(absent):
            tokens = (int(absent[0]) + self._bases[number]) * self._groups.groups[number].block_tokens
            self._end = min(self._end, tokens // self._groups.unit_tokens * self._groups.unit_tokens)

    # --- the choice -------------------------------------------------------------------------------------------------

    @property
    def most_blocks(self) -> int:
        """Return a bound for the blocks of this and every later choice."""
        return self._groups.most_items(self._local, self._end)

    def choose(self) -> Choice:
        """Return the longest prefix there is, once `next` has no more names."""
        self._chosen = self._end
        names, on_disk = bytearray(), bytearray()
        for number, items in enumerate(self._groups.items(self._local, self._chosen)):
            blocks = np.arange(items.start, items.stop) - self._bases[number]
            names += self._joined(number, blocks)
            on_disk += (self._known[number][blocks] == DISK).tobytes()
        shown = self._chosen // self._groups.unit_tokens
        return Choice(bytes(names), self._digests.shape[1] + 1, shown, bytes(on_disk), self._missing())

    def loaded(self, blocks: range) -> list[range]:
        """Return which of the chosen blocks the engine loaded for these blocks of the flag."""
        at, found, unit = 0, list[range](), self._groups.unit_tokens
        needed = self._groups.items(blocks.start * unit, blocks.stop * unit)
        for items, some in zip(self._groups.items(self._local, self._chosen), needed, strict=True):
            start, stop = max(some.start, items.start), min(some.stop, items.stop)
            if start < stop:
                found.append(range(at + start - items.start, at + stop - items.start))
            at += len(items)
        return found

    def _missing(self) -> bytes:
        """Return the name of a block that the prefix one unit longer lacks; empty if none is known."""
        for number, items in enumerate(self._groups.items(self._local, self._chosen + self._groups.unit_tokens)):
            blocks = np.arange(items.start, items.stop) - self._bases[number]
            blocks = blocks[blocks < len(self._known[number])]
            absent = blocks[self._known[number][blocks] == ABSENT]
            if len(absent):
                return self._names(number, absent[:1])[0]
        return b""

    def _names(self, number: int, blocks: Numbers) -> list[bytes]:
        """Return the names of a group's blocks, counted from the local ones."""
        joined, size = self._joined(number, blocks), self._digests.shape[1] + 1
        return [joined[at : at + size] for at in range(0, len(joined), size)]

    def _joined(self, number: int, blocks: Numbers) -> bytes:
        names = np.full((len(blocks), self._digests.shape[1] + 1), number, np.uint8)
        names[:, :-1] = self._digests[self._groups.digests(number, blocks + self._bases[number])]
        return names.tobytes()
