"""The hint ring behaves as a queue of byte strings, at every wrap; nothing impossible is believed."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.ring import ALIGN, HEADER_BYTES, PADDING, Consumer, Producer, Record

from .conftest import Control, small_layout

Make = Callable[..., Control]

RING = 4096
LARGEST = RING // 2 - HEADER_BYTES


def taken(record: Record | None) -> tuple[int, bytes] | None:
    return None if record is None else (record.kind, bytes(record.payload))


def need(length: int) -> int:
    return (HEADER_BYTES + length + ALIGN - 1) // ALIGN * ALIGN


def sides(make: Make, lines: int = 0) -> tuple[Control, Producer, Consumer]:
    """A fresh ring and its two sides, after as many empty records were pushed and taken."""
    control = make()
    producer, consumer = control.producer(), control.consumer()
    for _ in range(lines):
        assert producer.push(1)
        assert consumer.peek() is not None
        consumer.advance()
    return control, producer, consumer


class Model:
    """The ring's behaviour in terms of byte positions."""

    def __init__(self) -> None:
        self.records: deque[tuple[int, bytes, int]] = deque()
        self.tail = self.head = 0

    def push(self, kind: int, data: bytes) -> bool:
        to_end = RING - self.tail % RING
        total = need(len(data)) if need(len(data)) <= to_end else to_end + need(len(data))
        if self.tail + total - self.head > RING:
            return False
        self.tail += total
        self.records.append((kind, data, self.tail))
        return True

    def pop(self) -> tuple[int, bytes] | None:
        if not self.records:
            return None
        kind, data, self.head = self.records.popleft()
        return kind, data


steps = st.lists(
    st.one_of(
        st.none(),
        st.tuples(st.integers(0, PADDING - 1), st.integers(0, LARGEST), st.integers(0, 255)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_any_sequence_of_pushes_and_pops_does_what_a_queue_does(sequence: list[tuple[int, int, int] | None]) -> None:
    control, model = Control(small_layout()), Model()
    producer, consumer = control.producer(), control.consumer()
    for step in sequence:
        if step is None:
            assert taken(consumer.peek()) == model.pop()
            consumer.advance()
        else:
            kind, length, fill = step
            data = bytes([fill]) * length
            assert producer.push(kind, data) == model.push(kind, data)
    while (expected := model.pop()) is not None:
        assert taken(consumer.peek()) == expected
        consumer.advance()
    assert consumer.peek() is None


def test_a_record_of_every_size_wraps_at_every_offset(make: Make) -> None:
    for line in range(RING // ALIGN):
        for size in (0, 1, 47, 48, 49, 111, 112, 113, LARGEST // 2, LARGEST - 1, LARGEST):
            _, producer, consumer = sides(make, line)
            data = bytes(i & 0xFF for i in range(size))
            assert producer.push(2, data), "even the largest record fits an empty ring"
            assert producer.push(3, b"after") or need(size) > RING // 2 - ALIGN
            assert taken(consumer.peek()) == (2, data)


def test_a_full_ring_is_a_return_value_and_room_comes_back_with_each_record_taken(make: Make) -> None:
    control, producer, consumer = sides(make)
    count = 0
    while producer.push(1, bytes(48)):
        count += 1
    assert count == RING // ALIGN
    assert not producer.push(1)
    consumer.peek()
    consumer.advance()
    assert producer.push(1)
    assert not producer.push(1)
    assert control.consumer().peek() is not None, "a full ring is taken up as well"


def test_a_record_that_never_fits_is_misuse_and_names_value_and_bound(make: Make) -> None:
    _, producer, consumer = sides(make)
    with pytest.raises(ValueError, match=f"payload_bytes={LARGEST + 1} max={LARGEST}"):
        producer.push(1, bytes(LARGEST + 1))
    assert consumer.peek() is None


@pytest.mark.parametrize("kind", [-1, PADDING, PADDING + 1])
def test_the_kind_of_padding_and_kinds_out_of_bounds_are_misuse(make: Make, kind: int) -> None:
    with pytest.raises(ValueError, match=f"kind={kind}"):
        make().producer().push(kind, b"")


def test_a_push_that_raises_leaves_the_ring_as_it_was(make: Make) -> None:
    _, producer, consumer = sides(make)
    for wrong in ((1, 5), (1, "text"), (1, b"", b""), ("1", b"")):
        with pytest.raises(TypeError):
            producer.push(*wrong)
    assert consumer.peek() is None
    assert producer.push(2, b"next")
    assert taken(consumer.peek()) == (2, b"next")


def test_a_payload_cannot_be_written_through(make: Make) -> None:
    control = make()
    control.producer().push(1, b"abc")
    record = control.consumer().peek()
    assert record is not None
    assert record.payload.readonly
    with pytest.raises(TypeError):
        record.payload[0] = 0


def test_both_sides_take_up_the_ring_where_it_stands(make: Make) -> None:
    control, producer, consumer = sides(make)
    for number in range(3):
        producer.push(number, b"x")
    consumer.peek()
    consumer.advance()
    assert control.producer().push(3, b"y")
    again = control.consumer()
    kinds = []
    while (record := again.peek()) is not None:
        kinds.append(record.kind)
        again.advance()
    assert kinds == [1, 2, 3]


@pytest.mark.parametrize(
    ("tail", "head"), [(3, 0), (64, 1), (0, 64), (8192, 0), (2**64 - 64, 2**64 - 64), (2**64 - 1, 0)]
)
def test_neither_side_takes_up_a_ring_that_cannot_stand_so(make: Make, tail: int, head: int) -> None:
    control = make()
    control.words.store_release(Line.TAIL, tail)
    control.words.store_release(Line.HEAD, head)
    for side in (control.producer, control.consumer):
        with pytest.raises(SegmentCorrupt, match=f"tail={tail} head={head}"):
            side()


def test_the_bell_rings_for_a_sleeper_and_for_nobody_else(make: Make) -> None:
    control, producer, consumer = sides(make)
    producer.push(1)
    assert not consumer.prepare_sleep(), "a record is left: it takes its announcement back"
    assert control.bells == 0
    consumer.peek()
    consumer.advance()
    assert consumer.prepare_sleep()
    producer.push(1)
    assert control.bells == 1
    consumer.wake()
    producer.push(1)
    assert control.bells == 1


def test_clearing_the_bell_waits_for_nobody_whatever_the_producer_does_to_it() -> None:
    """Both sides share an open file: the producer can clear its O_NONBLOCK, and take a ring that the consumer saw."""
    bell = Doorbell.create()
    try:
        os.preadv(bell.fd, [bytearray(8)], -1, os.RWF_NOWAIT)
    except BlockingIOError:
        pass
    except OSError:
        bell.close()
        pytest.skip("no read that promises not to wait for an eventfd (Linux before 5.8; QEMU's user mode)")
    bell.ring()
    bell.clear()
    os.set_blocking(bell.fd, True)
    consumer = threading.Thread(target=bell.clear, daemon=True)
    consumer.start()
    consumer.join(5)
    waits = consumer.is_alive()
    bell.ring()  # lets it go
    consumer.join()
    bell.close()
    assert not waits


def test_the_bell_is_cleared_by_a_kernel_too_that_cannot_promise_not_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    bell = Doorbell.create()
    monkeypatch.setattr(os, "preadv", unknown)
    bell.ring()
    bell.clear()
    bell.clear()
    monkeypatch.undo()
    assert not select.select([bell.fd], [], [], 0)[0]
    bell.close()


@pytest.mark.parametrize("tail", [1, 63, RING + 64, 1 << 40, 2**64 - 64])
def test_a_tail_that_cannot_be_is_reported_and_not_followed(make: Make, tail: int) -> None:
    control = make()
    consumer = control.consumer()
    control.words.store_release(Line.TAIL, tail)
    with pytest.raises(SegmentCorrupt, match=f"tail={tail}"):
        consumer.peek()
    assert not consumer.prepare_sleep(), "nobody sleeps on a corrupt ring"


@pytest.mark.parametrize("length", [49, LARGEST + 1, 2**32 - 1])
def test_a_record_that_runs_past_the_end_of_the_ring_or_the_tail_is_not_handed_out(make: Make, length: int) -> None:
    """49 bytes take two lines, and there is but one before the end of the ring, or before the tail."""
    for lines_before, records in ((RING // ALIGN - 1, 2), (0, 1)):
        control, producer, consumer = sides(make, lines_before)
        for _ in range(records):
            producer.push(1)
        at = control.layout.ring_offset + lines_before * ALIGN
        control.buffer[at : at + 4] = length.to_bytes(4, "little")
        with pytest.raises(SegmentCorrupt, match=f"payload_bytes={length} "):
            consumer.peek()


def test_a_record_of_another_position_is_not_handed_out(make: Make) -> None:
    """Such as one of an earlier turn of the ring."""
    control = make()
    consumer = control.consumer()
    control.producer().push(1, b"x")
    at = control.layout.ring_offset + 8
    control.buffer[at : at + 8] = RING.to_bytes(8, "little")
    with pytest.raises(SegmentCorrupt, match=f"stamp={RING} position=0"):
        consumer.peek()
