"""Runs `kvprefetchd` as a process of its own, for the tests of the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from subprocess import CompletedProcess

COMMAND = [sys.executable, "-m", "kvprefetch.daemon"]


def run(command: list[str], given: str | bytes = b"", **environ: str) -> CompletedProcess[str]:
    """Run to the end with this standard input and these changes of the environment; the output may have any bytes."""
    data = given.encode() if isinstance(given, str) else given
    done = subprocess.run(
        command, input=data, capture_output=True, timeout=150, check=False, env={**os.environ, **environ}
    )
    return CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def kvprefetchd(*arguments: object, given: str | bytes = b"", **environ: str) -> CompletedProcess[str]:
    return run([*COMMAND, *map(str, arguments)], given, **environ)


def one_line(error: str) -> bool:
    return len(error.strip().splitlines()) == 1
