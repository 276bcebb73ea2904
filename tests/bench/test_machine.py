"""A result says which command made it, and nothing of where on the machine things lie."""

from __future__ import annotations

import re

import pytest

from benchmarks.machine import command
from benchmarks.report import PUBLISHED
from tests.lab.process import REPO


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lmcache-python", "/opt/some/bin/python", "open"], "--lmcache-python LMCACHE_PYTHON open"),
        (["--lmcache-python=/opt/some/bin/python"], "--lmcache-python=LMCACHE_PYTHON"),
        (["--out", "../elsewhere", "--data=~/traces"], "--out OUT --data=DATA"),
        (["--out", f"{REPO}/build/bench", f"{REPO}/a/../b"], "--out build/bench b"),
        (["/elsewhere", "--quick", "two words"], "PATH --quick 'two words'"),
    ],
    ids=str,
)
def test_a_command_names_no_path_of_the_machine(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    assert command("benchmarks.bench", arguments) == f"python -m benchmarks.bench {said}"


def test_no_published_result_names_a_path_of_the_machine() -> None:
    """Neither a command nor a reason: all of them are read."""
    paths = [path for path in PUBLISHED.rglob("*") if path.suffix in (".json", ".md")]
    assert paths
    for path in paths:
        assert not re.findall(r"(?<![\w./])/(?:root|home|work|tmp|opt|usr|var|mnt|srv|data)/[\w./-]*", path.read_text())
