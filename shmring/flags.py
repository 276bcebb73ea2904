"""Completion flags with their slot tables: one word per request that answers everything in a single acquire load.

Flag word: generation (40 bits) | state (4) | count (20).  Every transition by either side is a compare-and-swap that
carries the generation, so a late writer of an earlier use of the flag can never win.  State 0 is FREE; the others are
the protocol's.

Found word and disk word: generation (40 bits) | blocks (24), so that what an earlier use of the flag left there reads
as nothing.

* SYNC flag: slot table and found word visible with the count.  The daemon writes entries and both words, then exchanges
  the flag word; the engine loads or exchanges the flag word (acquire), then reads no entry beyond the count it claimed.
* SYNC slots: slots read before they are given up.  The engine reads entries and slots, then exchanges the claim away
  (un-claim or release); the daemon loads or exchanges the flag word (acquire), then reuses the slots.
* SYNC claim: entry and claim cross.  The engine exchanges its claim in, fences, then reads the entries.  The daemon
  writes another slot over an entry, fences, then loads the flag word: if that is unclaimed, nobody will read the slot
  that stood there.  So a claim may also be of a word that was taken back and came again with other entries.
* SYNC copy: the copy visible with the entry.  The daemon copies a block to its second slot, fences, then writes the
  entry; the engine reads the entry, fences, then reads the slot.

Entries are plain stores, so the flags of one segment belong to one thread on each side.  tests/models/flag.pml and
move.pml are this protocol under a weak memory model; each of these orders is shown there to be needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._atomics import Words, fence
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
_DISK = 2  # word of the line: blocks that were fetched from disk for this use
_TOLD = {_FOUND: "found", _DISK: "disk"}
_TOLD_BITS = 24
_LOOKS_PER_TAKE = 64


class Flag(NamedTuple):
    """One flag word taken apart."""

    generation: int
    state: int
    count: int  # type: ignore[assignment]  # a field of ours, not tuple.count


def pack(generation: int, state: int, count: int) -> int:
    """The flag word of (generation, state, count). ValueError when one is out of its bits."""
    if not (0 <= generation <= MAX_GENERATION and 0 <= state < 1 << STATE_BITS and 0 <= count <= MAX_COUNT):
        raise ValueError(f"flag out of bounds: generation={generation} state={state} count={count}")
    return generation << _GENERATION_SHIFT | state << _STATE_SHIFT | count


def unpack(word: int) -> Flag:
    return Flag(word >> _GENERATION_SHIFT, word >> _STATE_SHIFT & (1 << STATE_BITS) - 1, word & MAX_COUNT)


def states(buffer: memoryview, layout: Layout) -> npt.NDArray[np.uint64]:
    """Return the state of every flag, shape [flag_count]. It orders nothing: only for a reader that just looks."""
    lines = np.frombuffer(buffer[layout.flags_offset : layout.table_offset], dtype="<u8")
    return lines[::_WORDS_PER_LINE] >> np.uint64(_STATE_SHIFT) & np.uint64((1 << STATE_BITS) - 1)


class FlagTable:
    """The flags of one segment, seen from either side."""

    def __init__(self, buffer: memoryview, words: Words, layout: Layout) -> None:
        self.flag_count = layout.flag_count
        self.table_entries = layout.table_entries
        self._slot_bound = layout.slot_bound
        # The flag lines and nothing else: an index that is too large or negative is an IndexError, never another word.
        self._words = Words(buffer[layout.flags_offset : layout.table_offset], writable=words.writable)
        self._load_acquire = self._words.load_acquire
        end = layout.table_offset + layout.flag_count * layout.table_entries * 4
        table: npt.NDArray[np.uint32] = np.frombuffer(buffer[layout.table_offset : end], dtype="<u4")
        self._table = table.reshape(layout.flag_count, layout.table_entries)

    def load(self, index: int) -> int:
        """The flag word, by one acquire load. IndexError outside 0..flag_count-1 (here and below)."""
        # SYNC flag: slot table and found word visible with the count
        # SYNC slots: slots read before they are given up
        return self._load_acquire(index * _WORDS_PER_LINE)

    def flag(self, index: int) -> Flag:
        """The flag word taken apart."""
        return unpack(self.load(index))

    def exchange(self, index: int, expected: int, desired: int) -> bool:
        """Compare-and-swap of the whole word; False when another transition came first. Acquire and release, both."""
        # SYNC flag: slot table and found word visible with the count
        # SYNC slots: slots read before they are given up
        return self._words.compare_exchange(index * _WORDS_PER_LINE, expected, desired) == expected

    def found(self, index: int) -> int:
        """How many leading blocks the store holds for the flag's present use; 0 as long as the daemon has not said."""
        return self._told(index, _FOUND) or 0

    def set_found(self, index: int, blocks: int) -> None:
        """Daemon: say how many leading blocks the store holds, before the exchange whose count needs it (SYNC flag)."""
        self._tell(index, _FOUND, blocks)

    def disk(self, index: int) -> int | None:
        """How many blocks came from disk for the flag's present use; None when the daemon has not said."""
        return self._told(index, _DISK)

    def set_disk(self, index: int, blocks: int) -> None:
        """Daemon: say how many blocks came from disk, before the exchange whose count covers them (SYNC flag)."""
        self._tell(index, _DISK, blocks)

    def _told(self, index: int, word: int) -> int | None:
        # SYNC flag: slot table and found word visible with the count
        generation, blocks = divmod(self._load_acquire(index * _WORDS_PER_LINE + word), 1 << _TOLD_BITS)
        if generation != unpack(self.load(index)).generation:
            return None
        if blocks > MAX_COUNT:
            raise SegmentCorrupt(f"{_TOLD[word]} blocks out of bounds: blocks={blocks} max={MAX_COUNT}")
        return blocks

    def _tell(self, index: int, word: int, blocks: int) -> None:
        if not 0 <= blocks <= MAX_COUNT:
            raise ValueError(f"{_TOLD[word]} blocks out of bounds: blocks={blocks} max={MAX_COUNT}")
        generation = unpack(self.load(index)).generation
        # SYNC flag: slot table and found word visible with the count
        self._words.store_release(index * _WORDS_PER_LINE + word, generation << _TOLD_BITS | blocks)

    def write_slots(self, index: int, start: int, slots: npt.ArrayLike) -> None:
        """Daemon: enter slot numbers from block `start` on, before the exchange that publishes them (SYNC flag)."""
        entries = np.asarray(slots, dtype=np.uint32)
        if not (0 <= index < self.flag_count and 0 <= start <= self.table_entries - len(entries)):
            raise IndexError(f"entries outside the slot table: flag={index} start={start} entries={len(entries)}")
        self._table[index, start : start + len(entries)] = entries

    def move(self, index: int, moves: Iterable[tuple[int, int]]) -> None:
        """Daemon: write over published entries, as (block, slot); either slot of a block holds its bytes.

        After it a load of the flag word says whether the engine can still come to read what stood there.
        """
        row = self._table[index] if 0 <= index < self.flag_count else None
        if row is None:
            raise IndexError(f"flag outside the slot table: flag={index} max={self.flag_count - 1}")
        # SYNC copy: the copy visible with the entry
        fence()
        for block, slot in moves:
            row[block] = slot  # one aligned store: whoever reads it now sees one slot or the other
        # SYNC claim: entry and claim cross
        fence()

    def read_slots(self, index: int, start: int, stop: int) -> list[int]:
        """Engine: a checked copy of the entries [start, stop), under its claim.

        SegmentCorrupt when a slot number is out of bounds.
        """
        if not 0 <= index < self.flag_count:
            raise IndexError(f"flag outside the slot table: flag={index} max={self.flag_count - 1}")
        if not 0 <= start <= stop <= self.table_entries:
            raise SegmentCorrupt(
                f"block range outside the slot table: start={start} stop={stop} max={self.table_entries}"
            )
        # SYNC claim: entry and claim cross
        fence()
        slots: list[int] = self._table[index, start:stop].tolist()
        # SYNC copy: the copy visible with the entry
        fence()
        if slots and max(slots) >= self._slot_bound:
            raise SegmentCorrupt(f"slot number out of bounds: slot={max(slots)} bound={self._slot_bound}")
        return slots


class FlagAllocator:
    """Engine: hands out free flags, each with a new generation. The daemon frees them by exchanging state FREE in."""

    def __init__(self, table: FlagTable) -> None:
        self._table = table
        self._free = list(range(table.flag_count - 1, -1, -1))
        self._returning: deque[int] = deque()

    def take(self, state: int) -> tuple[int, int] | None:
        """(index, generation) of a flag now in `state` with count 0; None when none of those looked at is free.

        Looks at most at the 64 flags given back longest ago, so that a daemon that frees nothing costs a bounded time.
        """
        if not self._free:
            for _ in range(min(len(self._returning), _LOOKS_PER_TAKE)):
                index = self._returning.popleft()
                free = unpack(self._table.load(index)).state == FREE
                (self._free if free else self._returning).append(index)
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
