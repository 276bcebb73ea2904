"""Checks of a scheduler side from outside: the states of its requests, and what it holds."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from kvprefetch.shmring.wire.records import FlagState

if TYPE_CHECKING:  # the scheduler side imports vLLM
    from kvprefetch.connector.request.request_state import RequestState
    from kvprefetch.connector.scheduler.scheduler import SchedulerSide

# What an engine may do to a flag (records.py).
TRANSITIONS = {
    FlagState.FREE: {FlagState.HINTED},
    FlagState.HINTED: {FlagState.CLAIMED, FlagState.CANCELLED, FlagState.FREE},
    FlagState.READY: {FlagState.CLAIMED, FlagState.CANCELLED},
    FlagState.CLAIMED: {FlagState.READY, FlagState.RELEASED},
    FlagState.EXPIRED: {FlagState.FREE},
}


def check(side: SchedulerSide) -> None:
    """Raise AssertionError where a request is in no legal state."""
    from kvprefetch.connector.request.request_state import Phase

    for state in side.requests.values():
        check_state(state)
    for phase in Phase:
        assert side.phases[phase].keys() == {state for state in side.requests.values() if state.phase == phase}


def check_state(state: RequestState) -> None:
    """Raise AssertionError unless the fields form a row of request_state.py's table."""
    from kvprefetch.connector.request.request_state import Phase

    assert (state.answer is not None) == (state.phase == Phase.ANSWERED), state
    assert state.handle is None or state.phase in (Phase.QUEUED, Phase.ANSWERED), state
    assert state.handle is not None or state.answer is None, state
    assert state.wait is None or state.phase <= Phase.ANSWERED, state


def held(side: SchedulerSide) -> list[str]:
    """Name all that is held; [] when nothing goes on."""
    found: dict[str, Collection[Any]] = {
        "requests": side.requests,
        "early hints": side.early.waiting,
        "loads": side.loads.running,
        "saves": side.saves.waiting,
    }
    return [f"{what} still held: {list(items)}" for what, items in found.items() if items]
