"""Only RequestState changes a request's state; and no function of the connector takes many parameters."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

from kvprefetch.connector.request_state import RequestState

CONNECTOR = Path(__file__).resolve().parents[2] / "connector"


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
