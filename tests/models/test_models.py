"""The protocols under a weak memory model: right as they are, wrong without any one of their orders or exchanges.

Spin explores every interleaving, nothing truncated; `pytest -rA -k model` shows the numbers of states.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
MODELS = ("ring", "flag", "move")
MUTATION = re.compile(r"^\s*#(?:ifdef|ifndef|if defined\(|elif defined\()\s*(M_[A-Z_]+)", re.MULTILINE)

pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None, reason="spin or gcc is not installed"
)

# The failure that a mutation must cause: an assertion, a process that waits for ever, or one of both.
WRONG, STUCK = "assertion violated", "invalid end state"
WAITS = ("M_PRODUCER_FENCE", "M_CONSUMER_FENCE", "M_NO_SECOND_LOOK")
MUTATIONS = [
    (model, name) for model in MODELS for name in sorted({*MUTATION.findall((HERE / f"{model}.pml").read_text())})
]


class Verdict(NamedTuple):
    """What spin found: the first error, or None after all states were seen."""

    error: str | None
    states: int
    output: str


def check(folder: Path, model: str, *defines: str, optimise: str = "-O0") -> Verdict:
    """Explore a model exhaustively. The depth and memory limits are far above what is needed, and passing one fails."""
    shutil.copy(HERE / f"{model}.pml", folder)

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=280).stdout

    run("spin", "-a", *(f"-D{define}" for define in defines), f"{model}.pml")
    run("gcc", optimise, "-w", "-DSAFETY", "-DMEMLIM=3000", "-o", "pan", "pan.c")
    output = run("./pan", "-m100000", "-w23")
    assert "max search depth too small" not in output, output
    assert "Search not completed" not in output or "errors: 0" not in output, output
    states = re.search(r"([\d.e+]+) states, stored", output)
    assert states is not None, output
    error = re.search(r"pan:1: (.*) \(at depth", output)
    assert (error is None) == ("errors: 0" in output), output
    return Verdict(error[1] if error else None, int(float(states[1])), output)


@pytest.mark.parametrize(
    ("model", "define", "least"),
    [
        ("ring", "RECORDS=6", 100_000),
        ("ring", "CRASH=1", 100_000),
        ("ring", "THREADS=2 -DRECORDS=4", 100_000),
        ("flag", "GENERATIONS=3", 100_000),
        ("move", "GENERATIONS=9", 6_000),
    ],
    ids=[
        "the ring and its bell",
        "the ring when its producer dies",
        "the ring of two threads",
        "a flag and its slots",
        "a second slot",
    ],
)
def test_the_model_holds_in_every_state(
    tmp_path: Path, model: str, define: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = check(tmp_path, model, *define.split(" -D"), optimise="-O2")
    assert verdict.error is None, verdict.output
    assert verdict.states > least, "a model this small would show nothing"
    with capsys.disabled():
        print(f"\n{model}.pml {define}: {verdict.states} states, all of them right", end=" ")


@pytest.mark.parametrize(("model", "mutation"), MUTATIONS)
def test_without_this_the_model_fails(tmp_path: Path, model: str, mutation: str) -> None:
    verdict = check(tmp_path, model, mutation)
    assert verdict.error is not None, f"nothing needs what {mutation} takes away"
    expected = f"{WRONG}|{STUCK}" if mutation.endswith("_SWAP") else STUCK if mutation in WAITS else WRONG
    assert re.match(expected, verdict.error), verdict.error
