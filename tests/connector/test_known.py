"""Known digests: whole prompts at a time, in memory that does not grow."""

from __future__ import annotations

import hashlib
import weakref
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.connector.request import known
from kvprefetch.connector.request.known import Known
from kvprefetch.kv.groups import Group, Groups, Kind

# States beside full attention, whose blocks are half as large; two digests of the prompt for each.
GROUPS = Groups((Group(Kind.FULL, 4), Group(Kind.STATE, 8)), 2)
ONE_GROUP = Groups((Group(Kind.FULL, 2),), 2)


def digest(number: int, size: int = 32) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()[:size]


def name(number: int, size: int = 32, group: int = 0) -> bytes:
    return digest(number, size) + bytes([group])


def knows(ours: Known, *names: bytes) -> list[bool]:
    found: list[bool] = ours.holds(Known.of_names(list(names))).tolist()
    return found


numbers = st.lists(st.integers(0, 40), max_size=20)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove", "clear"]), numbers), max_size=10), st.sampled_from([8, 17, 32])
)
def test_it_is_a_set(steps: list[tuple[str, list[int]]], size: int) -> None:
    """Forty digests in 2^20 places meet nowhere."""
    ours, model = Known(ONE_GROUP), set[int]()
    for step, some in steps:
        if step == "clear":
            ours.clear()
            model.clear()
        else:
            getattr(ours, step)(Known.of_names([name(number, size) for number in some]))
            model = model | set(some) if step == "add" else model - set(some)
    assert knows(ours, *(name(number, size) for number in range(41))) == [number in model for number in range(41)]
    keys = ours.keys([digest(number, size) for number in range(41)], 0, range(1, 41))
    assert ours.holds(keys).tolist() == [number in model for number in range(1, 41)]


def test_look_ups_are_applied_before_the_next_question() -> None:
    """A digest that one look-up found and another missed is not known: it is saved once more, not left out."""

    def hashes(*some: int) -> list[bytes]:
        return [digest(number) for number in some]

    ours = Known(ONE_GROUP)
    ours.add(Known.of_names([name(4)]))
    ours.note(hashes(9, 0, 1, 2, 9), 1, 3, 4)
    ours.note(hashes(2, 3, 0, 4), 0, 2, 4)
    assert knows(ours, *map(name, range(5))) == [False, True, False, True, False]
    ours.note(hashes(5), 0, 1, 1)
    assert knows(ours, name(5)) == [True]
    ours.note(hashes(6), 0, 0, 1)
    ours.add(Known.of_names([name(6)]))
    assert knows(ours, name(6)) == [True], "the newer word counts"
    ours.note(hashes(7), 0, 1, 1)
    ours.clear()
    assert knows(ours, name(7)) == [False]


def test_look_ups_that_nobody_asks_for_hold_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "NOTED_DIGESTS", 3)

    class Digests(list[bytes]):
        """Can be referred to weakly."""

    ours, kept = Known(ONE_GROUP), []
    for number in range(20):
        data = Digests([digest(number), digest(number + 100)])
        kept.append(weakref.ref(data))
        ours.note(data, 1, 2, 2)  # of a list only the last digest is asked for, and all of it is kept
    del data
    assert sum(each() is not None for each in kept) <= 1


def test_a_digest_of_zeros_is_not_known_from_the_start() -> None:
    assert knows(Known(ONE_GROUP), bytes(33)) == [False]


def test_what_is_remembered_is_bounded_and_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "PLACES", 4)
    ours = Known(ONE_GROUP)
    for number in range(100):
        ours.add(Known.of_names([name(number)]))
        assert knows(ours, name(number)) == [True]
    assert sum(knows(ours, *map(name, range(100)))) <= 4
    for older, newer in pairwise(range(100, 110)):
        ours.add(Known.of_names([name(newer)]))
        ours.remove(Known.of_names([name(older)]))
        assert knows(ours, name(newer)) == [True], "to remove one that was replaced removes no other"


def test_a_look_up_says_of_each_group_what_it_found() -> None:
    """Of the prefix the blocks that it needs, of what lies behind it nothing."""
    ours, digests = Known(GROUPS), [digest(number) for number in range(20)]
    both = [[name(2 * block + 1, group=0) for block in range(10)], [name(4 * block + 3, group=1) for block in range(5)]]
    for names in both:
        ours.add(Known.of_names(names))
    ours.remove(Known.of_names([both[0][2], both[1][1], both[1][2]]))
    ours.note(digests, 1, 3, 4)
    assert knows(ours, *both[0]) == [True] * 6 + [False] * 2 + [True] * 2
    assert knows(ours, *both[1]) == [True, False, True, False, True]


def test_what_is_known_of_one_groups_block_says_nothing_of_anothers() -> None:
    ours = Known(ONE_GROUP)
    ours.add(Known.of_names([name(1)]))
    assert knows(ours, *(name(1, group=group) for group in range(4))) == [True, False, False, False]
