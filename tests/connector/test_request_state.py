"""A request's states: every transition starts and ends in a legal one, and only RequestState makes transitions."""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.connector.request_state import Answer, RequestState
from tests.support.scheduler_checks import check_state

CONNECTOR = Path(__file__).resolve().parents[2] / "connector"


def hinted(state: RequestState) -> None:
    state.hint(SimpleNamespace(waited_ns=0), 1)  # type: ignore[arg-type]


def claimed(asynchronous: bool) -> Callable[[RequestState], None]:
    return lambda state: state.claim(Answer(0, 2, asynchronous, [1, 2]))


def waiting(state: RequestState) -> None:
    state.start_wait(SimpleNamespace())  # type: ignore[arg-type]


TRANSITIONS: dict[str, Callable[[RequestState], Any]] = {
    "hint": hinted,
    "wait": waiting,
    "claim": claimed(False),
    "claim asynchronously": claimed(True),
    "withdraw": RequestState.withdraw,
    "drop": RequestState.drop,
    "promise": lambda state: state.promise(2),
    "dispatch": lambda state: state.dispatch(2),
    "settle": RequestState.settle,
    "fail load": RequestState.fail_load,
    "restart": lambda state: state.restart(40, 2),
    "reset": RequestState.reset,
}
# How to get to a state, and the transitions that it allows.
ALWAYS = {"drop", "settle"}
LOAD = {"dispatch"}
OPEN = {"restart", "reset"}  # without a handle
STATES: dict[tuple[str, ...], set[str]] = {
    (): ALWAYS | OPEN | {"hint", "wait"},
    ("wait",): ALWAYS | OPEN | {"hint"},
    ("hint",): ALWAYS | {"wait", "claim", "claim asynchronously"},
    ("hint", "wait"): ALWAYS | {"claim", "claim asynchronously"},
    ("hint", "wait", "claim"): ALWAYS | {"withdraw", "promise"},
    ("hint", "claim asynchronously"): ALWAYS | {"withdraw", "promise"},
    ("hint", "claim", "promise"): ALWAYS | OPEN | LOAD,
    ("settle",): ALWAYS | OPEN | LOAD,
    ("hint", "claim asynchronously", "promise"): ALWAYS | OPEN | LOAD | {"fail load"},
    ("hint", "claim asynchronously", "promise", "reset"): ALWAYS | OPEN | LOAD | {"fail load"},
}


def reached(way: tuple[str, ...]) -> RequestState:
    state = RequestState(
        SimpleNamespace(num_tokens=33, num_computed_tokens=0, num_preemptions=1, kv_transfer_params=None), True, 33, 2
    )
    for name in way:
        TRANSITIONS[name](state)
        check_state(state)
    return state


@pytest.mark.parametrize("way", STATES, ids="-".join)
def test_each_state_allows_its_transitions_and_no_other(way: tuple[str, ...]) -> None:
    allowed = set()
    for name, transition in TRANSITIONS.items():
        state = reached(way)
        before = copy.copy(state)
        try:
            transition(state)
        except AssertionError:
            assert state == before, f"{name} is refused before anything changes"
            continue
        check_state(state)
        allowed.add(name)
    assert allowed == STATES[way]


@pytest.mark.parametrize(
    "fields",
    [{"answer": 1}, {"handle": 1, "settled": True}, {"handle": 1, "loading": True}, {"wait": 1, "settled": True}],
)
def test_an_illegal_combination_is_found(fields: dict[str, Any]) -> None:
    state = reached(())
    vars(state).update(fields)
    with pytest.raises(AssertionError):
        check_state(state)


def writes(path: Path) -> set[str]:
    """Names of the attributes of other objects that a module assigns to."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
        if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }


def test_only_request_state_changes_a_request() -> None:
    """`Saves` advances two fields."""
    fields = {each.name for each in dataclasses.fields(RequestState)}
    for path in CONNECTOR.glob("*.py"):
        expected = {"saved", "storable"} if path.name == "saves.py" else set()
        if path.name != "request_state.py":
            assert writes(path) & fields == expected, path.name


def test_no_function_of_the_connector_has_more_than_six_parameters() -> None:
    """Constructors included; vLLM's own signatures and records of keyword arguments are not ours to choose."""
    for path in CONNECTOR.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
                assert len([name for name in names if name not in ("self", "cls")]) <= 6, f"{path.name}: {node.name}"
