"""Runs a test on code with a planted fault, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run_planted(module: str, old: str, new: str, test: str, **variables: str) -> tuple[int, str]:
    """Run the test with `new` in the place of `old` in this module of the package; return pytest's status and output.

    The status is 1 for a failed test, or minus the number of a signal.
    """
    fault = {"module": f"kvprefetch.{module}", "old": old, "new": new}
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Without capture, or the last line of a process that ends itself would be lost.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    done = subprocess.run(
        command,
        env={**os.environ, **variables, "PLANTED": json.dumps(fault), "PYTHONPATH": path},
        cwd=HERE.parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout
