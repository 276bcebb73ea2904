"""Save credits: what is granted is taken once, in order, and nothing impossible is believed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.shmring.credits import CreditGranter, CreditTaker
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.layout import Line

from .conftest import Control, small_layout

Make = Callable[..., Control]


def both(control: Control) -> tuple[CreditGranter, CreditTaker]:
    parts = control.buffer, control.words, control.layout
    return CreditGranter(*parts), CreditTaker(*parts)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=50))
def test_any_sequence_of_grants_and_takes_does_what_a_queue_does(steps: list[tuple[bool, int]]) -> None:
    granter, taker = both(Control(small_layout()))
    queue: deque[int] = deque()
    number = 0
    for grants, count in steps:
        if grants:
            slots = [(number + i) % 100 for i in range(min(count, 8 - len(queue)))]
            number += len(slots)
            granter.grant(slots)
            queue.extend(slots)
        else:
            assert taker.take(count) == [queue.popleft() for _ in range(min(count, len(queue)))]
        assert taker.available() == len(queue)


def test_a_negative_count_takes_nothing(make: Make) -> None:
    granter, taker = both(make())
    granter.grant([1, 2])
    assert taker.take(-1) == []
    assert taker.take(9) == [1, 2]


def test_both_sides_take_up_the_counters_where_they_stand(make: Make) -> None:
    control = make()
    granter, taker = both(control)
    granter.grant([1, 2, 3])
    assert taker.take(1) == [1]
    granter, taker = both(control)
    granter.grant([4])
    assert taker.take(9) == [2, 3, 4]


@pytest.mark.parametrize("granted", [9, 2**64 - 1])
def test_an_impossible_number_of_credits_is_corruption(make: Make, granted: int) -> None:
    control = make()
    _, taker = both(control)
    control.words.store_release(Line.CREDITS_GRANTED, granted)
    with pytest.raises(SegmentCorrupt, match=f"outstanding={granted}"):
        taker.take(1)


def test_a_slot_that_is_not_there_is_corruption_and_takes_nothing(make: Make) -> None:
    control = make()
    granter, taker = both(control)
    granter.grant([1, 100])
    with pytest.raises(SegmentCorrupt, match="slot=100 bound=100"):
        taker.take(2)
    assert taker.available() == 2
