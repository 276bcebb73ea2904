"""The ledger of memory: no byte is promised twice, and who waits is served in order."""

from __future__ import annotations

import random

import pytest

from kvprefetch.daemon.engine.ledger import Ledger, Verdict


def test_what_is_taken_counts_once() -> None:
    """It is no longer available, and not promised any more."""
    ledger = Ledger()
    ledger.want(1, 60)
    assert ledger.next_verdict(200) == Verdict(1, True, 200)
    ledger.filled(1, 60)
    ledger.want(2, 100)
    assert ledger.next_verdict(140) == Verdict(2, True, 140)


def test_all_of_the_memory_is_not_handed_out() -> None:
    ledger = Ledger()
    ledger.want(1, 100)
    assert ledger.next_verdict(100) == Verdict(1, False, 100)


def test_a_reservation_waits_for_releases_that_make_room_and_for_no_others() -> None:
    ledger = Ledger()
    ledger.release(1, 30)
    ledger.want(2, 100)
    ledger.want(3, 10)
    assert ledger.next_verdict(80) is None, "the third does not overtake it"
    ledger.ended(1)
    assert ledger.next_verdict(110) == Verdict(2, True, 110)
    ledger.release(4, 5)
    assert ledger.next_verdict(105) == Verdict(3, False, 5)


@pytest.mark.parametrize("seed", range(50))
def test_engines_that_come_and_go_at_random_never_take_more_than_there_is(seed: int) -> None:
    """The machine has 1000 bytes. Each one that fits when nothing else is under way is granted in the end."""
    rng, ledger, free, number = random.Random(seed), Ledger(), 1000, 0
    filling: dict[int, list[int]] = {}  # bytes left to take, and taken
    held: dict[int, int] = {}
    releasing: dict[int, int] = {}
    sizes: dict[int, int] = {}
    granted = 0
    for _ in range(600):
        act = rng.randrange(6)
        if act == 0 and len(sizes) < 8:
            number += 1
            sizes[number] = rng.randint(1, 600)
            ledger.want(number, sizes[number])
        elif act == 1 and filling:
            key = rng.choice(list(filling))
            part = min(filling[key][0], rng.randint(1, 200))
            free -= part
            assert free >= 0, "more was taken than there is"
            filling[key] = [filling[key][0] - part, filling[key][1] + part]
            ledger.filled(key, part)
            if not filling[key][0]:
                held[key] = filling.pop(key)[1]
                ledger.ended(key)
        elif act == 2 and held:
            key = rng.choice(list(held))
            releasing[key] = held.pop(key)
            ledger.release(key, releasing[key])
        elif act == 3 and releasing:
            key = rng.choice(list(releasing))
            free += releasing.pop(key)
            ledger.ended(key)
            del sizes[key]
        elif act == 4 and sizes and rng.random() < 0.2:
            key = rng.choice(list(sizes))
            if key in filling:
                assert not ledger.withdraw(key)
                free += filling.pop(key)[1]
                ledger.ended(key)
                del sizes[key]
            elif key not in held and key not in releasing:
                assert ledger.withdraw(key)
                del sizes[key]
        while (verdict := ledger.next_verdict(free)) is not None:
            if verdict.granted:
                filling[verdict.number] = [sizes[verdict.number], 0]
                granted += 1
            else:
                del sizes[verdict.number]
        assert ledger.waiting <= bool(releasing), "only a release is worth waiting for"
    assert granted > 20
