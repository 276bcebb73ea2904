"""The hint ring: single producer, single consumer, variable-size records, no lock and no system call.

A record is a 16-byte header (payload bytes u32, kind u32, position u64) and its payload, padded to 64 bytes.  Records never
wrap: a PADDING record fills the end of the ring.  `tail` and `head` count bytes ever pushed and consumed and are taken modulo
the capacity, a power of two.

Two ordering pairs, named by the same words at both ends:

* SYNC tail: record content visible in peek.  Producer stores tail (release), consumer loads it (acquire).
* SYNC head: record space free in push.  Consumer stores head (release), producer loads it (acquire).

and the wake-up handshake, store -> fence -> load on both sides, so that at least one of the two sees the other:

* SYNC sleep: producer stores tail, fences, loads sleeping; consumer stores sleeping, fences, loads tail.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from ._atomics import Words, fence
from .errors import SegmentCorrupt
from .layout import Layout, Line

_HEADER = struct.Struct("<IIQ")
HEADER_BYTES = _HEADER.size
ALIGN = 64
PADDING = 0xFFFFFFFF

Payload = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Record:
    """One record: `kind` is the caller's, `payload` is a view that is valid until Consumer.advance()."""

    kind: int
    payload: memoryview


class Producer:
    """The right to push; one per ring, in the engine's scheduler process."""

    def __init__(self, buffer: memoryview, words: Words, layout: Layout, ring_bell: Callable[[], None]) -> None:
        self._ring = buffer[layout.ring_offset : layout.ring_offset + layout.ring_bytes]
        self._words = words
        self._capacity = layout.ring_bytes
        self._ring_bell = ring_bell
        self._tail = words.load_acquire(Line.TAIL)
        self._head = words.load_acquire(Line.HEAD)
        self.max_payload_bytes = max_payload_bytes(layout)

    def push(self, kind: int, *parts: Payload) -> bool:
        """Append one record made of `parts`. False when the ring is full; ValueError for a record that never fits."""
        length = 0
        for part in parts:
            length += len(part)
        if length > self.max_payload_bytes:
            raise ValueError(f"record too large: payload_bytes={length} max={self.max_payload_bytes}")
        need = (HEADER_BYTES + length + ALIGN - 1) & -ALIGN
        tail = self._tail
        position = tail & (self._capacity - 1)
        to_end = self._capacity - position
        total = need if need <= to_end else to_end + need
        if tail + total - self._head > self._capacity:
            # SYNC head: record space free in push
            self._head = self._words.load_acquire(Line.HEAD)
            used = tail - self._head
            if not 0 <= used <= self._capacity:
                raise SegmentCorrupt(f"ring head is impossible: head={self._head} tail={tail} capacity={self._capacity}")
            if used + total > self._capacity:
                return False
        ring = self._ring
        if need > to_end:
            _HEADER.pack_into(ring, position, 0, PADDING, tail)
            tail += to_end
            position = 0
        _HEADER.pack_into(ring, position, length, kind, tail)
        at = position + HEADER_BYTES
        for part in parts:
            end = at + len(part)
            ring[at:end] = part
            at = end
        tail += need
        self._tail = tail
        # SYNC tail: record content visible in peek
        self._words.store_release(Line.TAIL, tail)
        # SYNC sleep: the tail is stored before sleeping is read
        fence()
        if self._words.load_acquire(Line.SLEEPING):
            self._ring_bell()
        return True


class Consumer:
    """The right to take records out; one per ring, in the daemon. Everything it reads is checked before use."""

    def __init__(self, buffer: memoryview, words: Words, layout: Layout) -> None:
        # Read-only: a payload handed out is a view, and nobody may write the producer's memory through it.
        self._ring = buffer[layout.ring_offset : layout.ring_offset + layout.ring_bytes].toreadonly()
        self._words = words
        self._capacity = layout.ring_bytes
        self._max_payload = max_payload_bytes(layout)
        self._head = words.load_acquire(Line.HEAD)
        self._next = self._head

    def peek(self) -> Record | None:
        """The oldest record, or None. Raises SegmentCorrupt when what stands there cannot be a record."""
        # SYNC tail: record content visible in peek
        tail = self._words.load_acquire(Line.TAIL)
        head = self._head
        capacity = self._capacity
        if not 0 <= tail - head <= capacity or tail % ALIGN:
            raise SegmentCorrupt(f"ring tail is impossible: tail={tail} head={head} capacity={capacity}")
        while head != tail:
            position = head & (capacity - 1)
            length, kind, stamp = _HEADER.unpack_from(self._ring, position)
            if stamp != head:
                raise SegmentCorrupt(f"record stamp differs: stamp={stamp} position={head}")
            to_end = capacity - position
            if kind == PADDING:
                head += to_end
                if head - tail > 0 or position == 0:
                    raise SegmentCorrupt(f"padding runs past the tail: head={head} tail={tail}")
                continue
            need = (HEADER_BYTES + length + ALIGN - 1) & -ALIGN
            if length > self._max_payload or need > to_end or head + need > tail:
                raise SegmentCorrupt(f"record length is impossible: payload_bytes={length} max={self._max_payload}")
            self._next = head + need
            start = position + HEADER_BYTES
            return Record(kind, self._ring[start : start + length])
        self._next = head
        if head != self._head:
            self.advance()
        return None

    def advance(self) -> None:
        """Give the space of the record last peeked back to the producer."""
        self._head = self._next
        # SYNC head: record space free in push
        self._words.store_release(Line.HEAD, self._head)

    def prepare_sleep(self) -> bool:
        """Announce sleep; True when the ring is still empty, so that waiting for the doorbell loses nothing."""
        self._words.store_release(Line.SLEEPING, 1)
        # SYNC sleep: sleeping is stored before the tail is read
        fence()
        if self._words.load_acquire(Line.TAIL) == self._head:
            return True
        self.wake()
        return False

    def wake(self) -> None:
        """No bell is needed from here on."""
        self._words.store_release(Line.SLEEPING, 0)


def max_payload_bytes(layout: Layout) -> int:
    """The largest payload: half the ring, so that a record and the padding before it always fit together."""
    return layout.ring_bytes // 2 - HEADER_BYTES
