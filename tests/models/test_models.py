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

# The failure that each mutation must cause: an assertion, or a process that waits for ever.
WRONG, STUCK = "assertion violated", "invalid end state"
MUTATIONS: dict[str, dict[str, str]] = {
    "ring": {
        "M_TAIL_RELEASE": WRONG,
        "M_TAIL_ACQUIRE": WRONG,
        "M_HEAD_RELEASE": WRONG,
        "M_HEAD_ACQUIRE": WRONG,
        "M_PRODUCER_FENCE": STUCK,
        "M_CONSUMER_FENCE": STUCK,
        "M_NO_SECOND_LOOK": STUCK,
    },
    "flag": {
        # orders
        "M_PUBLISH_RELEASE": WRONG,
        "M_POLL_ACQUIRE": WRONG,
        "M_UNCLAIM_RELEASE": WRONG,
        "M_RELEASE_RELEASE": WRONG,
        "M_EXPIRE_ACQUIRE": WRONG,
        "M_CLAIM_FENCE": WRONG,
        "M_FREE_ACQUIRE": WRONG,
        # exchanges: compare and store in two steps where both sides may move; none at all where one side owns the word
        "M_PUBLISH_SWAP": f"{WRONG}|{STUCK}",
        "M_EXPIRE_SWAP": f"{WRONG}|{STUCK}",
        "M_CLAIM_SWAP": f"{WRONG}|{STUCK}",
        "M_CANCEL_SWAP": f"{WRONG}|{STUCK}",
        "M_TAKE_SWAP": f"{WRONG}|{STUCK}",
        "M_UNCLAIM_SWAP": f"{WRONG}|{STUCK}",
        "M_RELEASE_SWAP": f"{WRONG}|{STUCK}",
        "M_FREE_SWAP": f"{WRONG}|{STUCK}",
        "M_SEEN_SWAP": f"{WRONG}|{STUCK}",
        # generations
        "M_GENERATION": WRONG,
        "M_FOUND_GENERATION": WRONG,
    },
    "move": {
        # fences
        "M_PROMOTE_FENCE": WRONG,
        "M_CLAIM_FENCE": WRONG,
        "M_READ_FENCE": WRONG,
        # the claim comes before the look at the entry
        "M_CLAIM_FIRST": WRONG,
        # the device slot of a pinned block is not used again, even where the entry names the host slot by then
        "M_PINNED": WRONG,
    },
}


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
        ("flag", "GENERATIONS=3", 100_000),
        ("move", "GENERATIONS=9", 6_000),
    ],
    ids=["the ring and its bell", "the ring when its producer dies", "a flag and its slots", "a second slot"],
)
def test_the_model_holds_in_every_state(
    tmp_path: Path, model: str, define: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = check(tmp_path, model, define, optimise="-O2")
    assert verdict.error is None, verdict.output
    assert verdict.states > least, "a model this small would show nothing"
    with capsys.disabled():
        print(f"\n{model}.pml {define}: {verdict.states} states, all of them right", end=" ")


@pytest.mark.parametrize(("model", "mutation"), [(model, name) for model in MODELS for name in MUTATIONS[model]])
def test_without_this_the_model_fails(tmp_path: Path, model: str, mutation: str) -> None:
    verdict = check(tmp_path, model, mutation)
    assert verdict.error is not None, f"nothing needs what {mutation} takes away"
    assert re.match(MUTATIONS[model][mutation], verdict.error), verdict.error


@pytest.mark.parametrize("model", MODELS)
def test_every_mutation_written_in_a_model_is_tried(model: str) -> None:
    assert set(MUTATION.findall((HERE / f"{model}.pml").read_text())) == set(MUTATIONS[model])
