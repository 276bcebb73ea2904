"""The share of the loop's time that questions get."""

from __future__ import annotations

from kvprefetch.daemon.control.budget import BURST_NS, SHARE, Budget

S = 1_000_000_000


def test_a_user_s_questions_get_a_burst_and_then_a_share() -> None:
    """Over ten seconds without a pause: the share, and the burst at the beginning."""
    budget, asked, used, now = Budget(), 0, 0, 0
    while now < 10 * S:
        if budget.left(7, now):
            budget.spend(7, 300_000, now)
            used += 300_000
            asked += 1
        now += 1_000_000
    assert asked > 1000
    assert SHARE * 10 * S <= used <= SHARE * 10 * S + BURST_NS + 300_000


def test_an_amount_is_taken_whole_or_not_at_all_and_comes_back_with_time() -> None:
    budget = Budget(share=1, burst=5)
    for wanted, now, taken in ((3, 0, True), (3, 0, False), (2, 0, True), (5, 4, False), (4, 4, True)):
        assert budget.take(7, wanted, now) == taken


def test_a_quiet_user_is_forgotten_and_has_its_burst_again() -> None:
    budget = Budget()
    budget.spend(7, 2 * BURST_NS, 0)
    budget.tick(1)
    assert not budget.left(7, 1)
    budget.tick(3 * S)
    assert budget == Budget()
