"""Known digests: whole prompts at a time, in memory that does not grow."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.connector import known
from kvprefetch.connector.known import Known, joined, keys_of


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
    held = ours.holds(keys_of(b"".join(digest(number, size) for number in range(41)), size)).tolist()
    assert held == [number in model for number in range(41)]
    assert held == [digest(number, size) in ours for number in range(41)]


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
