"""The sizes that CUDA gives to exported and registered memory. Pure."""

from __future__ import annotations

import math
import mmap

GRAIN_BYTES = 2 << 20  # device memory for another process consists of whole grains
PIECE_BYTES = 16 << 20  # registered at a time, some milliseconds: other calls into CUDA may wait meanwhile


def pieces(size_bytes: int, slot_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, bytes) of the pieces in which to register a segment of slots.

    Each cut lies between two slots, because a copy must not span two registrations, and between two pages.  The last
    piece ends with the segment's last page.
    """
    least = math.lcm(slot_bytes, mmap.PAGESIZE)
    step = least * max(1, PIECE_BYTES // least)
    end = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return [(offset, min(step, end - offset)) for offset in range(0, end, step)]
