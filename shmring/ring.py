"""The hint ring: one producer, one consumer, records of variable size, no lock and no system call.

A record is a 16-byte header (payload bytes u32, kind u32, position u64) and its payload, padded to 64 bytes.  Records
never wrap: a PADDING record fills the end of the ring.  `tail` and `head` count the bytes ever pushed and consumed; the
offset in the ring is that count modulo the capacity, a power of two.

Two ordering pairs; the same words stand at both ends:

* SYNC tail: record content visible in peek.  Producer stores tail (release), consumer loads it (acquire).
* SYNC head: record space free in push.  Consumer stores head (release), producer loads it (acquire).

The wake-up handshake is store, fence, load on both sides, so that at least one side sees the other:

* SYNC sleep: tail and sleeping cross.  Producer stores tail, fences, loads sleeping; consumer stores sleeping,
  fences, loads tail.  Words.publish does the three steps in one call.

tests/models/ring.pml checks this protocol under a weak memory model and shows that each of these orders is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from ._atomics import Pusher, Words
from .errors import SegmentCorrupt
from .layout import Layout, Line

_HEADER = struct.Struct("<IIQ")
HEADER_BYTES = _HEADER.size
ALIGN = 64
PADDING = 0xFFFFFFFF

_ROUND = HEADER_BYTES + ALIGN - 1


class Record(NamedTuple):
    """One record. The caller defines `kind`; `payload` is a view that is valid until Consumer.advance()."""

    kind: int
    payload: memoryview


class Producer(Pusher):
    """The right to push: one per ring, in the engine's scheduler process. `push`, `fits` and `hint` are in C.

    Two threads of that process push: the scheduler's, and the one that hints early.  `push` and `hint` keep the GIL
    from their look at the room until the record is published, and run no Python in between.  So records follow each
    other as if one thread pushed them, which the model checks, too.  Without a GIL there is no early hint.

    `push(kind, payload)` appends one record and returns False when the ring is full; `fits(length)` tells whether a
    payload of so many bytes can be pushed now.  `push` raises ValueError for a record that never fits or a kind outside
    0..PADDING-1, and both raise SegmentCorrupt for an impossible head.  An exception leaves the ring as it was.
    `hint` also takes a flag from a FlagAllocator; connector/request/hints.py calls it.
    """

    max_payload_bytes: int
    _words: Words
    _dropped: int

    def __new__(cls, buffer: memoryview, words: Words, layout: Layout, ring_bell: Callable[[], object]) -> Producer:
        """Continue where the ring's words stand. Raises SegmentCorrupt for an impossible position."""
        tail, head = _position(words, layout)
        ring = buffer[layout.ring_offset : layout.ring_offset + layout.ring_bytes]
        self = super().__new__(cls, ring, words, (Line.TAIL, Line.HEAD, Line.SLEEPING), tail, head, ring_bell)
        self.max_payload_bytes = max_payload_bytes(layout)
        self._words, self._dropped = words, 0
        return self

    def count_dropped(self) -> None:
        """Count a hint that was not pushed, for readers of the segment."""
        self._dropped += 1
        # SYNC dropped: read as it is, orders nothing
        self._words.store_release(Line.HINTS_DROPPED, self._dropped)


class Consumer:
    """The right to take records out: one per ring, in the daemon. It checks everything before it uses it."""

    def __init__(self, buffer: memoryview, words: Words, layout: Layout) -> None:
        """Continue where the ring's words stand. Raises SegmentCorrupt for an impossible position."""
        # Read-only: a payload is a view, and its reader must not write the producer's memory.
        self._ring = buffer[layout.ring_offset : layout.ring_offset + layout.ring_bytes].toreadonly()
        self._words = words
        self._capacity = layout.ring_bytes
        self._max_payload = max_payload_bytes(layout)
        _, self._head = _position(words, layout)
        self._next = self._head

    @property
    def dropped(self) -> int:
        """Hints that the producer did not push, by the producer's own count."""
        # SYNC dropped: read as it is, orders nothing
        return self._words.load_acquire(Line.HINTS_DROPPED)

    @property
    def waiting(self) -> bool:
        """Whether `peek` has something to look at. Without prepare_sleep, look again after some time: no bell comes."""
        # Orders nothing (SYNC tail is peek's, which loads the tail again).
        return self._words.load_acquire(Line.TAIL) != self._head

    def peek(self) -> Record | None:
        """Return the oldest record, or None. Raises SegmentCorrupt where no record can stand.

        The work is bounded for any bytes: it skips at most one padding, because none can follow at position 0.
        """
        # SYNC tail: record content visible in peek
        tail = self._words.load_acquire(Line.TAIL)
        head = self._head
        if tail == head:
            self._next = head
            return None
        capacity = self._capacity
        if not 0 < tail - head <= capacity or tail % ALIGN:
            raise SegmentCorrupt(f"ring tail is impossible: tail={tail} head={head} capacity={capacity}")
        position = head & (capacity - 1)
        # Check and use one copy of the header: the producer may write meanwhile.
        length, kind, stamp = _HEADER.unpack_from(self._ring, position)
        if kind == PADDING and stamp == head and position:
            head += capacity - position
            position = 0  # without a record here, the stamp is an older one
            length, kind, stamp = _HEADER.unpack_from(self._ring, 0)
        if stamp != head:
            raise SegmentCorrupt(f"record stamp differs: stamp={stamp} position={head}")
        if kind == PADDING:
            raise SegmentCorrupt(f"padding where none can be: position={position}")
        end = head + (length + _ROUND & -ALIGN)
        if length > self._max_payload or end - head > capacity - position or end > tail:
            raise SegmentCorrupt(f"record length is impossible: payload_bytes={length} max={self._max_payload}")
        self._next = end
        start = position + HEADER_BYTES
        return Record(kind, self._ring[start : start + length])

    def advance(self) -> None:
        """Give the space of the last peeked record back to the producer."""
        self._head = self._next
        # SYNC head: record space free in push
        self._words.store_release(Line.HEAD, self._head)

    def prepare_sleep(self) -> bool:
        """Announce sleep. Returns True while the ring is empty: then waiting for the doorbell loses no record."""
        # SYNC sleep: tail and sleeping cross
        if self._words.publish(Line.SLEEPING, 1, Line.TAIL) == self._head:
            return True
        self.wake()
        return False

    def wake(self) -> None:
        """Announce that no bell is needed any more."""
        # Orders nothing (SYNC sleep is about falling asleep): a late sight of it costs one needless bell.
        self._words.store_release(Line.SLEEPING, 0)


def _position(words: Words, layout: Layout) -> tuple[int, int]:
    """Return (tail, head), checked: the other side may have written them before."""
    # SYNC tail: record content visible in peek
    # SYNC head: record space free in push
    tail, head = words.load_acquire(Line.TAIL), words.load_acquire(Line.HEAD)
    if not 0 <= tail - head <= layout.ring_bytes or tail % ALIGN or head % ALIGN or tail >> 62:
        raise SegmentCorrupt(f"ring position is impossible: tail={tail} head={head} capacity={layout.ring_bytes}")
    return tail, head


def max_payload_bytes(layout: Layout) -> int:
    """Return the largest payload: half the ring, so that a record and the padding before it always fit together."""
    return layout.ring_bytes // 2 - HEADER_BYTES
