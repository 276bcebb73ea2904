"""The files around the code hold together: workflows, issue forms, commit hooks and the package's metadata."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir() if path.name != "config.yml")


def load(path: Path) -> dict[Any, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_the_checkout_has(path: Path) -> None:
    """Each step uses a pinned action, a make target that exists or a program of the checkout."""
    workflow = load(path)
    assert workflow[True], "`on:` is YAML's true"
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+", step["uses"])
            elif step["run"].startswith("make "):
                assert re.search(rf"^{step['run'].split()[1]}:", MAKEFILE, re.MULTILINE)
            else:
                assert os.access(ROOT / step["run"], os.X_OK)


def test_the_quick_tier_runs_on_every_python_that_the_package_promises() -> None:
    """The matrix, the classifiers and `requires-python` name the same versions."""
    workflow = load(ROOT / ".github" / "workflows" / "check.yml")
    assert workflow["jobs"]["check"]["strategy"]["matrix"]["python"] == PYTHONS
    assert re.findall(r"Python :: (3\.\d+)", PYPROJECT) == PYTHONS
    assert f'requires-python = ">={PYTHONS[0]}"' in PYPROJECT


def test_a_plain_install_has_what_every_command_imports() -> None:
    """Whatever `kvprefetchd --version` imports, also on another Python, is one of the plain dependencies."""
    script = (
        "import sys, kvprefetch.daemon.cli.main; print(*(getattr(m, '__file__', '') for m in sys.modules.values()))"
    )
    files = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    ours = [Path(file) for file in files if file.endswith(".py") and Path(file).is_relative_to(ROOT)]
    trees = [ast.parse(file.read_text()) for file in ours if ".venv" not in str(file)]
    statements = [node for tree in trees for node in top_level(tree)]
    names = {alias.name.split(".")[0] for each in statements if isinstance(each, ast.Import) for alias in each.names}
    names |= {
        str(each.module).split(".")[0] for each in statements if isinstance(each, ast.ImportFrom) and not each.level
    }
    third = names - sys.stdlib_module_names - {"tomllib", "kvprefetch"}
    [plain] = re.findall(r"^dependencies = \[\n(.*?)^\]", PYPROJECT, re.DOTALL | re.MULTILINE)
    assert third <= set(re.findall(r'"(\w+)', plain))
    assert "pydantic" in third
    assert "tomli" in third


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at the import, under `if` and `try` too."""
    waiting = [
        each for each in tree.body if not (isinstance(each, ast.If) and "TYPE_CHECKING" in ast.unparse(each.test))
    ]
    while waiting:
        each = waiting.pop()
        yield each
        if isinstance(each, ast.If | ast.Try):
            waiting += [*each.body, *each.orelse]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_is_complete(path: Path) -> None:
    """GitHub leaves out a form without these keys, or with an identifier twice."""
    form = load(path)
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    for field in fields:
        assert field["type"] in {"input", "textarea", "dropdown", "checkboxes"}
        assert field["attributes"]["label"]
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_commit_hooks_run_the_linters_of_make_check() -> None:
    """They come from the same environment, so that both have the same version."""
    [repository] = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        assert ".venv-check" in hook["entry"]
        assert hook["language"] == "system"


def test_a_test_that_fails_says_in_words_what_it_expected() -> None:
    """Its name and its docstring, before what was printed and logged."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        file = Path(folder) / "test_it.py"
        file.write_text('def test_one_is_two():\n    """For a newcomer."""\n    assert 1 == 2\n')
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest", str(file)]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False).stdout
    assert "- expected -" in said, said
    assert "\none is two\nFor a newcomer.\n" in said


def test_each_class_of_the_package_has_a_name_of_its_own() -> None:
    """So that a name says what it is wherever it is read. Private classes stay in their modules."""
    files = [
        path for folder in ("daemon", "connector", "shmring", "kv", "package") for path in (ROOT / folder).rglob("*.py")
    ]
    classes = Counter(
        node.name for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    )
    assert len(classes) > 200
    assert [name for name, count in classes.items() if count > 1 and not name.startswith("_")] == []


@pytest.mark.skipif(find_spec("vllm") is not None, reason="this environment has everything")
def test_tests_that_need_what_is_not_installed_are_skipped_when_they_are_run_alone() -> None:
    """`make check` leaves them out; a contributor names a folder or a file."""
    alone = (
        "gpu",
        "scheduler",
        "e2e/test_waiting.py",
        "lab/test_lab.py",
        "daemon/telemetry/test_status_page.py",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        file = Path(folder) / "test_without_its_mark.py"
        file.write_text("from tests.lab.daemon import Daemon\n\ndef test_it():\n    with Daemon():\n        pass\n")
        for files in (("-p", "tests.conftest", str(file)), [f"tests/{each}" for each in alone]):
            done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=250)
            assert done.returncode == 0, done.stdout


def test_lines_that_tests_reach_are_counted_in_ci_alone() -> None:
    """To count them takes half the time of `make check`, which has two minutes."""

    def said(*more: str) -> str:
        command = ["make", "-n", "check", *more]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    (step,) = (each for each in load(ROOT / ".github/workflows/check.yml")["jobs"]["check"]["steps"] if "run" in each)
    assert "--cov" not in said()
    assert "--cov-fail-under=78" in said(*step["run"].split()[2:])
