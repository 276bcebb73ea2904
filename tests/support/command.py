"""Runs `kvprefetchd` as a process of its own to its end, and looks at one that runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import ExitStack
from pathlib import Path
from subprocess import CompletedProcess
from typing import NoReturn

COMMAND = [sys.executable, "-m", "kvprefetch.daemon"]
# Commands that load neither Mooncake nor vLLM.
LIGHT = {"check-config", "explain", "health", "mode", "prefetch", "reload", "stat", "status", "store", "tail", "top"}


def run(command: list[str], given: str | bytes = b"", **environ: str) -> CompletedProcess[str]:
    """Run to the end with this standard input and these changes of the environment; the output may have any bytes."""
    data = given.encode() if isinstance(given, str) else given
    done = subprocess.run(
        command, input=data, capture_output=True, timeout=150, check=False, env={**os.environ, **environ}
    )
    return CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def kvprefetchd(*arguments: object, given: str | bytes = b"", **environ: str) -> CompletedProcess[str]:
    words = list(map(str, arguments))
    if words[:1] and words[0] in LIGHT and not environ:
        return _forked(words, given)
    return run([*COMMAND, *words], given, **environ)


def _forked(words: list[str], given: str | bytes) -> CompletedProcess[str]:
    """As `run`, in a fork of this process: an interpreter of its own takes half a second of CPU for its imports."""
    from kvprefetch.daemon.cli import main, prefetch, status, store, tail, top, top_view  # noqa: F401  # once

    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(given.encode() if isinstance(given, str) else given)
        files[0].seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: none is wanted in the child
            pid = os.fork()
        if pid == 0:
            _become(words, [file.fileno() for file in files])
        deadline = time.monotonic() + 150
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        said = []
        for file in files[1:]:
            file.seek(0)
            said.append(file.read().decode())
        return CompletedProcess([*COMMAND, *words], os.waitstatus_to_exitcode(ended[1]), *said)


def _become(words: list[str], streams: list[int]) -> NoReturn:
    """Be the command, in a process that was just forked."""
    from kvprefetch.daemon.cli.main import main

    status = 1
    try:
        for fd, stream in enumerate(streams):
            os.dup2(stream, fd)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww"))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main(words)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def one_line(error: str) -> bool:
    return len(error.strip().splitlines()) == 1


def ended_quietly(process: subprocess.Popen[bytes]) -> None:
    """Check that it ends well, soon, and writes no error."""
    assert process.wait(30) == 0
    assert process.stderr is not None
    with process.stderr as errors:
        assert errors.read() == b""


def listening(path: Path) -> bool:
    """Tell whether a socket listens there; its file exists as soon as it is bound (`__SO_ACCEPTCON`, proc(5))."""
    sockets = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return any(fields[3] == "00010000" and fields[-1] == str(path) for fields in sockets)


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, to the nanosecond (the clock of clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)
