"""Runs tests on code with a planted fault, each time in a fork of a process that imported what is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]


class Outcome(NamedTuple):
    """`status`: pytest's exit status, 1 for a failed test, or minus the number of a signal."""

    status: int
    output: str


class Planting:
    """The process that forks."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tests.support.planted"]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)

    def run(self, module: str, old: str, new: str, *tests: str, **variables: str) -> Outcome:
        """Run the tests with `new` in the place of `old` in this module of the package."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        fault = {"module": f"kvprefetch.{module}", "old": old, "new": new}
        print(json.dumps([fault, tests, variables]), file=self._process.stdin, flush=True)
        return Outcome(*json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()
