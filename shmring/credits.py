"""Save credits: the daemon grants slot numbers, the engine takes them; a counter in shared memory per direction.

* SYNC credit: slot number visible with the counter.  The daemon writes the entry, then stores `granted` (release);
  the engine loads `granted` (acquire), then reads the entry.
* SYNC taken: entry read before it is written again.  The engine reads the entry, then stores `taken` (release); a
  reader of the segment loads `taken` (acquire).

The daemon never has more slots outstanding than there are entries.  A slot comes back in a SAVED record (SYNC tail),
which the engine pushes after it took the slot; so the daemon never overwrites an entry before the engine read it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._atomics import Words
from .errors import SegmentCorrupt
from .layout import Layout, Line


def _entries(buffer: memoryview, layout: Layout) -> npt.NDArray[np.uint32]:
    end = layout.credits_offset + layout.credit_entries * 4
    return np.frombuffer(buffer[layout.credits_offset : end], dtype="<u4")


class CreditGranter:
    """Daemon: the right to grant slots."""

    def __init__(self, buffer: memoryview, words: Words, layout: Layout) -> None:
        self._entries = _entries(buffer, layout)
        self._words = words
        self._mask = layout.credit_entries - 1
        # SYNC credit: slot number visible with the counter
        self._granted = words.load_acquire(Line.CREDITS_GRANTED)

    def grant(self, slots: list[int]) -> None:
        """Grant these slots. The caller keeps at most `credit_entries` outstanding."""
        self._entries[self._granted + np.arange(len(slots)) & self._mask] = slots
        self._granted += len(slots)
        # SYNC credit: slot number visible with the counter
        self._words.store_release(Line.CREDITS_GRANTED, self._granted)


class CreditTaker:
    """Engine: the right to take granted slots."""

    def __init__(self, buffer: memoryview, words: Words, layout: Layout) -> None:
        self._entries = _entries(buffer, layout)
        self._words = words
        self._mask = layout.credit_entries - 1
        self._slot_count = layout.slot_count
        # SYNC taken: entry read before it is written again
        self._taken = words.load_acquire(Line.CREDITS_TAKEN)

    def available(self) -> int:
        """Return how many slots `take` would give now. Raises SegmentCorrupt for an impossible counter."""
        # SYNC credit: slot number visible with the counter
        count = self._words.load_acquire(Line.CREDITS_GRANTED) - self._taken
        if not 0 <= count <= self._mask + 1:
            raise SegmentCorrupt(f"credit counter is impossible: outstanding={count} max={self._mask + 1}")
        return count

    def take(self, count: int) -> list[int]:
        """Take up to `count` granted slots. Raises SegmentCorrupt when a slot number is out of bounds."""
        count = max(0, min(count, self.available()))
        slots = [int(self._entries[self._taken + i & self._mask]) for i in range(count)]
        if slots and max(slots) >= self._slot_count:
            raise SegmentCorrupt(f"credit slot out of bounds: slot={max(slots)} bound={self._slot_count}")
        self._taken += count
        # SYNC taken: entry read before it is written again
        self._words.store_release(Line.CREDITS_TAKEN, self._taken)
        return slots
