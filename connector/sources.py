"""Compare vLLM's sources with what this package uses of them, without importing either.

Nothing of vLLM runs, so a tree may be that of a release with other requirements.  vLLM's defaults are not looked at:
only names, classes' attributes, and the parameters of what we call and of what vLLM calls in us.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """A tree of sources: `root` holds the package's folder. Names are dotted, modules without their file's ending."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tree = functools.cache(self._parse)

    def is_module(self, name: str) -> bool:
        return self._tree(name) is not None

    def define(self, dotted: str) -> ast.AST | None:
        """Return the statement that defines a name in a module, or the attribute of a class; None: there is none."""
        if self.is_module(dotted):
            return self._tree(dotted)
        owner, _, name = dotted.rpartition(".")
        if not owner:
            return None
        if (tree := self._tree(owner)) is None:
            found = self.define(owner)
            return self._attribute(found, owner.rpartition(".")[0], name) if isinstance(found, ast.ClassDef) else None
        found = next((each for each in _statements(tree) if name in _names(each)), None)
        if found is None:
            stars = (each for each in _statements(tree) if isinstance(each, ast.ImportFrom) and "*" in _names(each))
            return next((one for each in stars if (one := self.define(f"{self._absolute(each, owner)}.{name}"))), None)
        if isinstance(found, ast.ImportFrom):
            original = next(alias.name for alias in found.names if (alias.asname or alias.name) == name)
            base = self._absolute(found, owner)
            return self.define(f"{base}.{original}") if base.split(".")[0] == dotted.split(".")[0] else found
        return found

    def _attribute(self, owner: ast.ClassDef, module: str, name: str) -> ast.AST | None:
        for each in owner.body:
            if name in _names(each):
                return each
        for node in ast.walk(owner):  # what methods assign
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name:
                return node
        for base in owner.bases:
            found = self.define(f"{module}.{base.id}") if isinstance(base, ast.Name) else None
            if isinstance(found, ast.ClassDef) and (inherited := self._attribute(found, module, name)) is not None:
                return inherited
        return None

    def _absolute(self, statement: ast.ImportFrom, module: str) -> str:
        if not statement.level:
            return statement.module or ""
        package = module.split(".") + ([""] if self._file(module).name == "__init__.py" else [])
        return ".".join([*package[: -statement.level], *(statement.module or "").split(".")]).strip(".")

    def _file(self, module: str) -> Path:
        path = self._root.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _parse(self, module: str) -> ast.Module | None:
        path = self._file(module)
        return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


def differences(sources: Sources, ours: Collection[Path], used: Mapping[str, str], hooks: Path) -> list[str]:
    """Return what the files `ours` import and call, and what `used` lists, that `sources` has not, or otherwise.

    `used`: by class, the attributes that we read; one that we call has its arguments behind it: `f(a,b)`.  `hooks`: the
    file of the connector's class, whose methods vLLM calls.
    """
    found = [f"{where}: {what}" for path in ours for where, what in _of_file(sources, path)]
    for owner, names in used.items():
        for each in names.split():
            name, called, arguments = each.rstrip(")").partition("(")
            target = f"{owner}.{name}"
            definition = sources.define(target)
            if definition is None:
                found.append(f"{target}: missing")
            elif called and isinstance(definition, _Function):
                found += _calls(target, definition, len(list(filter(None, arguments.split(",")))), set(), bound=True)
    return list(dict.fromkeys([*found, *_hooks(sources, hooks)]))


def _of_file(sources: Sources, path: Path) -> Iterator[tuple[str, str]]:
    """Imports of vLLM's names, and calls of them, outside TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {local: target for each in _runtime(tree) for local, target in _imports(each)}
    for target in imported.values():
        if sources.define(target) is None:
            yield target, "missing"
    for each in ast.walk(tree):
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            module = imported.get(each.value.id)
            if module and sources.is_module(module) and sources.define(f"{module}.{each.attr}") is None:
                yield f"{module}.{each.attr}", "missing"
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in imported:
            definition = sources.define(imported[each.func.id])
            plain = not any(isinstance(one, ast.Starred) for one in each.args)
            if isinstance(definition, _Function) and plain and all(one.arg for one in each.keywords):
                keywords = {str(one.arg) for one in each.keywords}
                for line in _calls(imported[each.func.id], definition, len(each.args), keywords):
                    yield line.split(": ")[0], line.split(": ", 1)[1]


def _hooks(sources: Sources, path: Path) -> Iterator[str]:
    """Methods of our class that vLLM calls otherwise than we expect, or not; what it wants and we have not."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    [ours] = [each for each in tree.body if isinstance(each, ast.ClassDef) and len(each.bases) > 1]
    imported = {local: target for each in _runtime(tree) for local, target in _imports(each)}
    bases = [imported[ast.unparse(base)] for base in ours.bases]
    methods = {each.name: each for each in ours.body if isinstance(each, _Function) and not each.name.startswith("_")}
    for name, method in methods.items():
        theirs = next((found for base in bases if (found := sources.define(f"{base}.{name}")) is not None), None)
        if theirs is None:
            yield f"hook {name}: missing"
        elif isinstance(theirs, _Function) and not method.args.vararg and _parameters(theirs) != _parameters(method):
            yield f"hook {name}: parameters {', '.join(_parameters(theirs))}"
    for base in bases:
        for each in getattr(sources.define(base), "body", ()):
            abstract = isinstance(each, _Function) and any("abstract" in ast.unparse(d) for d in each.decorator_list)
            if abstract and each.name not in methods:
                yield f"hook {each.name}: not known here"


def _calls(name: str, function: _Function, given: int, keywords: set[str], *, bound: bool = False) -> list[str]:
    """Whether `given` positional arguments and these keywords fit."""
    if any(ast.unparse(each) == "property" for each in function.decorator_list):
        return [f"{name}: a property"]
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)][int(bound) :]
    known = {*names, *(each.arg for each in function.args.kwonlyargs)}
    required = names[: len(names) - len(function.args.defaults)][given:]
    required += [
        each.arg
        for each, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
        if default is None
    ]
    fits = (given <= len(names) or function.args.vararg) and (keywords <= known or function.args.kwarg)
    return [] if fits and set(required) <= keywords else [f"{name}: parameters {', '.join(names)}"]


def _parameters(function: _Function) -> list[str]:
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _runtime(tree: ast.Module) -> Iterator[ast.stmt]:
    """Import statements, but for those under TYPE_CHECKING."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield each
        elif not (isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"):
            waiting += ast.iter_child_nodes(each)


def _imports(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """The local name, and vLLM's, of what a statement imports of vLLM."""
    if isinstance(statement, ast.ImportFrom) and not statement.level and (module := statement.module or ""):
        if module.split(".")[0] == "vllm":
            yield from ((alias.asname or alias.name, f"{module}.{alias.name}") for alias in statement.names)
    elif isinstance(statement, ast.Import):
        yield from ((alias.asname or alias.name, alias.name) for alias in statement.names if alias.name == "vllm")


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements of a module, also under `if` and `try`."""
    waiting: list[ast.stmt] = list(tree.body)
    for each in waiting:
        yield each
        for block in ("body", "orelse", "finalbody"):
            if isinstance(each, ast.If | ast.Try):
                waiting += getattr(each, block, [])


def _names(statement: ast.AST) -> set[str]:
    """What a statement defines."""
    if isinstance(statement, _Function | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    found = [one for each in targets for one in (each.elts if isinstance(each, ast.Tuple) else [each])]
    return {each.id for each in found if isinstance(each, ast.Name)}
