"""A prompt's blocks: their names, what is known of each, what to ask the store for next, and which prefix to stage.

A block's name is its digest and, in a last byte, the number of its KV group.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .groups import Groups, Kind, Numbers

# What is known of a block.  All but the first, which is 0, may be there.
ABSENT, UNKNOWN, MEMORY, DISK = range(4)
_NOT = bytes.maketrans(b"\0\1", b"\1\0")
_ON_DISK = bytes(state == DISK for state in range(256))
SLICE = 1024  # names that are looked at together
GIVE_UP_SLICE, GIVE_UP_SLICES = 64, 16  # names that are looked for in staging while the store does not answer


class Choice(NamedTuple):
    """The longest prefix there is: the first `entries` of `names`, which are joined, in the slot table's order.

    `blocks`: those of the flag, in the unit of all groups.  `on_disk`: a byte for each, 1 for a block on disk alone.
    `missing`: a block that the next longer prefix lacks, and the next one of its group; empty where none is known.
    """

    names: bytes | bytearray
    entries: int
    blocks: int
    on_disk: bytes
    missing: Sequence[bytes]


class _Question(NamedTuple):
    """Blocks of a group, in a range or one by one; `mask`: which of them are not staged, and asked for."""

    number: int
    blocks: range | Numbers
    mask: bytes


class Prompt:
    """What is known of each group's blocks of a prompt, behind the local ones, from which blocks are counted here.

    Questions come in slices: first of full attention, up to its first absent block, and with its last slice the blocks
    of the other groups that the longest prefix needs.  Where these are not there, the shorter prefixes follow, each
    time more of them: first one group's blocks, then the others' of the prefixes for which these are there.

    With several groups a prefix is of use with all its blocks alone: a shorter one needs other blocks.  With one each
    leading part is a prefix, too, and `names` has all blocks from the beginning.
    """

    def __init__(
        self, groups: Groups, hashes: bytes, blocks: range, *, room: int, staged: Callable[[bytes], bool]
    ) -> None:
        """`hashes`: as many digests of the prompt as these blocks take (Groups.digests), joined, none twice.

        `blocks`: of the unit, those that are not local.

        `room`: how many blocks of several groups can be staged at a time.  `staged`: whether a block is in staging, or
        on its way: then the store is not asked for it.
        """
        unit = groups.unit_tokens
        self._groups, self._staged, self._room = groups, staged, room
        self.local_blocks, self._local, usable = blocks.start, blocks.start * unit, blocks.stop * unit
        size = len(hashes) // groups.digests(blocks.stop)
        self.name_bytes = size + 1
        self._digests: npt.NDArray[Any] | None = np.frombuffer(hashes, _type_of_names(size)["digest"])
        self.names = bytearray()
        self._bases = [self._local // group.block_tokens for group in groups.groups]
        self._known = [
            bytearray(b"\1") * (usable // group.block_tokens + group.ahead - base)
            for group, base in zip(groups.groups, self._bases, strict=True)
        ]
        # Of each group of full attention: how many blocks were asked for, or are staged.
        self._full = {number: 0 for number, group in enumerate(groups.groups) if group.kind is Kind.FULL}
        self._end = usable  # of the longest prefix that may be there
        if groups.partial:
            self.names, self._digests = self._joined(0, range(len(self._known[0]))), None
        else:
            self._digests = self._digests.copy()
            most = max(0, room) // sum(unit // groups.groups[number].block_tokens for number in self._full)
            self._end = min(usable, self._local + most * unit)
        self._width = unit  # tokens: of prefixes that are shorter by less, blocks are asked for with its own
        self._asked: list[_Question] = []
        self._chosen = self._local
        self._entries = 0

    # --- questions --------------------------------------------------------------------------------------------------

    @property
    def partial(self) -> bool:
        """Whether each leading part of the chosen blocks is a prefix, too."""
        return self._digests is None

    @property
    def settled(self) -> bool:
        """Whether the longest prefix is known, without a look at what is staged by now."""
        return not self._wanted(1)

    def next(self, most: int) -> list[bytes]:
        """Return up to `most` names to ask the store for; none once the longest prefix is known."""
        while wanted := self._wanted(most):
            asked = list[bytes]()
            self._asked = []
            for number, blocks in wanted:
                names = self._names(number, blocks[: most - len(asked)])
                mask = bytes(map(self._staged, names)).translate(_NOT)
                self._asked.append(_Question(number, blocks[: len(names)], mask))
                asked += compress(names, mask)
            if asked:
                return asked
            self.found(b"", b"")
        return []

    def found(self, present: bytes, on_disk: bytes) -> None:
        """Take a byte for each name that `next` returned last; names without a byte are absent."""
        at, questions, self._asked = 0, self._asked, []
        for number, blocks, mask in questions:
            count = mask.count(1)
            part = slice(at, at + count)
            there, disk = int.from_bytes(present[part], "little"), int.from_bytes(on_disk[part], "little")
            states = (MEMORY * there + (DISK - MEMORY) * (there & disk)).to_bytes(count, "little")  # byte by byte
            if count < len(mask):
                rest = iter(states)
                states = bytes(next(rest) if asked else MEMORY for asked in mask)
            self._enter(number, blocks, states)
            if number in self._full:
                self._full[number] += len(states)
            at += count

    def holds(self, count: int) -> None:
        """So many leading blocks are pinned in staging."""
        self._known[0][:count] = bytes([MEMORY]) * count
        self._full[0] = count

    def lost(self, blocks: range) -> None:
        """These of the chosen blocks will not come, but for those that are staged."""
        at = 0
        for number, items in enumerate(self._items(self._chosen)):
            some = items[max(blocks.start - at, 0) : max(blocks.stop - at, 0)]
            for part in (some[start : start + SLICE] for start in range(0, len(some), SLICE)):
                states = bytes(MEMORY if self._staged(name) else ABSENT for name in self._names(number, part))
                self._enter(number, part, states, proven=self.partial)
                if number in self._full and ABSENT in states:
                    break  # the prefix ends there
            at += len(items)

    def give_up(self) -> int:
        """The store does not answer: only what is known to be there, or staged, counts. Return how many are absent."""
        names = 0
        for _ in range(GIVE_UP_SLICES):
            if not (asked := self.next(GIVE_UP_SLICE)):
                return names
            names += len(asked)
            self.found(b"", b"")
        self._end = self._local
        return names

    def _enter(self, number: int, blocks: range | Numbers, states: bytes, *, proven: bool = False) -> None:
        """Note what is known of these blocks. The longest prefix ends before an absent one of full attention.

        `proven`: they were there when the store was asked, so the prefix before them, which may be shown, is good.
        """
        if isinstance(blocks, range):
            self._known[number][blocks.start : blocks.stop] = states
        else:
            np.frombuffer(self._known[number], np.uint8)[blocks] = np.frombuffer(states, np.uint8)
        if number in self._full and (absent := states.find(ABSENT)) >= 0:
            unit, group = self._groups.unit_tokens, self._groups.groups[number]
            end = blocks[absent] + self._bases[number] - (0 if proven else group.ahead)
            tokens = end * group.block_tokens // unit * unit
            self._end = max(self._local, min(self._end, tokens))

    def _wanted(self, most: int) -> Sequence[tuple[int, range] | tuple[int, Numbers]]:
        """Return unknown blocks to ask for, by group; none once `_end` is the answer."""
        for number, first in self._full.items():
            group = self._groups.groups[number]
            stop = self._end // group.block_tokens + group.ahead - self._bases[number]
            if first < stop and self._end > self._local:
                full = (number, range(first, min(first + most, stop)))
                last = 0 < first < stop <= first + most and number == max(self._full)
                return [full, *self._unknown(np.array([self._end]))] if last else [full]
        if len(self._full) == len(self._known):
            return []
        while self._end > self._local:
            there = [np.frombuffer(known, np.uint8) for known in self._known]
            above = max(self._local, self._end - self._width)
            prefixes = self._groups.prefixes(self._local, above, self._end, there, self._room)
            if not len(prefixes):
                self._end = above
                self._widen()
            elif prefixes[-1] < self._end:
                self._end = int(prefixes[-1])
            elif longest := self._unknown(prefixes[-1:]):
                if self._width == self._groups.unit_tokens:  # there is no other prefix
                    return longest
                wanted = self._unknown(prefixes)
                return wanted[:1] if wanted[0][0] == self._decides else wanted
            else:
                break
        return []

    @property
    def _decides(self) -> int:
        """Return the number of the first group that is not of full attention."""
        return next(number for number in range(len(self._known)) if number not in self._full)

    def _unknown(self, prefixes: Numbers) -> list[tuple[int, Numbers]]:
        """Return the unknown blocks that these prefixes need, but for those of full attention."""
        found = []
        for number, wanted in enumerate(self._groups.wanted(self._local, prefixes)):
            if number not in self._full:
                blocks = wanted - self._bases[number]
                blocks = blocks[np.frombuffer(self._known[number], np.uint8)[blocks] == UNKNOWN]
                if len(blocks):
                    found.append((number, blocks))
        return found

    def _widen(self) -> None:
        """Look at more prefixes at a time, up to those with about a slice of names of the group that decides."""
        unit = self._groups.unit_tokens
        names = unit // self._groups.groups[self._decides].block_tokens
        self._width = min(4 * self._width, max(1, SLICE // names) * unit)

    # --- the choice -------------------------------------------------------------------------------------------------

    @property
    def most_blocks(self) -> int:
        """Return a bound for the blocks of this and every later choice."""
        return self._groups.most_items(self._local, self._end)

    def choose(self) -> Choice:
        """Return the longest prefix there is, once `next` has no more names."""
        self._chosen, items = self._end, self._items(self._end)
        self._entries = sum(map(len, items))
        names = self.names
        if self._digests is not None:
            names = bytearray().join(self._joined(number, some) for number, some in enumerate(items))
        known = b"".join(self._known[number][some.start : some.stop] for number, some in enumerate(items))
        blocks = self._chosen // self._groups.unit_tokens
        return Choice(names, self._entries, blocks, known.translate(_ON_DISK), self._missing())

    def shown(self, ready: int) -> int:
        """Return the blocks of the flag of which all is staged, once so many leading ones of the chosen blocks are."""
        if self._digests is None:
            return self.local_blocks + ready
        return self._chosen // self._groups.unit_tokens if ready == self._entries else self.local_blocks

    def in_blocks(self, count: int) -> int:
        """Return so many of the chosen blocks as their share of the prefix, in blocks of the flag."""
        return (self._chosen // self._groups.unit_tokens - self.local_blocks) * count // max(1, self._entries)

    def loaded(self, blocks: range) -> list[range]:
        """Return which of the chosen blocks the engine loaded for these blocks of the flag."""
        unit = self._groups.unit_tokens
        return self._groups.spans(self._local, self._chosen, blocks.start * unit, blocks.stop * unit)

    def _missing(self) -> list[bytes]:
        """Return the names of a block that the prefix one unit longer lacks, and of the next one, if one is known."""
        if not any(ABSENT in known for known in self._known):
            return []
        for number, items in enumerate(self._items(self._chosen + self._groups.unit_tokens)):
            absent = self._known[number].find(ABSENT, items.start, items.stop)
            if absent >= 0:
                return self._names(number, range(absent, min(absent + 2, len(self._known[number]))))
        return []

    def _items(self, tokens: int) -> list[range]:
        """Return, for each group, the blocks that a prefix of so many tokens needs."""
        found = zip(self._groups.items(self._local, tokens), self._bases, strict=True)
        return [range(items.start - base, items.stop - base) if items else items for items, base in found]

    def _names(self, number: int, blocks: range | Numbers) -> list[bytes]:
        names: list[bytes] = np.frombuffer(self._joined(number, blocks), f"V{self.name_bytes}").tolist()
        return names

    def _joined(self, number: int, blocks: range | Numbers) -> bytearray:
        if self._digests is None:
            assert isinstance(blocks, range)
            return self.names[blocks.start * self.name_bytes : blocks.stop * self.name_bytes]
        base, ratio = self._bases[number], self._groups.ratio(number)
        if isinstance(blocks, range):
            digests = self._digests[(blocks.start + base + 1) * ratio - 1 : (blocks.stop + base) * ratio : ratio]
        else:
            digests = self._digests[(blocks + base + 1) * ratio - 1]
        return _with_group(digests, number)


def names_of_prefix(groups: Groups, hashes: bytes | memoryview, hash_bytes: int, blocks: int) -> bytearray:
    """Return the names, joined, of all blocks that a prefix of so many blocks needs, group by group.

    `hashes`: the prompt's digests, joined; what proves the prefix (`Group.ahead`) is among the names if they reach it.
    """
    digests, joined = np.frombuffer(hashes, _type_of_names(hash_bytes)["digest"]), bytearray()
    for number, items in enumerate(groups.items(0, blocks * groups.unit_tokens)):
        ratio, stop = groups.ratio(number), items.stop + groups.groups[number].ahead
        joined += _with_group(digests[(items.start + 1) * ratio - 1 : stop * ratio : ratio], number)
    return joined


def _with_group(digests: npt.NDArray[Any], number: int) -> bytearray:
    """Return the names, joined, of the blocks of a group with these digests."""
    kind = _type_of_names(digests.dtype.itemsize)
    joined = bytearray(len(digests) * kind.itemsize)
    names = np.frombuffer(joined, kind)
    names["digest"], names["group"] = digests, number
    return joined


@cache
def _type_of_names(digest_bytes: int) -> np.dtype[np.void]:
    return np.dtype([("digest", f"V{digest_bytes}"), ("group", np.uint8)])
