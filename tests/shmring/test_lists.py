"""Lists of vLLM as plain numbers, in C: as the same lines of Python, or an error that changes nothing."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.shmring._atomics import mark, numbers

PLACES = 8


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=30), st.integers(0, 40), st.integers(0, 40))
def test_numbers_are_a_slice(values: list[int], start: int, more: int) -> None:
    assert numbers(values, start, start + more) == array("I", values[start : start + more])


@pytest.mark.parametrize(
    "wrong",
    [((1, 2), 0, 1), ([1, 2], -1, 1), ([1, 2], 2, 1), ([1 << 32], 0, 1), ([-1], 0, 1), (["1"], 0, 1), ([1], 0)],
    ids=str,
)
def test_what_is_no_list_of_numbers_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError, IndexError)):
        numbers(*wrong)


def marked(digests: list[bytes], start: int, stop: int, known: bool, places: list[int]) -> None:
    """The rule in Python."""
    for digest in digests[start:stop]:
        key = int.from_bytes(digest[:8], "little") | 1
        if known:
            places[key % PLACES] = key
        elif places[key % PLACES] == key:
            places[key % PLACES] = 0


@given(
    st.lists(st.binary(min_size=8, max_size=9), min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10), st.booleans()), max_size=6),
)
def test_marks_are_as_in_python(digests: list[bytes], steps: list[tuple[int, int, bool]]) -> None:
    places, model = array("Q", [0] * PLACES), [0] * PLACES
    for one, other, known in steps:
        start, stop = sorted((min(one, len(digests)), min(other, len(digests))))
        mark(digests, start, stop, known, places)
        marked(digests, start, stop, known, model)
    assert places.tolist() == model


@pytest.mark.parametrize(
    "wrong",
    [
        ([bytes(7)], 0, 1, True, array("Q", [0])),
        ([8], 0, 1, True, array("Q", [0])),
        ([bytes(8)], 0, 2, True, array("Q", [0])),
        ([bytes(8)], 1, 0, True, array("Q", [0])),
        ((bytes(8),), 0, 1, True, array("Q", [0])),
        ([bytes(8)], 0, 1, True, array("Q", [0] * 3)),
        ([bytes(8)], 0, 1, True, array("B", [0] * 12)),
        ([bytes(8)], 0, 1, True, array("Q")),
        ([bytes(8)], 0, 1, True, bytes(8)),
        ([bytes(8)], 0, 1, True),
    ],
    ids=str,
)
def test_wrong_marks_are_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError, IndexError)):
        mark(*wrong)
