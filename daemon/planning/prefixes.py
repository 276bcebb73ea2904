"""The prefixes of prompts of an engine with several KV groups: which one to stage, from what there is. Pure.

Each group needs blocks of its own, so a prefix is of use only whole.  A block is named by its digest and, in a last
byte, the number of its group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...shmring.groups import Groups, Kind, Numbers
from .requests import Key

Bits = npt.NDArray[np.bool_]


class Choice(NamedTuple):
    """The longest prefix there is: `names` of its blocks joined, in the slot table's order; `blocks` are those of the
    flag.

    `on_disk`: a byte per block, 1 for one that lies only on disk.  `missing`: a block that the next longer prefix
    lacks; empty where there is none.
    """

    names: bytes
    name_bytes: int
    blocks: int
    on_disk: bytes
    missing: bytes


@dataclass(slots=True)
class _Prompt:
    """Lengths in tokens; for each group the blocks that a prefix may need, and what is known of each."""

    digests: npt.NDArray[np.uint8]
    local: int
    usable: int
    wanted: list[Numbers]
    present: list[Bits]
    on_disk: list[Bits]
    chosen: int


class Prefixes:
    """The prompts of one engine's hinted requests."""

    def __init__(self, groups: Groups) -> None:
        self._groups, self._unit = groups, groups.unit_tokens
        # What no prefix can do without is asked for first: where it is absent, the rest is not asked for.
        self._asked_first = sorted(range(len(groups.groups)), key=lambda g: groups.groups[g].kind is not Kind.FULL)
        self._prompts: dict[Key, _Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def begin(self, key: Key, hashes: bytes, hash_bytes: int, local_blocks: int, blocks: int) -> list[bytes]:
        """A request arrived, with `hashes` of its prompt. Return the names of the blocks to look up."""
        digests: npt.NDArray[np.uint8] = np.frombuffer(hashes, np.uint8).reshape(-1, hash_bytes)
        local, usable = local_blocks * self._unit, blocks * self._unit
        wanted = self._groups.wanted(local, usable)
        nothing: list[Bits] = [np.zeros(len(each), np.bool_) for each in wanted]
        prompt = _Prompt(digests, local, usable, wanted, nothing, [each.copy() for each in nothing], local)
        self._prompts[key] = prompt
        return [name for group in self._asked_first for name in self._names(prompt, group, wanted[group])]

    def found(self, key: Key, present: bytes, on_disk: bytes, staged: Callable[[bytes], bool], room: int) -> Choice:
        """Take a byte per name of `begin`; blocks that are `staged` count, too. `room`: blocks that can be staged."""
        prompt, at = self._prompts[key], 0
        for group in self._asked_first:
            stop = at + len(prompt.wanted[group])
            prompt.present[group] = np.frombuffer(present[at:stop].ljust(stop - at, b"\0"), np.bool_).copy()
            prompt.on_disk[group] = np.frombuffer(on_disk[at:stop].ljust(stop - at, b"\0"), np.bool_)
            at = stop
        for group in self._asked_first:
            there, wanted = prompt.present[group], prompt.wanted[group]
            absent = np.flatnonzero(~there)
            there[absent] = [staged(name) for name in self._names(prompt, group, wanted[absent])]
            if self._groups.groups[group].kind is Kind.FULL and len(there) and not there[0]:
                break  # then no prefix is there
        return self._choose(prompt, room)

    def lost(self, key: Key, blocks: range, staged: Callable[[bytes], bool], room: int) -> Choice:
        """These blocks of the last choice will not come, but for those that are `staged`. Return the next one."""
        prompt, at = self._prompts[key], 0
        for group, items in enumerate(self._groups.items(prompt.local, prompt.chosen)):
            some = items[max(blocks.start - at, 0) : max(blocks.stop - at, 0)]
            gone = np.arange(some.start, some.stop)
            there = np.array([staged(name) for name in self._names(prompt, group, gone)], np.bool_)
            prompt.present[group][np.isin(prompt.wanted[group], gone[~there])] = False
            at += len(items)
        return self._choose(prompt, room)

    def loaded(self, key: Key, start_blocks: int, stop_blocks: int) -> list[range]:
        """Return which blocks of the last choice the engine loaded for these blocks of the flag's unit."""
        if (prompt := self._prompts.get(key)) is None:
            return []
        at, found = 0, list[range]()
        needed = self._groups.items(start_blocks * self._unit, stop_blocks * self._unit)
        for items, some in zip(self._groups.items(prompt.local, prompt.chosen), needed, strict=True):
            start, stop = max(some.start, items.start), min(some.stop, items.stop)
            if start < stop:
                found.append(range(at + start - items.start, at + stop - items.start))
            at += len(items)
        return found

    def end(self, key: Key) -> None:
        self._prompts.pop(key, None)

    def _choose(self, prompt: _Prompt, room: int) -> Choice:
        groups = self._groups
        prompt.chosen = tokens = groups.longest(prompt.local, prompt.usable, prompt.present, room)
        names, on_disk = list[bytes](), list[bytes]()
        for group, items in enumerate(groups.items(prompt.local, tokens)):
            names += self._names(prompt, group, np.arange(items.start, items.stop))
            on_disk.append(prompt.on_disk[group][np.isin(prompt.wanted[group], items)].tobytes())
        missing, size = self._missing(prompt, tokens), prompt.digests.shape[1] + 1
        return Choice(b"".join(names), size, tokens // self._unit, b"".join(on_disk), missing)

    def _missing(self, prompt: _Prompt, tokens: int) -> bytes:
        """Return the name of a block that the prefix one unit longer lacks; empty if there is none."""
        if tokens >= prompt.usable:
            return b""
        items = self._groups.items(prompt.local, tokens + self._unit)
        for group in self._asked_first:  # of the others `found` may not know which are staged
            wanted = prompt.wanted[group]
            absent = wanted[np.isin(wanted, items[group]) & ~prompt.present[group]]
            if len(absent):
                return self._names(prompt, group, absent[:1])[0]
        return b""

    def _names(self, prompt: _Prompt, group: int, blocks: Numbers) -> list[bytes]:
        size, last = prompt.digests.shape[1], bytes([group])
        digests = prompt.digests[self._groups.digests(group, blocks)].tobytes()
        return [digests[at : at + size] + last for at in range(0, len(digests), size)]
