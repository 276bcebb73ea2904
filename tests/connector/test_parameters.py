"""No function of the connector takes many parameters."""

from __future__ import annotations

import ast
from pathlib import Path

CONNECTOR = Path(__file__).resolve().parents[2] / "connector"


def test_no_function_of_the_connector_has_more_than_six_parameters() -> None:
    """Constructors included; vLLM's own signatures and records of keyword arguments are not ours to choose."""
    for path in CONNECTOR.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
                assert len([name for name in names if name not in ("self", "cls")]) <= 6, f"{path.name}: {node.name}"
