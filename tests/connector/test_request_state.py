"""Every phase of a request, with every step from it: each leads to one row of the table."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvprefetch.connector.request.policy import Wait
from kvprefetch.connector.request.request_state import Claim, Pass, Phase, RequestState
from tests.support.scheduler_checks import check_state

State = RequestState

REACHED: dict[Phase, Callable[[State], object]] = {
    Phase.QUEUED: lambda state: None,
    Phase.UNSENT: lambda state: state.unsent(),
    Phase.ANSWERED: lambda state: claim(hinted(state)),
    Phase.ELSEWHERE: lambda state: None,
    Phase.SETTLED: lambda state: state.settle(),
    Phase.LOADING: lambda state: claim(hinted(state)).dispatch(2),
    Phase.SAVING: lambda state: state.admit() or state.save(more=True),
    Phase.RUNNING: lambda state: state.admit(),
    Phase.ENDED: lambda state: state.end(),
}
QUEUED, UNSENT, ANSWERED, ELSEWHERE, SETTLED, LOADING, SAVING, RUNNING, ENDED = Phase
# From the phases in their order; None: this cannot happen, and is an error.
STEPS: dict[str, tuple[Callable[[State], object], tuple[Phase | None, ...]]] = {
    "unsent": (lambda state: state.unsent(), (UNSENT, UNSENT, *[None] * 7)),
    "need_no_hint": (lambda state: state.need_no_hint(), (QUEUED, QUEUED, *[None] * 7)),
    "hint": (lambda state: hinted(state), (QUEUED, QUEUED, *[None] * 7)),
    "start_wait": (lambda state: waiting(state), (QUEUED, UNSENT, *[None] * 7)),
    "claim": (lambda state: claim(state), (None,) * 9),
    "withdraw": (lambda state: state.withdraw(), (None, None, QUEUED, *[None] * 6)),
    "let_go": (
        lambda state: state.let_go(),
        (QUEUED, UNSENT, QUEUED, ELSEWHERE, SETTLED, LOADING, SAVING, RUNNING, ENDED),
    ),
    "settle": (lambda state: state.settle(), (SETTLED, SETTLED, SETTLED, *[None] * 6)),
    "dispatch": (lambda state: state.dispatch(2), (None, None, LOADING, *[None] * 6)),
    "admit": (lambda state: state.admit(), (*[RUNNING] * 8, None)),
    "more": (lambda state: state.save(more=True), (*[None] * 6, SAVING, SAVING, None)),
    "no more": (lambda state: state.save(more=False), (*[None] * 6, RUNNING, RUNNING, None)),
    "not_loaded": (lambda state: state.not_loaded(), (*[None] * 5, SETTLED, QUEUED, QUEUED, None)),
    "restart": (lambda state: state.restart(9, 2), (QUEUED, QUEUED, None, *[QUEUED] * 5, None)),
    "reset": (lambda state: state.reset(), (QUEUED, UNSENT, None, ELSEWHERE, QUEUED, LOADING, SAVING, RUNNING, ENDED)),
    "end": (lambda state: state.end(), (*[ENDED] * 8, None)),
}


def made(phase: Phase) -> State:
    params = {"do_remote_prefill": True} if phase == Phase.ELSEWHERE else None
    request = SimpleNamespace(num_preemptions=0, num_computed_tokens=0, kv_transfer_params=params)
    state = State([{} for _ in Phase], request, True, 9, 2)
    REACHED[phase](state)
    return state


def hinted(state: State) -> State:
    state.hint(SimpleNamespace(waited_ns=0), 1)  # type: ignore[arg-type]
    return state


def waiting(state: State) -> State:
    state.start_wait(Wait("adaptive", 1000, 0, 0))
    return state


def claim(state: State) -> State:
    state.claim(Claim(0, 2, True, [1, 2]), Pass())
    return state


@pytest.mark.parametrize("step", STEPS)
def test_every_step_from_every_phase_leads_to_one_row_of_the_table_or_is_an_error(step: str) -> None:
    take, leads_to = STEPS[step]
    for phase, expected in zip(Phase, leads_to, strict=True):
        state = made(phase)
        assert state.phase == phase
        check_state(state)
        if expected is None:
            with pytest.raises(AssertionError):
                take(state)
            continue
        take(state)
        assert state.phase == expected, (phase, step)
        check_state(state)
        found = [at for at, states in enumerate(state.phases) if states]
        assert found == [expected] * (expected != ENDED), "each request is in one phase"
