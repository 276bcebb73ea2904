"""What a path moved, as bytes by busy time."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.work.rates import HOUR_NS, SLICE_NS, Meter, Rates

S, MB = 1_000_000_000, 1_000_000


class Link:
    """A path that moves bytes, with a clock."""

    def __init__(self) -> None:
        self.meter, self.now = Meter(), 1

    def move(self, count: int, busy_s: float, slice_s: float = SLICE_NS / S) -> None:
        """Make one call of `busy_s` in a slice of `slice_s`."""
        self.meter.began(self.now)
        self.meter.add(count)
        self.meter.ended(self.now + int(busy_s * S))
        self.wait(slice_s)

    def wait(self, seconds: float) -> None:
        """Let time pass, with a tick at each tenth of a second."""
        until = self.now + int(seconds * S)
        while self.now < until:
            self.now += S // 10
            self.meter.tick(self.now)

    def rates(self) -> list[float | None]:
        return [self.meter.known.get(window) for window in ("now", "5m", "hour")]


def test_a_rate_is_bytes_by_the_time_in_which_a_call_was_in_flight() -> None:
    link = Link()
    assert link.rates() == [None] * 3
    link.move(96 * MB, 1.0)
    link.move(192 * MB, 2.0)
    assert link.rates() == [96 * MB] * 3
    assert link.meter.total(link.now) == (288 * MB, 3 * S)


def test_what_moved_minutes_ago_is_not_now() -> None:
    link = Link()
    link.move(96 * MB, 1.0)
    link.wait(30)
    assert link.rates() == [None, 96 * MB, 96 * MB]


def test_calls_that_overlap_share_the_time() -> None:
    meter = Meter()
    meter.began(0)
    meter.began(1 * S)
    meter.add(20)
    meter.ended(2 * S)
    assert meter.total(3 * S) == (20, 3 * S)
    meter.ended(4 * S)
    assert meter.total(9 * S) == (20, 4 * S)


def test_a_slow_quarter_of_an_hour_does_not_move_what_was_usual() -> None:
    link = Link()
    for _ in range(360):
        link.move(96 * MB, 1.0)
    for _ in range(180):
        link.move(6 * MB, 5.0)
    assert link.rates() == [1.2 * MB, 1.2 * MB, 96 * MB]
    link.wait(HOUR_NS / S + 10)
    assert link.rates() == [None] * 3


def test_a_call_longer_than_a_slice_counts_when_it_ends() -> None:
    """Its bytes are not known before, so a slice without one is no slice of 0 bytes per second."""
    link = Link()
    for _ in range(3):
        link.move(96 * MB, 1.0)
    link.meter.began(link.now)
    link.wait(10)
    assert link.rates()[0] == 96 * MB
    link.meter.add(12 * MB)
    link.meter.ended(link.now)
    link.wait(5)
    assert link.rates()[0] == pytest.approx(1.2 * MB, rel=0.05)


def test_all_paths_that_had_traffic_are_known_by_window() -> None:
    rates = Rates()
    rates.fetches[1].began(1)
    rates.fetches[1].add(50 * MB)
    rates.fetches[1].ended(1 * S)
    for at in range(1, 70):
        rates.tick(at * S // 10)
    assert rates.known() == {"disk": dict.fromkeys(("now", "5m", "hour"), pytest.approx(50 * MB))}
