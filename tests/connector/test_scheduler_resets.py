"""The scheduler side when the weights change: older KV is void, and nothing is served before the daemon confirms."""

from __future__ import annotations

import pytest

from kvprefetch.shmring.wire.records import FlagState

from .fakes import BLOCK, Engine


def test_a_reset_voids_everything_older() -> None:
    """Handles are given up, copies under way go back unused, requests with old KV are never saved."""
    engine = Engine(credits=range(8))
    running, waiting = engine.add("running", 3 * BLOCK), engine.add("waiting", 2 * BLOCK)
    engine.admit(running)
    meta = engine.step([(running, 2 * BLOCK)])
    assert engine.side.reset() is True
    assert engine.link.resets == [1]
    assert engine.daemon.flag("waiting").state == FlagState.CANCELLED
    engine.acknowledge(meta)
    engine.daemon.drain()
    assert [saved.dropped for saved in engine.daemon.saved] == [True]
    assert engine.step([(running, BLOCK)]).saves == []
    engine.admit(waiting)
    assert len(engine.step([(waiting, 2 * BLOCK)]).saves) == 1, "it is computed with the new weights"
    engine.preempt(running)
    engine.admit(running)
    assert len(engine.step([(running, 3 * BLOCK)]).saves) == 1


def test_a_reset_is_asked_for_once_however_long_ago_the_last_one_was() -> None:
    engine = Engine()
    engine.clock.advance_ms(60_000)
    engine.daemon.beat()
    assert engine.side.reset()
    assert engine.link.resets == [1]


@pytest.mark.parametrize(
    ("configured", "least_ms", "asked_ms"), [(None, 0, 5000), (None, 21_000, 21_000), (7000, 3000, 7000)]
)
def test_a_reset_waits_long_enough_for_the_store_unless_configured_otherwise(
    configured: int | None, least_ms: int, asked_ms: int
) -> None:
    engine = Engine(reset_timeout_ms=configured)
    assert engine.link.session is not None
    engine.link.session.removal_ms = least_ms
    assert engine.side.reset()
    assert engine.link.reset_timeouts_ms == [asked_ms]


@pytest.mark.parametrize("how", ["cached", "running"])
def test_a_local_prefix_that_outlived_the_reset_is_never_saved_on(how: str) -> None:
    """vLLM could not empty its own prefix cache, or a running request goes on filling it."""
    engine = Engine(credits=range(8))
    if how == "cached":
        engine.cache.count = 1
    else:
        running = engine.admitted("running", 2 * BLOCK)
        engine.step([(running, 3)])
    engine.side.reset()
    request = engine.admitted("r", 3 * BLOCK, local=BLOCK)
    assert engine.step([(request, 2 * BLOCK)]).saves == []
    clean = engine.admitted("clean", 3 * BLOCK)
    assert len(engine.step([(clean, 3 * BLOCK)]).saves) == 1


def test_an_unconfirmed_reset_stops_everything_until_it_is_confirmed() -> None:
    engine = Engine(credits=range(8))
    engine.link.confirms = False
    assert engine.side.reset() is False
    request = engine.add("r", 3 * BLOCK)
    assert engine.match(request) == (0, False)
    engine.allocate(request, 0)
    assert engine.step([(request, 3 * BLOCK)]).saves == []
    engine.clock.advance_ms(5001)
    engine.daemon.beat()
    engine.step()
    assert engine.link.resets == [1, 1], "asked again"
    engine.link.confirmed_reset = 1
    again = engine.add("again", 3 * BLOCK)
    assert engine.match(again) == (None, False)
