"""The operator's view: what it shows is true, and it can neither write nor be made to fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.shmring import view
from kvprefetch.shmring.credits import CreditGranter, CreditTaker
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.flags import FlagTable, pack
from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.liveness import Liveness, PeerState

from .conftest import Control, small_layout

SECOND = 1_000_000_000


@pytest.fixture
def control() -> Iterator[Control]:
    shared = Control(small_layout(), shared=True)
    yield shared
    shared.close()


def test_the_view_shows_what_the_two_owners_did(control: Control) -> None:
    producer, consumer = control.producer(), control.consumer()
    for _ in range(3):
        producer.push(1, bytes(100))
    consumer.peek()
    consumer.advance()
    table = FlagTable(control.buffer, control.words, control.layout)
    table.exchange(1, 0, pack(1, 2, 3))
    table.exchange(2, 0, pack(1, 9, 3))
    parts = control.buffer, control.words, control.layout
    CreditGranter(*parts).grant([4, 5, 6])
    CreditTaker(*parts).take(1)
    daemon = Liveness(control.words, consumer=True)
    daemon.set_state(PeerState.ACTIVE)
    daemon.beat(8 * SECOND)
    control.words.store_release(Line.HINTS_DROPPED, 11)
    shown = view.describe(control.buffer.toreadonly(), 10 * SECOND, {0: "free", 2: "ready"})
    assert shown == {
        "epoch": 7,
        "total_bytes": control.layout.total_bytes,
        "slot_count": 100,
        "device_slots": 0,
        "ring": {
            "capacity_bytes": 4096,
            "used_bytes": 256,
            "pushed_bytes": 384,
            "consumed_bytes": 128,
            "consumer_sleeping": False,
        },
        "flags": {"count": 4, "states": {"free": 2, "ready": 1, "9": 1}},
        "credits": {"entries": 8, "granted": 3, "taken": 1, "outstanding": 2},
        "consumer": {"state": "active", "status": "alive", "beat_age_s": 2.0},
        "producer": {"state": "starting", "status": "starting", "beat_age_s": None},
        "hints_dropped": 11,
        "impossible": [],
    }
    json.dumps(shown)


def test_looking_changes_no_byte_and_leaves_nothing_mapped(control: Control) -> None:
    before = bytes(control.buffer)
    with memoryview(control.buffer) as buffer:  # its end is a BufferError while anything still stands on it
        view.describe(buffer, SECOND)
    assert bytes(control.buffer) == before


def test_what_cannot_be_true_is_named_and_shown(make: Callable[..., Control]) -> None:
    control = make()
    control.words.store_release(Line.HEAD, 64)
    control.words.store_release(Line.CREDITS_GRANTED, 9)
    control.words.store_release(Line.PRODUCER_STATE, 2**64 - 1)
    shown = view.describe(control.buffer.toreadonly(), SECOND)
    assert shown["impossible"] == ["ring.used_bytes", "credits.outstanding"]
    assert shown["producer"]["state"] == str(2**64 - 1)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_bytes_in_the_segment_are_shown_or_refused(data: st.DataObject) -> None:
    control = Control(small_layout())
    for _ in range(data.draw(st.integers(1, 20))):
        at = data.draw(st.one_of(st.integers(0, 1200), st.integers(0, len(control.buffer) - 1)))
        control.buffer[at] = data.draw(st.integers(0, 255))
    try:
        json.dumps(view.describe(control.buffer.toreadonly(), SECOND))
    except SegmentCorrupt:
        pass
