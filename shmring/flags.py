"""Completion flags with their slot tables: one word per request that answers everything in a single acquire load.

Flag word: generation (40 bits) | state (4) | count (20).  Every transition by either side is a compare-and-swap that carries the
generation, so a late writer of an earlier use of the flag can never win.  State 0 is FREE; the others are the protocol's.

* SYNC flag: slot table and found word visible with the count.  The daemon writes entries, then exchanges the flag word; the
  engine loads the flag word (acquire), then reads no entry beyond the count it saw.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._atomics import Words
from .errors import SegmentCorrupt
from .layout import LINE_BYTES, Layout

STATE_BITS, COUNT_BITS = 4, 20
GENERATION_BITS = 40
MAX_COUNT = (1 << COUNT_BITS) - 1
MAX_GENERATION = (1 << GENERATION_BITS) - 1
FREE = 0

_STATE_SHIFT = COUNT_BITS
_GENERATION_SHIFT = COUNT_BITS + STATE_BITS
_WORDS_PER_LINE = LINE_BYTES // 8
_FOUND = 1  # word of the line: blocks the store has, from block 0


class Flag(NamedTuple):
    """One flag word taken apart."""

    generation: int
    state: int
    count: int


def pack(generation: int, state: int, count: int) -> int:
    """The flag word of (generation, state, count). ValueError when one is out of its bits."""
    if not (0 <= generation <= MAX_GENERATION and 0 <= state < 1 << STATE_BITS and 0 <= count <= MAX_COUNT):
        raise ValueError(f"flag out of bounds: generation={generation} state={state} count={count}")
    return generation << _GENERATION_SHIFT | state << _STATE_SHIFT | count


def unpack(word: int) -> Flag:
    return Flag(word >> _GENERATION_SHIFT, word >> _STATE_SHIFT & (1 << STATE_BITS) - 1, word & MAX_COUNT)


class FlagTable:
    """The flags of one segment, seen from either side."""

    def __init__(self, buffer: memoryview, words: Words, layout: Layout) -> None:
        self.flag_count = layout.flag_count
        self.table_entries = layout.table_entries
        self._slot_count = layout.slot_count
        self._words = words
        self._base = layout.flags_offset // 8
        end = layout.table_offset + layout.flag_count * layout.table_entries * 4
        table: npt.NDArray[np.uint32] = np.frombuffer(buffer[layout.table_offset : end], dtype="<u4")
        self._table = table.reshape(layout.flag_count, layout.table_entries)

    def load(self, index: int) -> int:
        """The flag word, by one acquire load (SYNC flag)."""
        return self._words.load_acquire(self._base + index * _WORDS_PER_LINE)

    def exchange(self, index: int, expected: int, desired: int) -> bool:
        """Compare-and-swap of the whole word (SYNC flag); False when another transition came first."""
        return self._words.compare_exchange(self._base + index * _WORDS_PER_LINE, expected, desired) == expected

    def found(self, index: int) -> int:
        """How many leading blocks the store holds; written by the daemon before the count that needs it."""
        return self._words.load_acquire(self._base + index * _WORDS_PER_LINE + _FOUND)

    def set_found(self, index: int, blocks: int) -> None:
        self._words.store_release(self._base + index * _WORDS_PER_LINE + _FOUND, blocks)

    def write_slots(self, index: int, start: int, slots: npt.ArrayLike) -> None:
        """Daemon: enter slot numbers from block `start` on, before the exchange that publishes them (SYNC flag)."""
        entries = np.asarray(slots, dtype=np.uint32)
        self._table[index, start : start + len(entries)] = entries

    def read_slots(self, index: int, start: int, stop: int) -> list[int]:
        """Engine: a checked copy of the entries [start, stop). SegmentCorrupt when a slot number is out of bounds."""
        if not 0 <= start <= stop <= self.table_entries:
            raise SegmentCorrupt(f"block range outside the slot table: start={start} stop={stop} max={self.table_entries}")
        slots: list[int] = self._table[index, start:stop].tolist()
        if slots and max(slots) >= self._slot_count:
            raise SegmentCorrupt(f"slot number out of bounds: slot={max(slots)} bound={self._slot_count}")
        return slots


class FlagAllocator:
    """Engine: hands out free flags, each with a new generation. The daemon frees them by exchanging state FREE in."""

    def __init__(self, table: FlagTable) -> None:
        self._table = table
        self._free = list(range(table.flag_count - 1, -1, -1))
        self._returning: list[int] = []

    def take(self, state: int) -> tuple[int, int] | None:
        """(index, generation) of a flag now in `state` with count 0; None when all are in use."""
        if not self._free:
            self.collect()
        while self._free:
            index = self._free.pop()
            word = self._table.load(index)
            flag = unpack(word)
            generation = flag.generation % MAX_GENERATION + 1
            if flag.state == FREE and self._table.exchange(index, word, pack(generation, state, 0)):
                return index, generation
            self._returning.append(index)
        return None

    def give_back(self, index: int) -> None:
        """The engine is done with this flag; it can be taken again once the daemon set it FREE."""
        self._returning.append(index)

    def collect(self) -> int:
        """Look at the flags given back; how many are still with the daemon."""
        still: list[int] = []
        for index in self._returning:
            (self._free if unpack(self._table.load(index)).state == FREE else still).append(index)
        self._returning = still
        return len(still)
