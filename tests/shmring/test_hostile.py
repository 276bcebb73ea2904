"""For any bytes from the other side: no crash, no hang, no read out of range, and a report that names the fault."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.kv import MAX_GROUPS
from kvprefetch.shmring.credits import CreditGranter, CreditTaker
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.flags import FlagAllocator, unpack
from kvprefetch.shmring.layout import Layout, Line
from kvprefetch.shmring.liveness import Liveness, PeerStatus
from kvprefetch.shmring.ring import ALIGN, HEADER_BYTES, PADDING, Consumer, Producer
from kvprefetch.shmring.wire import attach, records
from kvprefetch.shmring.wire.codec import decode_message, receive_message
from kvprefetch.shmring.wire.records import ProtocolError
from tests.support.encoded import encode_hint

from .conftest import Control, small_layout

LAYOUT = small_layout()
HEADER = struct.Struct("<IIQ")
MAX_RECORDS = LAYOUT.ring_bytes // ALIGN

# Places where a flipped byte matters (hot words, record headers), and any place.
places = st.one_of(
    st.sampled_from([int(line) * 8 + byte for line in Line for byte in range(8)]),
    st.integers(0, MAX_RECORDS - 1).flatmap(lambda line: st.integers(0, 15).map(lambda b: 4096 + line * ALIGN + b)),
    st.integers(0, LAYOUT.total_bytes - 1),
)
flips = st.lists(st.tuples(places, st.integers(1, 255)), min_size=1, max_size=8)
pushes = st.lists(st.integers(0, 300), max_size=12)


def flip(control: Control, changes: list[tuple[int, int]]) -> None:
    for at, mask in changes:
        control.buffer[at] ^= mask


def drain(consumer: Consumer, changed: Callable[[], None] = lambda: None) -> int:
    """Take every record; each payload lies inside the ring. Raises only SegmentCorrupt."""
    for count in range(2 * MAX_RECORDS):
        changed()
        record = consumer.peek()
        if record is None:
            consumer.prepare_sleep()
            consumer.wake()
            return count
        assert 0 <= record.kind < PADDING
        assert len(bytes(record.payload)) <= LAYOUT.ring_bytes // 2 - HEADER_BYTES
        consumer.advance()
    return 2 * MAX_RECORDS


@settings(max_examples=600, deadline=None)
@given(pushes, pushes, flips)
def test_a_consumer_survives_any_flipped_bytes(
    before: list[int], sizes: list[int], changes: list[tuple[int, int]]
) -> None:
    control = Control(LAYOUT)
    producer, consumer = control.producer(), control.consumer()
    for size in before:
        producer.push(1, bytes(size))
    drain(consumer)
    for size in sizes:
        producer.push(1, bytes(size))
    flip(control, changes)
    try:
        assert drain(consumer) <= MAX_RECORDS, "no more records than the ring has room for"
    except SegmentCorrupt as error:
        with pytest.raises(SegmentCorrupt, match=str(error).split(":")[0]):
            consumer.peek()  # it stays corrupt, and says so each time


@settings(max_examples=200, deadline=None)
@given(pushes, st.lists(flips, min_size=1, max_size=30))
def test_a_consumer_survives_bytes_that_change_while_it_reads(
    sizes: list[int], rounds: list[list[tuple[int, int]]]
) -> None:
    control = Control(LAYOUT)
    producer, consumer = control.producer(), control.consumer()
    for size in sizes:
        producer.push(1, bytes(size))
    left = iter(rounds)
    with suppress(SegmentCorrupt):
        drain(consumer, lambda: flip(control, next(left, [])))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, MAX_RECORDS), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=6)
)
def test_a_consumer_survives_record_headers_made_to_deceive(headers: list[tuple[int, int, int]]) -> None:
    """Stamps are right, so lengths, kinds and paddings alone must be checked."""
    control = Control(LAYOUT)
    consumer = control.consumer()
    for line, length, kind in headers:
        at = line % MAX_RECORDS * ALIGN
        HEADER.pack_into(control.buffer, LAYOUT.ring_offset + at, length, kind, at)
    control.words.store_release(Line.TAIL, LAYOUT.ring_bytes)
    with suppress(SegmentCorrupt):
        drain(consumer)


@pytest.mark.parametrize("start_line", [0, 1, MAX_RECORDS - 1])
def test_nothing_but_paddings_ends_at_once(start_line: int) -> None:
    control = Control(LAYOUT)
    control.words.store_release(Line.HEAD, start_line * ALIGN)
    control.words.store_release(Line.TAIL, start_line * ALIGN)
    consumer = control.consumer()
    for lap in range(2):
        for line in range(MAX_RECORDS):
            at = line * ALIGN
            stamp = at + (LAYOUT.ring_bytes if at < start_line * ALIGN or lap else 0)
            HEADER.pack_into(control.buffer, LAYOUT.ring_offset + at, 0, PADDING, stamp)
    control.words.store_release(Line.TAIL, start_line * ALIGN + LAYOUT.ring_bytes)
    with pytest.raises(SegmentCorrupt):
        consumer.peek()


def engine_uses_everything(control: Control, producer: Producer, taker: CreditTaker, table: FlagAllocator) -> None:
    """One pass of an engine's hot path; each call returns or reports corruption."""
    liveness = Liveness(control.words, consumer=False)
    assert liveness.peer(1) in PeerStatus
    for size in (0, 100, 2000):
        report(lambda size=size: producer.push(1, bytes(size)))
    report(lambda: taker.take(4))
    taken = table.take(1, 1)
    for index in range(control.layout.flag_count):
        flag = unpack(table.load(index))
        report(lambda index=index: table.found(index))
        report(lambda index=index: table.disk(index))
        slots = report(lambda index=index, flag=flag: table.read_slots(index, 0, flag.count))
        assert slots is None or all(0 <= slot < control.layout.slot_bound for slot in slots)
    if taken is not None:
        table.give_back(taken[0])
    report(lambda: table.take(1, 1))


def report(use: Callable[[], Any]) -> Any:
    with suppress(SegmentCorrupt):
        return use()
    return None


@settings(max_examples=400, deadline=None)
@given(st.lists(flips, min_size=1, max_size=5))
def test_an_engine_survives_whatever_a_broken_daemon_writes(rounds: list[list[tuple[int, int]]]) -> None:
    control = Control(LAYOUT)
    producer = control.producer()
    taker = CreditTaker(control.buffer, control.words, control.layout)
    table = FlagAllocator(control.buffer, control.words, control.layout)
    CreditGranter(control.buffer, control.words, control.layout).grant([1, 2, 3])
    for changes in rounds:
        flip(control, changes)
        engine_uses_everything(control, producer, taker, table)


@settings(max_examples=400, deadline=None)
@given(flips)
def test_taking_up_a_segment_of_any_bytes_succeeds_or_is_refused(changes: list[tuple[int, int]]) -> None:
    control = Control(LAYOUT)
    flip(control, changes)
    try:
        layout = Layout.read(control.buffer)
    except SegmentCorrupt:
        return
    parts = control.buffer, control.words, layout
    FlagAllocator(*parts).take(1, 1)
    CreditGranter(*parts)
    taker = CreditTaker(*parts)
    report(lambda: taker.take(1))
    producer = report(lambda: Producer(*parts, lambda: None))
    if producer is not None:
        report(lambda: producer.push(1, b"x"))
    consumer = report(lambda: Consumer(*parts))
    if consumer is not None:
        report(lambda: drain(consumer))


# --- records and messages -------------------------------------------------------------------------------------------

decoders = st.sampled_from([records.decode_hint, records.decode_ask, records.decode_done, records.decode_saved])
valid_records = st.sampled_from(
    [
        encode_hint(records.Hint(1, 2, "request", 3, 1, 0, 99, 5, 8, bytes(24), [0])),
        records.encode_ask(records.Ask(1, 2, 3)),
        records.encode_ask(records.Ask(1, 2, 3, stop=True)),
        records.encode_done(records.Done(1, 2, records.Outcome.LOADED, 3, 4, 5, 6, 7, 8, 9, 10, 11)),
        records.encode_saved(records.Saved(1, 2, False, [3, 4], [bytes(8), bytes(8)])),
        records.encode_saved(records.Saved(1, 2, True, [3, 4], [])),
    ]
)


@settings(max_examples=1500, deadline=None)
@given(
    decoders,
    st.one_of(st.binary(max_size=200), valid_records),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
)
def test_a_record_of_any_bytes_is_decoded_or_refused(
    decode: Callable[[memoryview], Any], record: bytes, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(record)
    for at, value in changes if data else []:
        data[at % len(data)] = value
    with suppress(ProtocolError):
        decode(memoryview(data).toreadonly())


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"[" * 60_000, id="nested lists"),
        pytest.param(b'{"a":' * 10_000, id="nested objects"),
        pytest.param(b"1" * 60_000, id="endless number"),
        pytest.param(b'{"type": "refused", "error": "\\ud800", "final": true}', id="lone surrogate"),
        pytest.param(b'{"type": ["hello"], "protocol": 1}', id="list type"),
        pytest.param(b'{"type": {}, "protocol": 1}', id="object type"),
        pytest.param(b"\xff\xfe\x00", id="utf-16"),
        pytest.param(b"", id="empty"),
    ],
)
def test_a_control_message_made_to_break_the_parser_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_message(data)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ([[0, 64]], "number of KV groups: groups=1 keys=2"),
        ([[0, 64], [0, 32], []], "number of KV groups: groups=3 keys=2"),
        ([[0, 64], [0]], "group=1 block_bytes=64 borders=[0]"),
        ([[0, 65], []], "group=0 block_bytes=64 borders=[0, 65]"),
        ([[], [8, 8]], "group=1 block_bytes=64 borders=[8, 8]"),
        ([[], [0, 16, 8, 32]], "group=1 block_bytes=64 borders=[0, 16, 8, 32]"),
        ([[], [0, 16, 16, 32]], "group=1 block_bytes=64 borders=[0, 16, 16, 32]"),
        ([[], [-8, 16]], "written.1.0: input should be greater than or equal to 0"),
        ([[], [0, 1 << 70]], "written.1.1: input should be less than or equal to"),
        ([[], [0.5, 16]], "written.1.0: input should be a valid integer"),
        ([[], ["0", 16]], "written.1.0: input should be a valid integer"),
        ([[]] * (MAX_GROUPS + 1), "written: list should have at most 32 items"),
        ([[*range(attach.MAX_BORDERS - 1)], [0, 8]], f"too many borders: borders={attach.MAX_BORDERS + 1} max="),
    ],
)
def test_stretches_that_are_none_are_refused_in_one_short_line(written: Any, words: str) -> None:
    worker = {"block_bytes": 64, "key_prefixes": ["a@", "b@"], "replicas": 1, "replica_index": 0}
    hello = {
        "type": "hello",
        "protocol": records.PROTOCOL,
        "version": "1",
        "engine_id": "e",
        "incarnation": "0" * 32,
        "role": "worker",
        "rank": 0,
        "world_size": 1,
    }
    whole = decode_message(json.dumps({**hello, "worker": {**worker, "written": [[0, 64], [8, 16, 24, 64]]}}).encode())
    assert isinstance(whole, attach.Hello)
    with pytest.raises(ProtocolError) as refused:
        decode_message(json.dumps({**hello, "worker": {**worker, "written": written}}).encode())
    assert words in str(refused.value)
    assert len(str(refused.value)) < 600
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("data", [b"", b"[" * 60_000], ids=["empty", "refused"])
def test_descriptors_beside_an_empty_or_refused_packet_are_not_kept(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(theirs, [data], [theirs.fileno()] * 2)
        with pytest.raises(ProtocolError) if data else nullcontext():
            assert receive_message(ours) is None
        assert len(os.listdir("/proc/self/fd")) == before
