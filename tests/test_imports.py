"""The import rules: which folder may import which of ours and which third parties, read from the syntax trees.

Nothing is imported to find out, so the rules hold for code that only a GPU or a daemon would ever run, and an import
inside a function counts like one at the top.
"""

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "kvprefetch"

# folder -> (folders of ours it may import, third parties it may import)
FOLDERS: dict[str, tuple[set[str], set[str]]] = {
    "shmring": (set(), {"numpy", "cupy"}),
    "kv": (set(), {"numpy", "cbor2", "xxhash"}),
    "connector": ({"kv", "shmring"}, {"vllm", "torch", "numpy", "pydantic"}),
    "daemon": (
        {"kv", "shmring"},
        {
            "mooncake",
            "structlog",
            "prometheus_client",
            "rich",
            "numpy",
            "pydantic",
            "pydantic_core",
            "tomli",
        }
        | {"click", "posix_ipc", "waitress", "xxhash"},
    ),
    "client": ({"daemon", "shmring"}, {"pydantic"}),
}
# The only modules of the connector that know differences between releases of vLLM.
COMPAT = ("connector/engine/compat.py", "connector/releases.py")
# The driver's calls, and advice to the kernel, read and write no shared word: ctypes is kept out for these.
MESSAGES = tuple(f"shmring/wire/{name}.py" for name in ("attach", "admin", "codec", "checks"))
GPU = tuple(f"shmring/gpu/{name}.py" for name in ("cuda", "driver", "legacy"))
ALSO = {
    **{name: {"pydantic"} for name in MESSAGES},
    **{name: {"ctypes"} for name in ("shmring/segment.py", *GPU)},
    "connector/identity/checkpoint.py": {"modelscope"},
    "connector/examine.py": {"huggingface_hub"},
}
TOP = {"connector", "daemon", "kv", "shmring"}  # rooms at the checkout's top; the others are in package/
# Packages with a border of their own: only these files may import them, whatever the folder allows.
BORDERS: dict[str, tuple[str, ...]] = {
    "mooncake": ("daemon/store/joining.py",),
    "rich": ("daemon/cli/top_view.py",),
    "click": ("daemon/cli/*",),
    "waitress": ("daemon/door/__main__.py", "daemon/telemetry/web.py"),
    "cbor2": ("kv/hashing.py",),
    "xxhash": ("kv/hashing.py", "daemon/store/checksums.py"),
    "cupy": ("shmring/gpu/cuda.py",),
}
# Parts of ours that a file may import, whatever its folder allows.
OURS = {"shmring/wire/attach.py": {"kv"}, "daemon/cli/*": {"client"}}
# What the client shares with the command line: it needs none of the daemon's own packages.
SHARED = {"config", "door", "telemetry"}
# folder: rooms, and which other rooms each may import; "" is the folder's own files.  No arrow leads back.
ROOMS: dict[str, dict[str, set[str]]] = {
    "connector": {
        "": {"attach", "copy", "engine", "identity", "request", "scheduler", "words", "worker"},
        "words": set(),
        "engine": {"words"},
        "identity": {"engine", "words"},
        "copy": set(),
        "attach": {"copy", "engine", "identity", "words"},
        "request": {"attach", "engine", "identity", "words"},
        "worker": {"attach", "copy", "identity", "words"},
        "scheduler": {"attach", "engine", "identity", "request", "words"},
    },
    "shmring": {"": set(), "wire": {""}, "gpu": {""}},
    "daemon": {
        "": {"cli"},
        "planning": set(),
        "config": set(),
        "store": {"config"},
        "telemetry": {"config", "planning", "store"},
        "work": {"planning", "telemetry"},
        "engine": {"config", "planning", "store", "telemetry", "work"},
        "control": {"config", "engine", "store", "telemetry", "work"},
        "runtime": {"config", "control", "planning", "store", "telemetry", "work"},
        "door": {"control"},
        "cli": {"config", "control", "door", "runtime", "store", "telemetry"},
    },
}
# Not even from the standard library: memory order has one home, the C extension, and ctypes has none at all.
FORBIDDEN = {"shmring": {"ctypes"}}


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, bool, list[str]]]:
    """Yield (line, relative?, absolute dotted name) of every import in a module that stands in `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, False, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, node.level > 0, [*base, alias.name]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in {"import_module", "__import__"} and node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, False, str(node.args[0].value).split(".")


def guarded_imports(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that ask for vLLM's release, or whether it has a name: an import of it in a `try`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            found = imported_modules(ast.Module(node.body, []), [])
            yield from (line for line, _, target in found if target[0] == "vllm")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "vllm.__version__":
            yield node.lineno


def has_docstring(tree: ast.Module) -> bool:
    text = ast.get_docstring(tree, clean=False)
    return bool(text and text.splitlines()[0].strip())


def file_violations(root: Path, path: Path) -> Iterator[str]:
    """Yield the broken rules of one module of the package, each as `file:line: what`."""
    name = path.relative_to(root).as_posix()
    parts = name.removeprefix("package/").split("/")
    folder = parts[0] if len(parts) > 1 else ""
    ours, third_parties = FOLDERS.get(folder, (set(), set()))
    room = parts[1] if len(parts) > 2 else ""
    third_parties = third_parties | ALSO.get(name, set())
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=name)
    if not has_docstring(tree):
        yield f"{name}:1: no module docstring whose first line says what the module is for"
    if folder == "connector" and name not in COMPAT:
        yield from (f"{name}:{line}: only {COMPAT[0]} may tell vLLM's releases apart" for line in guarded_imports(tree))
    for line, relative, target in imported_modules(tree, [PACKAGE, *parts[:-1]]):
        where, top = f"{name}:{line}", target[0]
        if top == PACKAGE:
            # An editor sees folders: a relative import finds no way into package/, nor out of it.
            apart = name.startswith("package/") == (len(target) > 1 and target[1] in TOP)
            if relative == apart:
                rule = (
                    "into and out of package/ imports are absolute"
                    if apart
                    else "between rooms at the top they are relative"
                )
                yield f"{where}: imports {'.'.join(target)}; {rule}"
            other = target[1] if len(target) > 1 and target[1] in FOLDERS else ""
            also = {part for pattern, parts in OURS.items() if fnmatch(name, pattern) for part in parts}
            if folder == "client" and other == "daemon" and not SHARED & set(target[2:3]):
                yield f"{where}: client may not import {'/'.join(target[1:3])}"
            if other and other != folder and other not in ours | also:
                yield f"{where}: {folder or 'the root'} may not import {other}"
            rooms = ROOMS.get(folder, {}) if other == folder else {}
            theirs = target[2] if len(target) > 2 and target[2] in rooms else ""
            if room in rooms and theirs != room and theirs not in rooms[room]:
                us = f"{folder}/{room}" if room else name
                yield f"{where}: {us} may not import {folder}/{theirs or target[2]}"
        elif top in FORBIDDEN.get(folder, set()) - third_parties:
            yield f"{where}: {folder} may not import {top}"
        elif top in {*sys.stdlib_module_names, "tomllib"} or relative:  # tomllib: from 3.11 on
            continue
        elif top not in third_parties:
            yield f"{where}: {folder or 'the root'} may not import {top}"
        elif not any(fnmatch(name, pattern) for pattern in BORDERS.get(top, ("*",))):
            yield f"{where}: only {', '.join(BORDERS[top])} may import {top}"


def around_violations(root: Path, path: Path) -> Iterator[str]:
    """Yield what a test or a benchmark does wrong: ours must come from `kvprefetch`, not as a top-level folder."""
    name = path.relative_to(root).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=name)
    if not has_docstring(tree):
        yield f"{name}:1: no module docstring whose first line says what the module is for"
    for line, relative, target in imported_modules(tree, name.split("/")[:-1]):
        if not relative and target[0] in FOLDERS:
            yield f"{name}:{line}: imports {'.'.join(target)}; write {PACKAGE}.{'.'.join(target)}"


def violations(root: Path) -> list[str]:
    """Return every broken rule in the tree under `root`."""
    found: list[str] = []
    for path in sorted({*root.glob("package/**/*.py")} - {root / "package/_version.py"}):  # the build writes that one
        found += file_violations(root, path)
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            found += file_violations(root, path)
    for folder in ("tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            found += around_violations(root, path)
    if (root / "systemd" / "__init__.py").exists():
        found.append("systemd/__init__.py:1: systemd/ is not a package (it would shadow python-systemd)")
    return found


def test_the_import_rules_hold_in_this_checkout() -> None:
    """Every module keeps to its folder's rules."""
    assert violations(ROOT) == []


DOC = '"""Says what it is for."""\n'


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("shmring/ring.py", "from ..daemon import store", "shmring may not import daemon"),
        ("shmring/ring.py", "from .wire.records import Hint", "shmring/ring.py may not import shmring/wire"),
        ("shmring/ring.py", "import pydantic", "shmring may not import pydantic"),
        ("shmring/wire/records.py", "import pydantic", "shmring may not import pydantic"),
        ("shmring/ring.py", "import ctypes", "shmring may not import ctypes"),
        ("shmring/ring.py", "def f():\n    import torch", "shmring may not import torch"),
        ("kv/groups.py", "from ..shmring import layout", "kv may not import shmring"),
        ("connector/examine.py", "from ..daemon.store.client import Store", "connector may not import daemon"),
        ("connector/examine.py", "import kvprefetch.shmring.ring", "between rooms at the top they are relative"),
        ("daemon/door/app.py", "from ...version import X", "into and out of package/ imports are absolute"),
        ("connector/scheduler/scheduler.py", "import vllm\nprint(vllm.__version__)", "may tell vLLM's releases apart"),
        ("connector/engine/events.py", "try:\n    from vllm.new import X\nexcept ImportError: ...", "may tell vLLM"),
        ("shmring/ring.py", "import cupy", "only shmring/gpu/cuda.py may import cupy"),
        ("daemon/planning/blocks.py", "import mooncake.store", "only daemon/store/joining.py may import mooncake"),
        ("daemon/work/pools.py", "import importlib\nimportlib.import_module('mooncake.store')", "may import mooncake"),
        ("daemon/planning/blocks.py", "from ..store import errors", "daemon/planning may not import daemon/store"),
        ("daemon/telemetry/metrics.py", "from .. import runtime", "daemon/telemetry may not import daemon/runtime"),
        ("package/client/api.py", "from kvprefetch.daemon.engine import epoch", "client may not import daemon/engine"),
        ("daemon/door/app.py", "from kvprefetch.client import Client", "daemon may not import client"),
        ("package/__init__.py", "from kvprefetch.connector import register", "the root may not import connector"),
        ("tests/shmring/test_ring.py", "from shmring.ring import Ring", "write kvprefetch.shmring.ring.Ring"),
    ],
)
def test_a_planted_violation_is_reported(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    """The checker sees each kind of violation, and names file and line."""
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(DOC + source + "\n")
    (found,) = violations(tmp_path)
    assert found.startswith(f"{file}:")
    assert complaint in found


def test_a_missing_docstring_and_a_systemd_package_are_reported(tmp_path: Path) -> None:
    """Rules that are not about imports are checked too."""
    for folder, source in (("daemon", "'''\nNothing in the first line.'''\n"), ("systemd", DOC)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(source)
    assert [line.split(":")[0] for line in violations(tmp_path)] == ["daemon/__init__.py", "systemd/__init__.py"]
