"""Tests and benchmarks use the public side of an object; the exceptions are counted here and may only become fewer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Public in spite of their names: of named tuples, and the end of a process without its clean-up.
PUBLIC = {"_replace", "_asdict", "_fields", "_exit", "_atomics"}
# Accesses that are left, by file: nearly all are private names of vLLM, torch and argparse.  Where a test needs the
# inside of one of our parts, the part offers a check or a property.
ALLOWED: dict[str, int] = {
    "tests/connector/real.py": 1,
    "tests/connector/test_connector.py": 1,
    "tests/connector/test_group_states.py": 1,
    "tests/connector/test_keys.py": 3,
    "tests/connector/test_nodes.py": 1,
    "tests/connector/test_pitfalls.py": 1,
    "tests/connector/test_pitfalls_saves.py": 4,
    "tests/e2e/probes.py": 2,
    "tests/gpu/side.py": 1,
    "benchmarks/cuda.py": 2,
}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def accesses(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, expression) of each private attribute of another object, and of each private name imported."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names if private(alias.name))


def found(root: Path) -> dict[str, list[str]]:
    files = [path for folder in ("tests", "benchmarks") for path in sorted((root / folder).rglob("*.py"))]
    names = {path.relative_to(root).as_posix(): path.read_text() for path in files}
    return {name: [f"{name}:{line}: {what}" for line, what in accesses(text)] for name, text in names.items()}


def test_nothing_reaches_into_another_object() -> None:
    """But for what is counted above."""
    more = [line for name, lines in found(ROOT).items() if len(lines) > ALLOWED.get(name, 0) for line in lines]
    assert more == []


@pytest.mark.parametrize("source", ["planner._blocks", "self.planner._blocks", "a()._b", "from x import _y"])
def test_a_planted_access_is_found(source: str) -> None:
    assert len(list(accesses(source))) == 1


@pytest.mark.parametrize("source", ["self._blocks", "a.__class__", "os._exit(0)", "pair._replace(a=1)", "a.b"])
def test_what_is_public_or_one_s_own_is_not(source: str) -> None:
    assert list(accesses(source)) == []
