"""Forks engines from a process that has imported vLLM: each starts without the imports' ten seconds of CPU.

Tests start dozens of engines on two cores. A forked engine is an :class:`tests.lab.engine.Engine` like any other, with
the same processes; it forks its workers, as vLLM itself does where there are GPUs.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tests.lab import process

START_TIMEOUT_S = 180.0


class TemplateError(RuntimeError):
    """The template did not start, or does not fork; the message ends with its log."""


class Forked:
    """An engine's process, with what the lab needs of :class:`subprocess.Popen`."""

    def __init__(self, pid: int, pidfd: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._pidfd = pidfd
        self._ended = False

    def poll(self) -> int | None:
        """0 once it has ended, however."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the template alone learns its status, so it is always 0."""
        if not self._ended:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked engine", timeout or 0.0)
            self._ended = True
            os.close(self._pidfd)
        return 0

    def terminate(self) -> None:
        """SIGTERM."""
        if not self._ended:
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)


class Template:
    """The process; use as a context manager. `environ` is what its engines' environments have beyond the caller's."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._scratch = process.scratch("template")
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = False

    def __enter__(self) -> Template:
        """Returns at once: the first fork waits until the imports are done."""
        with self._theirs as theirs, open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.lab.template"],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environ, process.PARENT_VARIABLE: str(os.getpid())},
                cwd=process.REPO,
                **process.OWN_GROUP,
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        if self._process is not None:
            process.reap(self._process)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _log(self) -> Path:
        return self._scratch / "template.log"

    def fork(self, environ: Mapping[str, str], stderr: int) -> Forked:
        """An engine's process with this environment, its log in `stderr`."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        if not self._ready:
            self._ready = self._receive(deadline)[0] == b"ready"
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        child = {**environ, process.PARENT_VARIABLE: str(self._process.pid)}
        try:
            socket.send_fds(self._socket, [json.dumps(child).encode()], [theirs_in, theirs_out, stderr])
            answer, fds = self._receive(deadline)
        except BaseException:
            os.close(ours_in)
            os.close(ours_out)
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        return Forked(int(answer), fds[0], open(ours_in, "wb"), open(ours_out, "rb"))

    def _receive(self, deadline: float) -> tuple[bytes, list[int]]:
        self._socket.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            answer, fds, _, _ = socket.recv_fds(self._socket, 4096, 1)
        except TimeoutError:
            answer, fds = b"", []
        if not answer:
            raise TemplateError(f"no answer\n--- log of the template\n{process.tail(self._log)}")
        return answer, fds


def _serve() -> None:
    process.die_with_parent()
    sock = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)

    from vllm.v1.engine import llm_engine  # noqa: F401  what an engine and its workers would import each
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.worker import cpu_worker  # noqa: F401

    from tests.lab import engine_child  # noqa: F401

    # vLLM's own default; on a CPU it starts each worker anew.
    multiproc_executor.get_mp_context = partial(multiprocessing.get_context, "fork")
    gc.collect()
    gc.freeze()
    sock.send(b"ready")
    while True:
        request, fds, _, _ = socket.recv_fds(sock, 1 << 20, 3)
        with contextlib.suppress(ChildProcessError):  # only now: until here a pid is not another process's
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                sock.close()
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                    os.close(fd)
                os.environ.clear()
                os.environ.update(json.loads(request))
                importlib.import_module(os.environ[process.CHILD_VARIABLE]).main()
            finally:
                os._exit(1)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(sock, [str(pid).encode()], [pidfd])
        for fd in (*fds, pidfd):
            os.close(fd)


if __name__ == "__main__":
    _serve()
