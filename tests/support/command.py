"""Runs `kvprefetchd` as a process of its own to its end, and looks at one that runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
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


def listening(path: Path) -> bool:
    """Tell whether a socket listens there; its file exists as soon as it is bound (`__SO_ACCEPTCON`, proc(5))."""
    sockets = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return any(fields[3] == "00010000" and fields[-1] == str(path) for fields in sockets)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, to the nanosecond (the clock of clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)
