"""The byte map: parts in order, aligned and apart; and a reader that believes no header it cannot check."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.layout import (
    HEADER_BYTES,
    HOT_OFFSET,
    LINE_BYTES,
    MAX_TOTAL_BYTES,
    PAGE_ENTRIES,
    Layout,
    Line,
)

from .conftest import small_layout

layouts = st.builds(
    Layout,
    ring_bytes=st.sampled_from([1 << bits for bits in range(12, 21)]),
    flag_count=st.integers(1, 3000),
    page_count=st.integers(1, 3000),
    table_entries=st.integers(1, 3000),
    credit_entries=st.sampled_from([1 << bits for bits in range(16)]),
    slot_count=st.integers(1, (1 << 32) - (1 << 20)),
    epoch=st.integers(1, (1 << 63) - 1),
    device_slots=st.integers(0, (1 << 20) - 1),
)


@given(layouts)
def test_parts_follow_each_other_aligned_and_without_overlap(layout: Layout) -> None:
    starts = [layout.ring_offset, layout.flags_offset, layout.table_offset, layout.credits_offset, layout.total_bytes]
    sizes = [
        layout.ring_bytes,
        layout.flag_count * LINE_BYTES,
        layout.page_count * PAGE_ENTRIES * 4,
        layout.credit_entries * 4,
    ]
    assert starts[0] >= HEADER_BYTES
    for start, size, following in zip(starts, sizes, starts[1:], strict=False):
        assert start % LINE_BYTES == 0
        assert start + size <= following


@given(layouts)
def test_what_was_written_is_read_back(layout: Layout) -> None:
    header = memoryview(bytearray(HEADER_BYTES))
    layout.write(header)
    if layout.total_bytes == HEADER_BYTES:
        assert Layout.read(header) == layout
    else:
        with pytest.raises(SegmentCorrupt, match="mapped=4096"):
            Layout.read(header)


def test_every_hot_word_is_alone_on_its_cache_line_inside_the_header_page() -> None:
    lines = [int(line) * 8 // LINE_BYTES for line in Line]
    assert len(set(lines)) == len(Line)
    assert min(lines) * LINE_BYTES == HOT_OFFSET
    assert max(lines) * LINE_BYTES < HEADER_BYTES
    assert all(int(line) * 8 % LINE_BYTES == 0 for line in Line)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ring_bytes", 4097, "power of 2: ring_bytes=4097"),
        ("ring_bytes", 2048, "within 4096"),
        ("ring_bytes", 1 << 31, "ring_bytes=2147483648"),
        ("flag_count", 0, "flag_count=0"),
        ("page_count", 0, "page_count=0"),
        ("page_count", 1 << 26, f"must not exceed {MAX_TOTAL_BYTES}"),
        ("table_entries", 1 << 24, "table_entries=16777216"),
        ("credit_entries", 3, "power of 2: credit_entries=3"),
        ("slot_count", 1 << 32, "slot_count=4294967296"),
        ("epoch", 0, "epoch=0"),
        ("device_slots", -1, "device_slots=-1"),
        ("device_slots", (1 << 32) - 1, f"within 0..{(1 << 32) - 1 - small_layout().slot_count}"),
    ],
)
def test_a_size_out_of_bounds_names_the_field_its_value_and_the_bound(field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_layout(**{field: value})


@given(st.integers(0, 87), st.integers(0, 255))
def test_a_header_with_any_byte_changed_is_refused_or_is_another_true_layout(at: int, value: int) -> None:
    layout = small_layout()
    segment = memoryview(bytearray(layout.total_bytes))
    layout.write(segment)
    segment[at] = value
    try:
        read = Layout.read(segment)
    except SegmentCorrupt:
        return
    assert read.total_bytes <= len(segment)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_segment_are_refused(data: bytes) -> None:
    with pytest.raises(SegmentCorrupt):
        Layout.read(memoryview(data + bytes(HEADER_BYTES)))
    with pytest.raises(SegmentCorrupt, match=f"bytes={len(data)}"):
        Layout.read(memoryview(data))
