"""How far a request walks through the package, in calls, files and moves between files: no further than it does now."""

from __future__ import annotations

import subprocess
import sys

from tests.lab.process import REPO


def test_a_request_and_a_tick_walk_no_further_than_their_ceilings() -> None:
    """A new question for each turn of the loop, or a call for each block, is above them."""
    argv = [sys.executable, "-m", "benchmarks.walk", "--runs", "5", "--top", "40"]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
