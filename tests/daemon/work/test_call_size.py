"""How large a fetch is, over links of different rates and delays."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.work.call_size import CALL_NS, QUICK_BYTES, CallSize

BLOCK = 64 << 10
CHUNK = 64  # blocks
MS = 1_000_000


def ends_at(ns_per_byte: float, delay_ns: int, at_a_time: int, calls: int = 200) -> tuple[int, int]:
    """Run calls over a link; return the blocks of the last call, and the ns that it took.

    So many calls are in flight; each takes the delay, and its bytes take the link from the others.
    """
    size, now, moved, took = CallSize(), 0, 0, 0
    for _ in range(calls):
        blocks = min(CHUNK, size.blocks(BLOCK) or CHUNK)
        took = int(max(blocks * BLOCK * ns_per_byte, (delay_ns + blocks * BLOCK * ns_per_byte) / at_a_time))
        now, moved = now + took, moved + blocks * BLOCK
        size.fetched(blocks * BLOCK, took * at_a_time, (moved, now))
    return blocks, took


def test_a_call_is_as_large_as_it_may_until_one_brought_something() -> None:
    size = CallSize()
    assert size.blocks(BLOCK) is None
    size.fetched(0, 10**12, (0, 10**12))
    assert size.blocks(BLOCK) is None
    size.fetched(CHUNK * BLOCK, 2 * CALL_NS, (CHUNK * BLOCK, 10**12 + 2 * CALL_NS))
    assert size.blocks(BLOCK) == CHUNK // 2, "the time of what failed does not count"


@pytest.mark.parametrize(("ns_per_byte", "blocks"), [(0.8, 64), (8, 28), (80, 2), (800, 1)])
def test_a_call_takes_no_longer_than_it_may_unless_it_has_one_block(ns_per_byte: float, blocks: int) -> None:
    found, took = ends_at(ns_per_byte, MS, 2)
    assert found == blocks
    assert took <= CALL_NS or blocks == 1


@pytest.mark.parametrize("delay_ms", [1, 10, 20])
def test_calls_stay_large_where_each_has_a_delay(delay_ms: int) -> None:
    """Small calls would make such a link slow, and a slow link would make them smaller."""
    assert ends_at(0.8, delay_ms * MS, 1)[0] == CHUNK


def test_a_link_that_becomes_fast_gets_large_calls_again() -> None:
    size, moved, now = CallSize(), 0, 0
    for ns_per_byte, calls in ((800, 10), (0.8, 100)):
        for _ in range(calls):
            blocks = min(CHUNK, size.blocks(BLOCK) or CHUNK)
            took = int(blocks * BLOCK * ns_per_byte) + MS
            moved, now = moved + blocks * BLOCK, now + took
            size.fetched(blocks * BLOCK, took, (moved, now))
    assert blocks == CHUNK


def test_small_calls_do_not_make_a_fast_link_slow() -> None:
    """Most of their time is their own delay."""
    size = CallSize()
    for call in range(1, 50):
        size.fetched(BLOCK, 2 * MS, (call * BLOCK, 2 * call * MS))
    assert size.blocks(BLOCK) is None
    size.fetched(CHUNK * BLOCK, 2 * CALL_NS, (113 * BLOCK, 98 * MS + 2 * CALL_NS))
    before = size.blocks(BLOCK)
    size.fetched(BLOCK, 2 * MS, (114 * BLOCK, 100 * MS + 2 * CALL_NS))
    assert size.blocks(BLOCK) == before


def test_the_time_of_another_call_that_hangs_is_not_this_one_s() -> None:
    size = CallSize()
    size.fetched(CHUNK * BLOCK, 2 * CALL_NS, (CHUNK * BLOCK, 100 * CALL_NS))
    assert size.blocks(BLOCK) == CHUNK // 2


def test_the_pace_that_requests_are_put_in_order_by_moves_only_when_it_is_half_or_twice_as_much() -> None:
    """Otherwise an equal request that comes later might overtake."""
    size, moved, now, seen = CallSize(), 0, 0, list[float]()
    for ns_per_byte in (0.0, 10.0, 15.0, 7.0, 30.0, 4.0):
        for _ in range(800 if ns_per_byte else 0):
            took = int(4 * BLOCK * ns_per_byte)  # short calls, which leave the size as it is
            moved, now = moved + 4 * BLOCK, now + took
            size.fetched(4 * BLOCK, took, (moved, now))
        seen.append(round(size.ns_per_byte, 2))
    assert seen[:4] == [0.0, 10.0, 10.0, 10.0]
    assert 20 <= seen[4] <= 30
    assert 4 <= seen[5] <= 15


def test_a_link_is_quick_that_carries_a_large_call_in_a_call_s_time() -> None:
    size = CallSize()
    assert not size.quick, "nothing is known"
    size.fetched(QUICK_BYTES, CALL_NS, (QUICK_BYTES, CALL_NS))
    assert size.quick, "and nothing says that it is slow"
    size.fetched(2 * QUICK_BYTES, 3 * CALL_NS, (3 * QUICK_BYTES, 4 * CALL_NS))
    assert not size.quick
