"""Plants defects in a pure module: decides each condition of some functions, one way and the other, one at a time."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import ModuleType


def mutants(module: ModuleType, functions: Collection[str]) -> Iterator[tuple[str, ModuleType]]:
    """Yield what is changed in these functions, and the module with this change."""
    source, turn = inspect.getsource(module), 0
    while True:
        tree = ast.parse(source)
        bodies = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name in functions]
        assert len(bodies) == len(functions), "a function has another name"
        changes = [change for body in bodies for change in _changes(body)]
        if turn == len(changes):
            return
        what, plant = changes[turn]
        plant()
        mutant = ModuleType(module.__name__)
        mutant.__package__ = module.__package__
        exec(compile(ast.fix_missing_locations(tree), what, "exec"), vars(mutant))
        yield what, mutant
        turn += 1


def _changes(body: ast.FunctionDef) -> Iterator[tuple[str, Callable[[], object]]]:
    for node in ast.walk(body):
        if isinstance(node, (ast.If, ast.IfExp)):
            for value in (True, False):
                what = f"line {node.lineno}: {value} instead of {ast.unparse(node.test)}"
                yield what, partial(setattr, node, "test", ast.Constant(value))
        elif isinstance(node, ast.BoolOp):
            for place, part in enumerate(node.values):
                neutral = ast.Constant(isinstance(node.op, ast.And))
                what = f"line {node.lineno}: without {ast.unparse(part)}"
                yield what, partial(node.values.__setitem__, place, neutral)
