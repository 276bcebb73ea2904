"""`--help` of every command: what a man page says, examples that are commands that parse, lines that fit."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvprefetch.daemon.cli import findings, main
from kvprefetch.daemon.cli.common import EX_UNAVAILABLE
from kvprefetch.daemon.cli.findings import commit
from kvprefetch.daemon.cli.help_page import Command
from kvprefetch.daemon.config.model import DaemonConfig
from tests.support import documents
from tests.support.command import run

ROOT = Path(__file__).resolve().parents[3]
SECTIONS = ["Options:", "Examples:", "Exit status:"]


def commands() -> dict[str, Command]:
    group = main.build()
    return {"": group, **group.all_commands()}


NAMES = list(commands())


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main.main([*name.split(), "--help"]) == 0
    return capsys.readouterr().out


def section(text: str, name: str) -> list[str]:
    """Lines of a section, without its heading."""
    return text.split(f"\n{name}\n")[1].split("\n\n")[0].splitlines()


def examples(text: str) -> list[list[str]]:
    """Words of each command line of ours among the examples, pipes and redirections taken apart."""
    lines = [line.strip() for line in section(text, "Examples:") if not line.startswith("      ")]
    parts = [part for line in lines for part in re.split(r" \| ", re.sub(r" (<|>>?) \S+", "", line))]
    return [shlex.split(part) for part in parts]


def test_the_command_line_loads_nothing_that_only_one_command_needs() -> None:
    """NumPy alone would nearly double the time until `kvprefetchd status` answers."""
    heavy = {"mooncake", "numpy", "prometheus_client", "rich", "structlog", "vllm"}
    script = "import sys; import kvprefetch.daemon.cli.main; print(*sys.modules)"
    result = run([sys.executable, "-c", script])
    assert result.returncode == 0, result.stderr
    assert not heavy & set(result.stdout.split())


def test_every_command_is_there() -> None:
    expected = (
        "serve check-config config status health stat reload mode top tail explain install-unit doctor estimate "
        "store prefetch docs completion"
    )
    assert ["", *expected.split()] == [name for name in NAMES if " " not in name]
    assert [name for name in NAMES if " " in name] == ["config init", "store ls", "store stat", "store purge"]


@pytest.mark.parametrize("name", NAMES)
def test_the_help_has_what_a_man_page_has(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = commands()[name]
    text = help_of(name, capsys)
    places = [text.index(f"\n{heading}\n") for heading in SECTIONS]
    assert places == sorted(places)
    assert len(command.help or "") > 60, "what it does, in more than its one line of the list"
    statuses = [line.split()[0] for line in section(text, "Exit status:") if re.match(r"  \d", line)]
    assert statuses[0] == "0"
    assert statuses == sorted(statuses, key=int)
    assert {str(EX_UNAVAILABLE), str(main.EX_CONFIG)} <= set(statuses)
    for param in command.params:
        name = param.metavar or str(param.name).upper()
        assert param.help if isinstance(param, click.Option) else name in command.page.arguments


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_are_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = examples(help_of(name, capsys))
    assert shown
    assert shown[0][1 : 1 + len(name.split())] == name.split()
    for words in shown:
        assert words[0] == "kvprefetchd"
        found = max((each for each in NAMES if words[1 : 1 + len(each.split())] == each.split()), key=len)
        context = commands()[found].make_context(found, words[1 + len(found.split()) :])
        if found in ("serve", "check-config", "config init", "doctor"):
            DaemonConfig.model_validate(
                {key: value for key, value in context.params.items() if key in DaemonConfig.model_fields and value}
            )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_help_fits_the_terminal(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_of(name, capsys)
    shown = set(section(text, "Examples:"))
    for line in text.splitlines():
        assert len(line) <= min(columns, 112) or line in shown or " " not in line.strip(), line


def test_the_version_names_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    first, libraries = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"kvprefetchd \d+\.\d+\.\S+(, commit \S+)?, protocol \d+", first)
    for name in ("python", "kernel", "numpy", "pydantic"):
        assert re.search(rf"\b{name} \d+\.\d+", libraries)


def test_the_table_of_exit_statuses_is_that_of_the_help() -> None:
    """docs/reference/command-line.md has it as the code prints it, with each status that has a name in the code."""
    assert documents.exits() in (ROOT / "docs/reference/command-line.md").read_text(), documents.command("exits")
    modules = (main, *main.COMMANDS)
    named = {value for each in modules for name, value in vars(each).items() if name.startswith("EX_")}
    assert named == {65, 69, 78, 130}
    assert named <= {int(status) for status in re.findall(r"^\| (\d+) \|", documents.exits(), re.MULTILINE)}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_version_names_the_commit_of_a_checkout_or_of_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources that lie in another project's checkout have the commit that they were built from, if it is known."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    said = commit(tmp_path)
    assert re.fullmatch("commit [0-9a-f]{7,40}", said)
    assert head.startswith(said.split()[1])
    (tmp_path / "site-packages").mkdir()
    for built_from, expected in (("g2f1aba8", "commit 2f1aba8"), (None, "")):
        monkeypatch.setattr(findings, "__commit_id__", built_from)
        assert commit(tmp_path / "site-packages") == expected
