"""Completion flags: one word answers everything, transitions are exchanged, nothing of an earlier use is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.shmring import flags
from kvprefetch.shmring._atomics import Words
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.flags import FREE, MAX_COUNT, MAX_GENERATION, Flag, FlagAllocator, FlagTable, pack, unpack
from kvprefetch.shmring.layout import PAGE_ENTRIES

from .conftest import Control, small_layout

SOURCE = Path(__file__).resolve().parents[2] / "shmring" / "_flags.c"

HINTED, READY, CLAIMED, RELEASED = 1, 2, 3, 4
Make = Callable[..., Control]


def engine_of(control: Control) -> FlagAllocator:
    return FlagAllocator(control.buffer, control.words, control.layout)


def table_of(control: Control) -> FlagTable:
    """Flags with a page each."""
    table = FlagTable(control.buffer, control.words, control.layout)
    for index in range(control.layout.flag_count):
        table.lend(index, [index % control.layout.page_count])
    return table


@given(st.integers(0, (1 << 64) - 1))
def test_any_word_is_taken_apart_into_the_parts_that_make_it(word: int) -> None:
    assert pack(*unpack(word)) == word


@pytest.mark.parametrize(
    "parts", [(-1, 0, 0), (MAX_GENERATION + 1, 0, 0), (0, 16, 0), (0, 0, MAX_COUNT + 1), (0, 0, -1)]
)
def test_parts_that_do_not_fit_their_bits_are_refused(parts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="flag out of bounds"):
        pack(*parts)


def test_of_two_transitions_from_the_same_word_one_wins(make: Make) -> None:
    table = table_of(make())
    assert table.exchange(1, 0, pack(1, HINTED, 0))
    assert not table.exchange(1, 0, pack(1, READY, 0))
    assert unpack(table.load(1)) == Flag(1, HINTED, 0)


@pytest.mark.parametrize("index", [-1, 4, 5, 1 << 40, -(1 << 40)])
def test_a_flag_that_is_not_there_is_an_index_error_and_never_another_word(make: Make, index: int) -> None:
    control = make()
    table = table_of(control)
    before = bytes(control.buffer)
    for use in (
        lambda: table.load(index),
        lambda: table.exchange(index, 0, 1),
        lambda: table.found(index),
        lambda: table.set_found(index, 1),
        lambda: table.disk(index),
        lambda: table.set_disk(index, 1),
        lambda: table.write_slots(index, 0, [1]),
        lambda: table.read_slots(index, 0, 1),
        lambda: table.move(index, [(0, 1)]),
    ):
        with pytest.raises(IndexError):
            use()
    assert bytes(control.buffer) == before


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (256, 1), (0, 257), (255, 2)])
def test_slots_outside_the_table_are_not_written(make: Make, start: int, count: int) -> None:
    control = make()
    before = bytes(control.buffer)
    with pytest.raises(IndexError):
        table_of(control).write_slots(1, start, [1] * count)
    assert bytes(control.buffer) == before


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 257), (2, 1), (0, MAX_COUNT)])
def test_a_count_beyond_the_table_is_corruption_and_not_read(make: Make, start: int, stop: int) -> None:
    with pytest.raises(SegmentCorrupt, match="outside the slot table"):
        table_of(make()).read_slots(0, start, stop)


def test_entries_are_read_between_two_fences_and_moved_behind_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SYNC claim, SYNC copy: the claim comes before the entries, and the copy before the entry that names it."""
    control = make()
    table = table_of(control)
    table.write_slots(0, 0, [1, 2])
    entries = memoryview(control.buffer)[control.layout.table_offset :][:8].cast("I")
    steps: list[object] = []
    monkeypatch.setattr(flags, "fence", lambda: steps.append(entries.tolist()))
    table.move(0, [(0, 5), (1, 6)])
    assert steps == [[1, 2]]
    assert list(table.read_slots(0, 0, 2)) == [5, 6]
    body = SOURCE.read_text().partition("*slots_of(")[2]
    order = [body.index(part) for part in ("SYNC claim", "order_fence()", "memcpy(to", "SYNC copy")]
    assert order == sorted(order), "in C: a fence, the copy, a fence"
    assert body[order[-1] :].index("order_fence()") < body[order[-1] :].index("slot_bound")


def test_a_table_of_several_pages_reads_as_one(make: Make) -> None:
    """Entries cross pages that lie anywhere, written in any parts and moved; no other page changes."""
    control = make(page_count=9, slot_count=10_000)
    daemon, engine = table_of(control), table_of(control)
    for table in (daemon, engine):
        table.lend(1, (7, 2, 5))
    slots = [1000 + block for block in range(3 * PAGE_ENTRIES)]
    for start, stop in ((0, 3), (3, 300), (300, 301), (301, 3 * PAGE_ENTRIES)):
        daemon.write_slots(1, start, slots[start:stop])
    daemon.move(1, [(255, 8), (256, 9), (767, 6)])
    slots[255], slots[256], slots[767] = 8, 9, 6
    for start, stop in ((0, 768), (255, 257), (256, 512), (300, 300), (511, 768)):
        assert list(engine.read_slots(1, start, stop)) == slots[start:stop]
    for page in set(range(9)) - {7, 2, 5}:
        engine.lend(0, [page])
        assert not any(engine.read_slots(0, 0, PAGE_ENTRIES))


@pytest.mark.parametrize("page", [-1, 3, 1 << 40])
def test_no_page_outside_the_slot_tables_is_read(make: Make, page: int) -> None:
    """What lies behind them are credits: numbers of slots that belong to nobody."""
    table = table_of(make(page_count=3))
    table.lend(0, [0, page])
    assert len(table.read_slots(0, 0, PAGE_ENTRIES)) == PAGE_ENTRIES
    with pytest.raises(IndexError, match=f"page outside the slot tables: page={page}"):
        table.read_slots(0, PAGE_ENTRIES, PAGE_ENTRIES + 1)


def test_flags_in_use_share_no_page_and_long_requests_leave_flags_to_short_ones(make: Make) -> None:
    """A table is as long as its request; a page goes to another flag only after the daemon freed the first one."""
    table = allocator = engine_of(make(page_count=6))
    long, short = allocator.take(HINTED, 4 * PAGE_ENTRIES), allocator.take(HINTED, PAGE_ENTRIES)
    assert long is not None
    assert short is not None
    assert len({*table.lent(long[0]), *table.lent(short[0])}) == 5
    assert allocator.take(HINTED, PAGE_ENTRIES + 1) is None, "one page is left"
    allocator.give_back(long[0])
    assert allocator.take(HINTED, PAGE_ENTRIES + 1) is None, "the daemon may still write the table"
    table.exchange(long[0], pack(1, HINTED, 0), pack(1, FREE, 0))
    again = allocator.take(HINTED, PAGE_ENTRIES + 1)
    assert again is not None
    assert set(table.lent(again[0])).isdisjoint(table.lent(short[0]))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE_ENTRIES)), max_size=60))
def test_no_page_is_lent_twice_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    control = Control(small_layout(page_count=8))
    table = allocator = engine_of(control)
    held: list[tuple[int, int]] = []
    for take, blocks in steps:
        if take and (taken := allocator.take(HINTED, blocks)) is not None:
            held.append(taken)
        elif not take and held:
            index, generation = held.pop(blocks % len(held))
            table.exchange(index, pack(generation, HINTED, 0), pack(generation, FREE, 0))
            allocator.give_back(index)
        pages = [page for index, _ in held for page in table.lent(index)]
        assert len(set(pages)) == len(pages)
    for index, generation in held:
        table.exchange(index, pack(generation, HINTED, 0), pack(generation, FREE, 0))
        allocator.give_back(index)
    assert allocator.take(HINTED, 8 * PAGE_ENTRIES) is not None
    control.close()


@pytest.mark.parametrize(("name", "unknown"), [("found", 0), ("disk", None)])
def test_block_counts_of_an_earlier_use_are_unknown(make: Make, name: str, unknown: int | None) -> None:
    """No blocks from disk is an answer; a missing answer is another."""
    table = table_of(make())
    table.exchange(0, 0, pack(1, HINTED, 0))
    assert getattr(table, name)(0) == unknown
    for blocks in (0, 5):
        getattr(table, f"set_{name}")(0, blocks)
        assert getattr(table, name)(0) == blocks
    assert sorted([table.found(0), table.disk(0) or 0]) == [0, 5], "each count is a word of its own"
    table.exchange(0, pack(1, HINTED, 0), pack(2, HINTED, 0))
    assert getattr(table, name)(0) == unknown


@pytest.mark.parametrize(("name", "word"), [("found", 1), ("disk", 2)])
def test_block_counts_out_of_bounds_are_refused_and_reported(make: Make, name: str, word: int) -> None:
    control = make()
    table = table_of(control)
    getattr(table, f"set_{name}")(0, MAX_COUNT)
    assert getattr(table, name)(0) == MAX_COUNT
    for blocks in (-1, MAX_COUNT + 1):
        with pytest.raises(ValueError, match=f"{name} blocks out of bounds: blocks={blocks}"):
            getattr(table, f"set_{name}")(0, blocks)
    control.words.store_release(control.layout.flags_offset // 8 + word, MAX_COUNT + 1)
    with pytest.raises(SegmentCorrupt, match=f"{name} blocks"):
        getattr(table, name)(0)


def test_a_read_only_table_refuses_every_transition(make: Make) -> None:
    control = make()
    view = FlagAllocator(control.buffer.toreadonly(), Words(control.buffer, writable=False), control.layout)
    assert view.load(0) == 0
    for use in (
        lambda: view.exchange(0, 0, 1),
        lambda: view.set_found(0, 1),
        lambda: view.set_disk(0, 1),
        lambda: view.take(HINTED, 1),
    ):
        with pytest.raises(TypeError, match="read-only"):
            use()


def test_the_generation_after_the_last_is_the_first(make: Make) -> None:
    table = engine_of(make(flag_count=1))
    table.exchange(0, 0, pack(MAX_GENERATION, FREE, 0))
    assert table.take(HINTED, 1) == (0, 1)


def test_without_a_free_flag_there_is_none_to_take_until_the_daemon_frees_one(make: Make) -> None:
    table = allocator = engine_of(make())
    taken = [allocator.take(HINTED, 1) for _ in range(5)]
    assert taken[4] is None
    assert taken[2] is not None
    index, generation = taken[2]
    table.exchange(index, pack(generation, HINTED, 0), pack(generation, RELEASED, 0))
    allocator.give_back(index)
    assert allocator.take(HINTED, 1) is None
    table.exchange(index, pack(generation, RELEASED, 0), pack(generation, FREE, 0))
    assert allocator.take(HINTED, 1) == (index, generation + 1)


def test_looking_for_a_free_flag_costs_a_bounded_time_however_many_are_out(make: Make) -> None:
    table = allocator = engine_of(make(flag_count=1000, page_count=1000))
    for _ in range(1000):
        taken = allocator.take(HINTED, 1)
        assert taken is not None
        allocator.give_back(taken[0])
    looks = 0
    load = table.load

    def counted(index: int) -> int:
        nonlocal looks
        looks += 1
        return load(index)

    table.load = counted  # type: ignore[method-assign]
    assert allocator.take(HINTED, 1) is None
    assert looks <= 64
    word = load(500)
    table.exchange(500, word, pack(unpack(word).generation, FREE, 0))
    assert any(allocator.take(HINTED, 1) is not None for _ in range(1000 // 64 + 1)), "every flag gets its look"


def test_a_flag_given_back_twice_is_still_taken_once(make: Make) -> None:
    table = allocator = engine_of(make(flag_count=1))
    allocator.take(HINTED, 1)
    table.exchange(0, pack(1, HINTED, 0), pack(1, FREE, 0))
    allocator.give_back(0)
    allocator.give_back(0)
    assert allocator.take(HINTED, 1) == (0, 2)
    assert allocator.take(HINTED, 1) is None
