"""Rules of KV groups: which blocks a prefix needs of each group, the longest prefix there is, and what is worth saving.

An engine keeps a table of blocks per group of layers.  To go on after a prefix, the layers of a group need

    FULL    all its blocks
    WINDOW  its last blocks, `window_tokens` - 1 tokens of them
    CHUNK   its blocks in the chunk, of `window_tokens`, that the next token belongs to
    STATE   the last one, which holds the layers' state after its last token

The rules are those of vLLM's MooncakeStoreConnector (0.33's, in which extra tokens below a window count as window).
Blocks of a group are numbered from 0.  An item is one block of one group; the order of items is group by group.

A drafter (EAGLE, MTP) computes its KV of a token from the next one, which the block's digest does not cover.  So in a
group with `drafts` a prefix counts only where the block behind it is there, too: the proof of the next token, which
nobody loads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from . import MAX_GROUPS

Numbers = npt.NDArray[np.int64]
_T = TypeVar("_T", int, Numbers)


class Kind(str, Enum):
    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


class Group(NamedTuple):
    """`window_tokens`: length of the window (WINDOW) or of a chunk (CHUNK), otherwise 0. `drafts`: see above."""

    kind: Kind
    block_tokens: int
    window_tokens: int = 0
    drafts: bool = False

    @property
    def ahead(self) -> int:
        """Blocks behind a prefix that have to be there, too."""
        return int(self.drafts)

    @property
    def window_blocks(self) -> int:
        """Blocks of a window, before a token at the begin of a block; of a state one."""
        return max(1, -(-(self.window_tokens - 1) // self.block_tokens))

    def first(self, tokens: _T) -> _T:
        """Return the first block that each prefix needs, negative ones for none before the first.

        `tokens`: multiples of the block's.  A prefix needs all blocks from there to its end.
        """
        ends = tokens // self.block_tokens
        if self.kind is Kind.CHUNK:
            return tokens // self.window_tokens * self.window_tokens // self.block_tokens
        return ends * 0 if self.kind is Kind.FULL else ends - self.window_blocks


@dataclass(frozen=True)
class Groups:
    """All groups of an engine. `hash_tokens`: of one digest of the prompt; a block's digest is that of its end."""

    groups: tuple[Group, ...]
    hash_tokens: int

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def unit_tokens(self) -> int:
        """Prefixes are multiples of it."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @cached_property
    def partial(self) -> bool:
        """Whether each leading part of a prefix is a prefix, too: of one group of full attention."""
        return len(self.groups) == 1

    @cached_property
    def proof_tokens(self) -> int:
        """Tokens behind a prefix whose blocks have to be there, too."""
        return max(group.block_tokens * group.ahead for group in self.groups)

    def digests(self, blocks: int) -> int:
        """Return how many digests of a prompt it takes to look for prefixes of up to so many blocks of all groups."""
        return (blocks * self.unit_tokens + self.proof_tokens) // self.hash_tokens

    def blocks(self, digests: int) -> int:
        """Return how many blocks of all groups the longest prefix has that so many digests can find."""
        return max(0, digests * self.hash_tokens - self.proof_tokens) // self.unit_tokens

    @cached_property
    def first_full(self) -> int:
        """Return the number of the first group that needs all its blocks."""
        return next(number for number, group in enumerate(self.groups) if group.kind is Kind.FULL)

    def names(self, blocks: int) -> int:
        """Return how many blocks all groups have in so many blocks of `unit_tokens`; a prefix needs some of them."""
        return blocks * self._names

    @cached_property
    def _names(self) -> int:
        return sum(self.unit_tokens // group.block_tokens for group in self.groups)

    def check(self) -> None:
        """Raise ValueError, in one line, for groups that are not served."""
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise ValueError(f"number of KV groups is out of bounds: groups={len(self.groups)} min=1 max={MAX_GROUPS}")
        if all(group.kind is not Kind.FULL for group in self.groups):
            kinds = ",".join(sorted({group.kind.value for group in self.groups}))
            raise ValueError(
                f"KV groups are served beside full attention only: groups={len(self.groups)} kinds={kinds}"
            )
        for number, (kind, block, window, drafts) in enumerate(self.groups):
            if self.hash_tokens < 1 or block < 1 or block % self.hash_tokens:
                raise ValueError(
                    f"KV group's block is no multiple of the hash block: group={number} block_tokens={block} "
                    f"hash_tokens={self.hash_tokens}"
                )
            if (window < 1) is (kind in (Kind.WINDOW, Kind.CHUNK)):
                raise ValueError(
                    f"KV group's window is out of bounds: group={number} kind={kind.value} window_tokens={window}"
                )
            if drafts and kind not in (Kind.FULL, Kind.WINDOW):
                raise ValueError(f"KV group of this kind has no drafts: group={number} kind={kind.value}")
            # A chunk that begins inside a block: vLLM's own rule forgets what lies before it in the block.
            if kind is Kind.CHUNK and window % self.unit_tokens:
                raise ValueError(
                    f"KV group's chunk is no multiple of all blocks: group={number} window_tokens={window} "
                    f"unit_tokens={self.unit_tokens}"
                )

    def ratio(self, group: int) -> int:
        """Return how many digests of the prompt a block of this group has: its own one is the last of them."""
        return self.groups[group].block_tokens // self.hash_tokens

    def wanted(self, local: int, prefixes: Numbers) -> list[Numbers]:
        """Return, for each group, the blocks that some of these prefixes needs; they are longer than the local one.

        The engine's own cache has the first `local` tokens.  All are tokens, multiples of the unit, and rising.
        """
        if not len(prefixes):
            return [prefixes] * len(self.groups)
        found = []
        for group in self.groups:
            start = max(int(group.first(prefixes)[0]), local // group.block_tokens)
            blocks: Numbers = np.arange(start, prefixes[-1] // group.block_tokens + group.ahead)
            # Of the prefixes that reach a block the shortest one begins to read first.
            shortest = prefixes[np.searchsorted(prefixes, (blocks + 1 - group.ahead) * group.block_tokens)]
            found.append(blocks[group.first(shortest) <= blocks])
        return found

    def prefixes(self, local: int, above: int, usable: int, there: Sequence[npt.NDArray[Any]], room: int) -> Numbers:
        """Return the prefixes of more than `above`, up to `usable` tokens, for which each group has its blocks.

        `there[g][i]`: whether there is block i of group g behind the `local` tokens; of full attention all are.
        `room`: the most items.  The cost depends on the blocks that these prefixes need.
        """
        unit = self.unit_tokens
        tokens: Numbers = np.arange(above // unit + 1, usable // unit + 1, dtype=np.int64) * unit
        items, good = np.zeros_like(tokens), np.ones(len(tokens), dtype=np.bool_)
        for group, present in zip(self.groups, there, strict=True):
            base = local // group.block_tokens
            ends, firsts = tokens // group.block_tokens - base, np.maximum(group.first(tokens) - base, 0)
            items += ends - firsts
            if group.kind is not Kind.FULL and len(tokens):
                ends = ends + group.ahead
                start, stop = int(firsts[0]), int(ends[-1])
                # The last block before each end that is missing, or -1.
                missing = np.where(present[start:stop], -1, np.arange(start, stop))
                last = np.maximum.accumulate(missing)[np.maximum(ends - 1 - start, 0)] if stop > start else -1
                good &= (last < firsts) | (ends == firsts)
        return tokens[good & (items <= max(room, 0))]

    def most_items(self, local: int, usable: int) -> int:
        """Return a bound for the items of a prefix of more than `local`, up to `usable` tokens."""
        most = 0
        for group in self.groups:
            blocks = (usable - local) // group.block_tokens
            if group.kind is Kind.CHUNK:
                blocks = min(blocks, group.window_tokens // group.block_tokens)
            elif group.kind is not Kind.FULL:
                blocks = min(blocks, group.window_blocks)
            most += blocks
        return most

    def items(self, local: int, tokens: int) -> list[range]:
        """Return, for each group, the blocks to load for a prefix of `tokens`. Both are multiples of the unit."""
        if tokens <= local:
            return [range(0)] * len(self.groups)
        return [
            range(max(local // group.block_tokens, group.first(tokens)), tokens // group.block_tokens)
            for group in self.groups
        ]

    def spans(self, local: int, staged: int, start: int, stop: int) -> list[range]:
        """Return which entries of a prefix's slot table are those of the blocks to load for tokens [start, stop).

        The table has the `items` of a prefix of `staged` tokens, group by group.  Nothing for groups that need none.
        """
        if self.partial:  # on the engine's thread, where each call below takes 3 us
            size = self.unit_tokens
            base, first, end = local // size, max(local, start) // size, min(staged, stop) // size
            return [range(first - base, end - base)] if first < end else []
        found, at = list[range](), 0
        for items, needed in zip(self.items(local, staged), self.items(start, stop), strict=True):
            first, end = max(needed.start, items.start), min(needed.stop, items.stop)
            if first < end:
                found.append(range(at + first - items.start, at + end - items.start))
            at += len(items)
        return found

    def saved(self, before: int, after: int, prefill: int, retention: int | None) -> list[range | Numbers]:
        """Return, for each group, the blocks to save when a request has the KV of `after` tokens, before of `before`.

        Of windows a later request needs only the last blocks before a point at which it goes on.  `prefill`: tokens
        that this request did not generate; `retention`: vLLM's `prefix_cache_retention_interval`, a multiple of the
        unit.  That point is the last unit before the end of `prefill`, with drafts the one before, for which there is
        a proof; with None also each unit, with more than 0 each multiple of it.  States are never saved this way: vLLM
        names their blocks when they are complete.
        """
        unit = self.unit_tokens
        goals = [(prefill - 1) // unit]
        if self.proof_tokens:  # the prompt itself once more, and one that continues it
            goals = [max(goals[0] - 1, 0), max(prefill // unit - 1, 0)]
        found = list[range | Numbers]()
        for group in self.groups:
            block, ahead = group.block_tokens, group.ahead
            first, stop = before // unit * unit // block, after // unit * unit // block
            if group.kind is Kind.WINDOW:
                blocks: Numbers = np.arange(first, stop)
                kept = np.zeros(len(blocks), dtype=np.bool_)
                if retention is not None:
                    for end in (goal * unit // block for goal in goals):
                        kept |= (blocks >= end - group.window_blocks) & (blocks < end + ahead)
                if step := (unit if retention is None else retention) // block:
                    tail = (blocks - ahead) % step >= step - group.window_blocks - ahead
                    kept |= tail & ((blocks >= ahead) | (step <= group.window_blocks + ahead))
                found.append(blocks[kept])
            else:
                found.append(range(first, first if group.kind is Kind.STATE else stop))
        return found
