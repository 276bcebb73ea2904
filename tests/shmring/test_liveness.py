"""Liveness: starting, alive, hung or gone, from shared words alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.liveness import Liveness, PeerState, PeerStatus

from .conftest import Control

SECOND = 1_000_000_000
Make = Callable[..., Control]


@pytest.fixture(params=[True, False], ids=["consumer looks at producer", "producer looks at consumer"])
def sides(request: pytest.FixtureRequest, make: Make) -> tuple[Liveness, Liveness]:
    control = make()
    watcher = Liveness(control.words, consumer=request.param)
    return watcher, Liveness(control.words, consumer=not request.param)


def test_a_side_is_starting_until_it_says_otherwise(sides: tuple[Liveness, Liveness]) -> None:
    watcher, other = sides
    other.beat(100 * SECOND)
    assert watcher.peer(100 * SECOND) is PeerStatus.STARTING


def test_a_side_that_beats_is_alive_and_one_that_stopped_is_hung_and_may_come_back(
    sides: tuple[Liveness, Liveness],
) -> None:
    watcher, other = sides
    other.set_state(PeerState.ACTIVE)
    other.beat(100 * SECOND)
    assert watcher.peer(105 * SECOND) is PeerStatus.ALIVE
    assert watcher.peer(105 * SECOND + 1) is PeerStatus.HUNG
    other.beat(106 * SECOND)
    assert watcher.peer(106 * SECOND) is PeerStatus.ALIVE


def test_a_beat_from_the_future_does_not_keep_a_side_alive_for_ever(sides: tuple[Liveness, Liveness]) -> None:
    watcher, other = sides
    other.set_state(PeerState.ACTIVE)
    other.beat(2**64 - 1)
    assert watcher.peer(100 * SECOND) is PeerStatus.HUNG


def test_a_side_that_closes_is_gone(sides: tuple[Liveness, Liveness]) -> None:
    watcher, other = sides
    other.beat(SECOND)
    other.set_state(PeerState.CLOSING)
    assert watcher.peer(SECOND) is PeerStatus.GONE


def test_the_end_of_the_connection_outweighs_what_a_side_says_of_itself(sides: tuple[Liveness, Liveness]) -> None:
    watcher, other = sides
    other.beat(SECOND)
    other.set_state(PeerState.ACTIVE)
    watcher.set_state(PeerState.ACTIVE)
    watcher.beat(SECOND)
    watcher.peer_is_gone()
    assert watcher.peer(SECOND) is PeerStatus.GONE
    assert other.peer(SECOND) is PeerStatus.ALIVE, "each side has a word of its own for it"


@pytest.mark.parametrize("state", [3, 255, 2**64 - 1])
def test_a_state_nobody_knows_reads_as_gone(make: Make, state: int) -> None:
    control = make()
    control.words.store_release(Line.CONSUMER_STATE, state)
    assert Liveness(control.words, consumer=False).peer(0) is PeerStatus.GONE
