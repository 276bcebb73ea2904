"""The commands of the PAGES of docs/ that are marked for it run as they stand there, and the
configuration and image that the documents show are valid.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.config.model import NEXT_ATTACH, RELOADABLE, DaemonConfig
from tests.lab.daemon import Daemon
from tests.support.fake_engine import FakeEngine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
DOCS = {
    name: (ROOT / "docs" / name).read_text() for name in ("OPERATIONS.md", "TUNING.md", "HINTS.md", "comparison.md")
}


def commands(mark: str) -> list[str]:
    """Return the lines of all fenced blocks that open with exactly this mark."""
    blocks = [block for text in DOCS.values() for block in re.findall(rf"```{mark}\n(.*?)```", text, re.DOTALL)]
    return [line for block in blocks for line in block.splitlines() if line]


def run(command: str, folder: Path, **environ: str) -> None:
    """Run a command with the `kvprefetchd` of these sources first on the path."""
    program = folder / "kvprefetchd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvprefetch.daemon "$@"\n')
    program.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environ}
    result = subprocess.run(["sh", "-ec", command], cwd=folder, env=env, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"


def test_the_documents_have_commands_to_run() -> None:
    """Each mark is in use, so the tests below run something."""
    assert len(commands("sh test")) >= 4
    assert len(commands("sh test serving")) >= 6
    assert len(commands("sh test attached")) >= 2


@pytest.mark.store
@pytest.mark.parametrize("command", commands("sh test"))
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    """A command marked `sh test` succeeds in an empty folder, without a daemon."""
    run(command, tmp_path)


@pytest.mark.store
def test_the_commands_for_a_running_daemon_run(tmp_path: Path) -> None:
    """Commands marked `sh test serving` succeed beside a daemon, in their order."""
    with Daemon(memory="64MiB", staging="1MiB") as daemon:
        for command in commands("sh test serving"):
            run(command, tmp_path, KVPREFETCHD_SOCKET=str(daemon.socket))


@pytest.mark.store
def test_the_commands_for_an_attached_engine_run(tmp_path: Path) -> None:
    """Commands marked `sh test attached` succeed beside a daemon with an engine."""
    with Daemon(memory="64MiB", staging="1MiB") as daemon:
        engine = FakeEngine(daemon.socket)
        for command in commands("sh test attached"):
            run(command, tmp_path, KVPREFETCHD_SOCKET=str(daemon.socket))
        engine.close()


def test_the_configuration_shown_is_valid() -> None:
    """Each TOML block loads."""
    for block in re.findall(r"```toml\n(.*?)```", DOCS["OPERATIONS.md"], re.DOTALL):
        DaemonConfig.model_validate(tomllib.loads(block))


def test_the_image_starts_what_serve_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    """The image's default arguments are a configuration that serve takes."""
    (command,) = map(json.loads, re.findall(r"^CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    assert command[0] == "serve"
    assert main(["check-config", *command[1:]]) == 0, capsys.readouterr()


def test_what_a_reload_takes_over_is_said() -> None:
    """OPERATIONS.md names the keys that SIGHUP changes, at once and for later engines."""
    said = DOCS["OPERATIONS.md"].split("`systemctl reload kvprefetchd`")[1].split("The log has")[0]
    assert set(re.findall(r"`(\w+)`", said)) == RELOADABLE
    assert set(re.findall(r"`(\w+)`", said.split("at once,")[1])) == NEXT_ATTACH


def test_the_knobs_are_keys() -> None:
    """Each key that TUNING.md explains is one of the configuration's."""
    for key in re.findall(r"^\* \*\*`(\w+)`", DOCS["TUNING.md"], re.MULTILINE):
        assert key in DaemonConfig.model_fields, key
