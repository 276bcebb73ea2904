"""Completion flags with slot tables: one word per request, which one acquire load reads.

Flag word: generation (40 bits) | state (4) | count (20).  Every transition is a compare-and-swap that carries the
generation, so a late writer of an earlier use never wins.  State 0 is FREE; the protocol defines the others.

Found word and disk word: generation (40 bits) | blocks (24).  A word of an earlier use reads as nothing.
Adopted word: when the engine's scheduler took up the request of an early hint (CLOCK_MONOTONIC ns).

A use of a flag has as many pages of slot table as its blocks need.  The engine chooses them among those of free flags
and names them in the hint, so a page changes hands only while its flag is FREE.

* SYNC flag: slot table and found word visible with the count.  The daemon writes entries and both words, then exchanges
  the flag word; the engine loads or exchanges the flag word (acquire), then reads no entry beyond the claimed count.
* SYNC slots: slots read before they are given up.  The engine reads entries and slots, then exchanges the claim away
  (un-claim or release); the daemon loads or exchanges the flag word (acquire), then reuses the slots.
* SYNC claim: entry and claim cross.  The engine exchanges its claim in, fences, then reads the entries.  The daemon
  writes other entries after it took the flag back, and publishes the flag again.  So the engine may claim a word that
  came back since it looked: it reads the entries of that publication or later ones.
* SYNC copy: the copy visible with the entry.  The daemon copies a block to its second slot, fences, then writes the
  entry; the engine reads the entry, fences, then reads the slot.

Entries are plain stores, so on each side one thread uses the flags of a segment.  The engine's other thread, which
hints early, only takes FREE ones: `take` keeps the GIL, and `_collect` adds a flag to the free ones last.
tests/models/flag.pml and move.pml check this protocol under a weak memory model and show that each of these orders is
needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._atomics import Flags, Words, fence
from .layout import LINE_BYTES, PAGE_ENTRIES, Layout, pages_of

STATE_BITS, COUNT_BITS = 4, 20
GENERATION_BITS = 40
MAX_COUNT = (1 << COUNT_BITS) - 1
MAX_GENERATION = (1 << GENERATION_BITS) - 1
FREE = 0

STATE_SHIFT = COUNT_BITS
GENERATION_SHIFT = COUNT_BITS + STATE_BITS
_WORDS_PER_LINE = LINE_BYTES // 8
_FOUND = 1  # word of the line: leading blocks that the store holds
_DISK = 2  # word of the line: blocks fetched from disk for this use
ADOPTED = 3  # word of the line: as _handle.c writes it
_WORDS = {_FOUND: "found", _DISK: "disk"}
_BLOCK_BITS = 24
STATES = (1 << STATE_BITS) - 1
_LOOKS_PER_TAKE = 64


class Flag(NamedTuple):
    """One flag word taken apart."""

    generation: int
    state: int
    count: int  # type: ignore[assignment]  # a field of ours, not tuple.count


def pack(generation: int, state: int, count: int) -> int:
    """Return the flag word. Raises ValueError for a part that does not fit its bits."""
    if not (0 <= generation <= MAX_GENERATION and 0 <= state < 1 << STATE_BITS and 0 <= count <= MAX_COUNT):
        raise ValueError(f"flag out of bounds: generation={generation} state={state} count={count}")
    return generation << GENERATION_SHIFT | state << STATE_SHIFT | count


def unpack(word: int) -> Flag:
    return Flag(word >> GENERATION_SHIFT, word >> STATE_SHIFT & STATES, word & MAX_COUNT)


def states(buffer: memoryview, layout: Layout) -> npt.NDArray[np.uint64]:
    """Return the state of every flag, shape [flag_count]. The read orders nothing: only for a view of the segment."""
    lines = np.frombuffer(buffer[layout.flags_offset : layout.table_offset], dtype="<u8")
    return lines[::_WORDS_PER_LINE] >> np.uint64(STATE_SHIFT) & np.uint64(STATES)


class FlagTable(Flags[Flag]):
    """The flags of one segment, seen from either side. Methods raise IndexError outside 0..flag_count-1.

    In C (_flags.c):

    * `found(index)`: how many leading blocks the store holds for the flag's present use; 0 until the daemon wrote it.
    * `disk(index)`: how many blocks came from disk for the present use; None until the daemon wrote it.
    * `read_slots(index, start, stop)`: the entries [start, stop) as array("I"), under the engine's claim.  Raises
      SegmentCorrupt for a slot out of bounds.
    """

    _words: Words
    _pages: npt.NDArray[np.uint32]
    _tables: list[Sequence[int]]  # of each flag: the pages lent to it
    _free: list[int]  # flags and pages to hand out
    _free_pages: list[int]

    def __new__(cls, buffer: memoryview, words: Words, layout: Layout) -> FlagTable:
        end = layout.table_offset + layout.page_count * PAGE_ENTRIES * 4
        # Only the flag lines: an index out of bounds is an IndexError, never another word.
        lines = Words(buffer[layout.flags_offset : layout.table_offset], writable=words.writable)
        table, tables = buffer[layout.table_offset : end], list[Sequence[int]]([()] * layout.flag_count)
        free, free_pages = list[int](), list[int]()
        self = super().__new__(cls, lines, tables, free, free_pages, table, layout.slot_bound, Flag)
        self._words, self._tables, self._free, self._free_pages = lines, tables, free, free_pages
        self._pages = np.frombuffer(table, dtype="<u4").reshape(layout.page_count, PAGE_ENTRIES)
        return self

    def load(self, index: int) -> int:
        # SYNC flag: slot table and found word visible with the count
        # SYNC slots: slots read before they are given up
        return self._words.load_acquire(index * _WORDS_PER_LINE)

    def flag(self, index: int) -> Flag:
        return unpack(self.load(index))

    def exchange(self, index: int, expected: int, desired: int) -> bool:
        """Exchange the whole word (acquire and release); False when another transition came first."""
        # SYNC flag: slot table and found word visible with the count
        # SYNC slots: slots read before they are given up
        return self._words.compare_exchange(index * _WORDS_PER_LINE, expected, desired) == expected

    def adopted_ns(self, index: int) -> int:
        """Daemon: when the engine's scheduler last took up a request with this flag, in whatever use of it."""
        # SYNC adopted: read as it is, orders nothing
        return self._words.load_acquire(index * _WORDS_PER_LINE + ADOPTED)

    def set_found(self, index: int, blocks: int) -> None:
        """Daemon: write the found blocks, before the exchange that publishes a count of them (SYNC flag)."""
        self._write_blocks(index, _FOUND, blocks)

    def set_disk(self, index: int, blocks: int) -> None:
        """Daemon: write the blocks from disk, before the exchange that publishes a count of them (SYNC flag)."""
        self._write_blocks(index, _DISK, blocks)

    def _write_blocks(self, index: int, word: int, blocks: int) -> None:
        if not 0 <= blocks <= MAX_COUNT:
            raise ValueError(f"{_WORDS[word]} blocks out of bounds: blocks={blocks} max={MAX_COUNT}")
        # SYNC slots: slots read before they are given up
        generation = self._words.load_acquire(index * _WORDS_PER_LINE) >> GENERATION_SHIFT
        # SYNC flag: slot table and found word visible with the count
        self._words.store_release(index * _WORDS_PER_LINE + word, generation << _BLOCK_BITS | blocks)

    def lend(self, index: int, pages: Sequence[int]) -> None:
        """Use these pages, each in 0..page_count-1, as the flag's slot table from now on."""
        self._tables[index] = pages

    def lent(self, index: int) -> Sequence[int]:
        """Return the pages of the flag's slot table. Raises IndexError."""
        if not 0 <= index < len(self._tables):
            raise IndexError(f"flag outside the slot table: flag={index} max={len(self._tables) - 1}")
        return self._tables[index]

    def write_slots(self, index: int, start: int, slots: npt.ArrayLike) -> None:
        """Daemon: write slot numbers from block `start` on, before the exchange that publishes them (SYNC flag)."""
        entries, pages = np.asarray(slots, dtype=np.uint32), self.lent(index)
        if not 0 <= start <= len(pages) * PAGE_ENTRIES - len(entries):
            raise IndexError(f"entries outside the slot table: flag={index} start={start} entries={len(entries)}")
        done = 0
        # SYNC claim: entry and claim cross
        while done < len(entries):
            page, at = divmod(start + done, PAGE_ENTRIES)
            part = entries[done : done + PAGE_ENTRIES - at]
            self._pages[pages[page], at : at + len(part)] = part
            done += len(part)

    def move(self, index: int, moves: Iterable[tuple[int, int]]) -> None:
        """Daemon: overwrite published entries with (block, slot); both slots of a block hold its bytes.

        A claim may come at any moment, so the flag must pin both.
        """
        pages = self.lent(index)
        # SYNC copy: the copy visible with the entry
        fence()
        for block, slot in moves:
            # One aligned store: a reader sees one slot or the other.
            self._pages[pages[block // PAGE_ENTRIES], block % PAGE_ENTRIES] = slot


class FlagAllocator(FlagTable):
    """Engine: hands out free flags, each with a new generation and pages. The daemon frees a flag by an exchange.

    `take(state, items)`, in C, returns (index, generation) of a flag now in `state` with count 0 and a slot table for
    so many items; None when no flag or too few pages are found free.  It looks only at the 64 flags given back longest
    ago, so a daemon that frees nothing costs a bounded time.
    """

    def __init__(self, buffer: memoryview, words: Words, layout: Layout) -> None:
        self._free += range(layout.flag_count - 1, -1, -1)
        self._free_pages += range(layout.page_count - 1, -1, -1)
        self._returning = deque[int]()

    def room(self, blocks: int) -> bool:
        """Whether there are a flag and pages for so many blocks, as far as is known. The cost is bounded as above."""
        wanted = pages_of(blocks)
        if not self._free or len(self._free_pages) < wanted:
            self._collect()
        return bool(self._free) and len(self._free_pages) >= wanted

    def give_back(self, index: int) -> None:
        """Return a flag; `take` hands it and its pages out again once the daemon set it FREE."""
        self._returning.append(index)

    def _collect(self) -> None:
        for _ in range(min(len(self._returning), _LOOKS_PER_TAKE)):
            try:
                index = self._returning.popleft()
            except IndexError:  # another thread looks, too
                return
            if self.flag(index).state == FREE:
                pages = self.lent(index)
                self.lend(index, ())
                self._free_pages += pages
                self._free.append(index)
            else:
                self._returning.append(index)
