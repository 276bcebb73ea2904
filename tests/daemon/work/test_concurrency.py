"""How many calls a lane has in flight, on links that behave in different ways; time is simulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvprefetch.daemon.work.concurrency import ConcurrencyLimit

CALL_BYTES = 4 << 20


def settle(limit: ConcurrencyLimit, rate: Callable[[int], float], seconds: float = 60.0) -> dict[int, int]:
    """Let calls complete at `rate(calls)` bytes per second; how often each limit was in force in the second half."""
    now = 0.0
    seen: dict[int, int] = {}
    while now < seconds:
        now += CALL_BYTES / rate(limit.calls)
        limit.completed(CALL_BYTES, int(now * 1e9), waiting=True)
        if now > seconds / 2:
            seen[limit.calls] = seen.get(limit.calls, 0) + 1
    return seen


def mostly(seen: dict[int, int]) -> int:
    return max(seen, key=lambda calls: seen[calls])


@pytest.mark.parametrize(
    ("rate", "best"),
    [
        (lambda calls: 1e9, 1),  # one call fills the link: more only burn cores
        (lambda calls: 1e9 / calls**0.2, 1),  # more calls are slower
        (lambda calls: 2e8 * min(calls, 6), 6),  # a disk that wants a queue
        (lambda calls: 3e8 * calls, 8),  # no end to it
    ],
)
def test_it_settles_where_one_call_more_brings_nothing(rate: Callable[[int], float], best: int) -> None:
    assert mostly(settle(ConcurrencyLimit(8), rate)) == best


def test_it_comes_back_when_the_link_gets_worse() -> None:
    limit = ConcurrencyLimit(8)
    settle(limit, lambda each: 3e8 * each)
    assert limit.calls >= 7
    now = 61.0
    for _ in range(20_000):
        now += CALL_BYTES / 3e8
        limit.completed(CALL_BYTES, int(now * 1e9), waiting=True)
    assert limit.calls <= 2


def test_it_stays_within_its_bounds_and_a_link_that_idles_says_nothing() -> None:
    limit = ConcurrencyLimit(1)
    assert set(settle(limit, lambda each: 1e9)) == {1}
    limit = ConcurrencyLimit(4)
    for number in range(10_000):
        limit.completed(CALL_BYTES, number * 10_000_000, waiting=False)
    assert limit.calls == 1
