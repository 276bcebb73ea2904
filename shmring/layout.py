"""The byte map of a control segment: the offset of every shared word, and the one check of a foreign geometry.

::

    0        64       128 ...                512      576      640                      4096
    +--------+--------+----------------------+--------+--------+------------------------+
    | magic  | geometry (plain, written once) | one 64-byte line per hot word (Line.*) |   header page
    +--------+--------+----------------------+--------+--------+------------------------+
    | hint ring            ring_bytes, a power of two                                   |   engine writes, daemon reads
    +------------------------------------------------------------------------------------+
    | completion flags     flag_count lines of 64 bytes: flag, found, disk, adopted word |   both, by compare-and-swap
    +------------------------------------------------------------------------------------+
    | slot tables          page_count pages of 256 x uint32, lent to flags in use       |   daemon writes, engine reads
    +------------------------------------------------------------------------------------+
    | credits              credit_entries x uint32, a power of two                      |   daemon writes, engine reads
    +------------------------------------------------------------------------------------+

Sizes are in bytes; words are little-endian uint64 unless the map says otherwise.  The creator writes the geometry
before it hands over the descriptor, and never changes it.  A reader copies it once, checks the copy, and uses that.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import astuple, dataclass

from .errors import SegmentCorrupt

MAGIC = int.from_bytes(b"KVPRING1", "little")
LAYOUT_VERSION = 4
LINE_BYTES = 64
HEADER_BYTES = 4096
HOT_OFFSET = 512
PAGE_ENTRIES = 256  # of a slot table
MAX_TOTAL_BYTES = 1 << 36

_GEOMETRY = struct.Struct("<11Q")


class Line(enum.IntEnum):
    """Word indices of the hot words, each alone on its cache line; the comments say `writer -> reader: meaning`."""

    TAIL = HOT_OFFSET // 8  # engine -> daemon: bytes ever pushed
    HEAD = TAIL + 8  # daemon -> engine: bytes ever consumed
    SLEEPING = TAIL + 16  # daemon -> engine: 1 while the consumer may block
    CONSUMER_BEAT = TAIL + 24  # daemon -> engine: CLOCK_MONOTONIC ns of its last loop
    PRODUCER_BEAT = TAIL + 32  # engine -> daemon: the same
    CONSUMER_STATE = TAIL + 40  # daemon -> engine: liveness.PeerState
    PRODUCER_STATE = TAIL + 48  # engine -> daemon: liveness.PeerState
    CONSUMER_GONE = TAIL + 56  # engine's watching thread -> engine: 1 after the daemon's end of file
    PRODUCER_GONE = TAIL + 64  # daemon's watching loop -> daemon, stat: 1 after the engine's end of file
    CREDITS_GRANTED = TAIL + 72  # daemon -> engine: slots ever granted for saves
    CREDITS_TAKEN = TAIL + 80  # engine -> stat: slots ever taken
    HINTS_DROPPED = TAIL + 88  # engine -> daemon, stat: hints that found no room (flags, pages, ring)


@dataclass(frozen=True)
class Layout:
    """Sizes of one control segment, and the offsets that follow from them.

    `ring_bytes` and `credit_entries` are powers of two.  The slot tables of all flags share `page_count` pages of
    PAGE_ENTRIES; `table_entries` bounds the table of one request.
    Slots [0, slot_count) lie in host memory, slots [slot_count, slot_bound) in device memory.
    """

    # In the order of the geometry.
    epoch: int
    ring_bytes: int
    flag_count: int
    page_count: int
    table_entries: int
    credit_entries: int
    slot_count: int
    device_slots: int = 0

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("ring_bytes", self.ring_bytes, 4096, 1 << 30),
            ("flag_count", self.flag_count, 1, 1 << 20),
            ("page_count", self.page_count, 1, 1 << 26),
            ("table_entries", self.table_entries, 1, PAGE_ENTRIES * 0xFFFF),  # a hint counts pages in 16 bits
            ("credit_entries", self.credit_entries, 1, 1 << 24),
            ("slot_count", self.slot_count, 1, (1 << 32) - 1),
            ("device_slots", self.device_slots, 0, (1 << 32) - 1 - self.slot_count),
            ("epoch", self.epoch, 1, (1 << 63) - 1),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} must be within {low}..{high}: {name}={value}")
        for name, value in (("ring_bytes", self.ring_bytes), ("credit_entries", self.credit_entries)):
            if value & (value - 1):
                raise ValueError(f"{name} must be a power of 2: {name}={value}")
        if self.total_bytes > MAX_TOTAL_BYTES:
            raise ValueError(f"the segment must not exceed {MAX_TOTAL_BYTES} bytes: total_bytes={self.total_bytes}")

    @property
    def slot_bound(self) -> int:
        return self.slot_count + self.device_slots

    @property
    def ring_offset(self) -> int:
        return HEADER_BYTES

    @property
    def flags_offset(self) -> int:
        return self.ring_offset + self.ring_bytes

    @property
    def table_offset(self) -> int:
        return self.flags_offset + self.flag_count * LINE_BYTES

    @property
    def credits_offset(self) -> int:
        return _round_up(self.table_offset + self.page_count * PAGE_ENTRIES * 4, LINE_BYTES)

    @property
    def total_bytes(self) -> int:
        return _round_up(self.credits_offset + self.credit_entries * 4, 4096)

    def write(self, buffer: memoryview) -> None:
        """Write magic and geometry into the header, before anybody else can see the segment."""
        _GEOMETRY.pack_into(buffer, 0, MAGIC, LAYOUT_VERSION, self.total_bytes, *astuple(self))

    @classmethod
    def read(cls, buffer: memoryview) -> Layout:
        """Copy and check the geometry of a mapped segment. Raises SegmentCorrupt with field, value and bound."""
        if len(buffer) < HEADER_BYTES:
            raise SegmentCorrupt(f"segment is shorter than its header: bytes={len(buffer)} header={HEADER_BYTES}")
        magic, version, total, *geometry = _GEOMETRY.unpack_from(buffer, 0)
        if magic != MAGIC:
            raise SegmentCorrupt(f"not a kvprefetch segment: magic={magic:#x} expected={MAGIC:#x}")
        if version != LAYOUT_VERSION:
            raise SegmentCorrupt(f"layout version differs: version={version} expected={LAYOUT_VERSION}")
        try:
            layout = cls(*geometry)
        except ValueError as error:
            raise SegmentCorrupt(f"geometry out of bounds: {error}") from None
        if total != layout.total_bytes or total > len(buffer):
            raise SegmentCorrupt(
                f"size differs: total_bytes={total} computed={layout.total_bytes} mapped={len(buffer)}"
            )
        return layout


def pages_of(blocks: int) -> int:
    return -(-blocks // PAGE_ENTRIES)


def _round_up(value: int, to: int) -> int:
    return (value + to - 1) // to * to


def power_of_two_at_least(value: int) -> int:
    """Return the smallest power of two that is at least `value` and at least 1."""
    return 1 << max(0, value - 1).bit_length()
