"""Known digests: whole prompts at a time, in memory that does not grow."""

from __future__ import annotations

import hashlib
import weakref
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.connector import known
from kvprefetch.connector.known import Known, joined


def digest(number: int, size: int = 32) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()[:size]


numbers = st.lists(st.integers(0, 40), max_size=20)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove", "clear"]), numbers), max_size=10), st.sampled_from([8, 17, 32])
)
def test_it_is_a_set(steps: list[tuple[str, list[int]]], size: int) -> None:
    """Forty digests in 2^20 places meet nowhere."""
    ours, model = Known(), set[int]()
    for step, some in steps:
        if step == "clear":
            ours.clear()
            model.clear()
        else:
            getattr(ours, step)(joined([digest(number, size) for number in some]))
            model = model | set(some) if step == "add" else model - set(some)
    held = ours.holds(joined([digest(number, size) for number in range(41)])).tolist()
    assert held == [number in model for number in range(41)]
    assert held == [digest(number, size) in ours for number in range(41)]


def test_look_ups_are_applied_before_the_next_question() -> None:
    """A digest that one look-up found and another missed is not known: it is saved once more, not left out."""

    def hashes(*some: int) -> list[bytes]:
        return [digest(number) for number in some]

    ours = Known()
    ours.add(joined([digest(4)]))
    ours.note(hashes(9, 0, 1, 2, 9), 1, 3, 4)
    ours.note(hashes(2, 3, 0, 4), 0, 2, 4)
    assert [digest(number) in ours for number in range(5)] == [False, True, False, True, False]
    ours.note(hashes(5), 0, 1, 1)
    assert ours.holds(joined([digest(5)])).all()
    ours.note(hashes(6), 0, 0, 1)
    ours.add(joined([digest(6)]))
    assert digest(6) in ours, "the newer word counts"
    ours.note(hashes(7), 0, 1, 1)
    ours.clear()
    assert digest(7) not in ours


def test_look_ups_that_nobody_asks_for_hold_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "NOTED_DIGESTS", 3)

    class Digests(list[bytes]):
        """Can be referred to weakly."""

    ours, kept = Known(), []
    for number in range(20):
        data = Digests([digest(number), digest(number + 100)])
        kept.append(weakref.ref(data))
        ours.note(data, 1, 2, 2)  # of a list only the last digest is asked for, and all of it is kept
    del data
    assert sum(each() is not None for each in kept) <= 1


def test_a_digest_of_zeros_is_not_known_from_the_start() -> None:
    assert bytes(32) not in Known()
    assert not Known().holds(joined([bytes(32)])).any()


def test_what_is_remembered_is_bounded_and_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "PLACES", 4)
    ours = Known()
    for number in range(100):
        ours.add(joined([digest(number)]))
        assert digest(number) in ours
    assert sum(digest(number) in ours for number in range(100)) <= 4
    for older, newer in pairwise(range(100, 110)):
        ours.add(joined([digest(newer)]))
        ours.remove(joined([digest(older)]))
        assert digest(newer) in ours, "to remove one that was replaced removes no other"


@pytest.mark.parametrize(
    "wrong", [([bytes(7)], 0, 1), ([b"", 8], 0, 2), ([bytes(8)], 0, 2), ([bytes(8)], -1, 1), ([], 1, 0)]
)
def test_what_is_no_list_of_digests_is_refused(wrong: tuple[Any, int, int]) -> None:
    with pytest.raises((ValueError, IndexError)):
        joined(*wrong)
