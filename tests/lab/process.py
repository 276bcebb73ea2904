"""Starts child processes that cannot outlive this one: a process group is killed whole, by the kernel if we die.

They get no sessions of their own: with autogroups the kernel shares the cores out among sessions, and a session with
spinning threads can keep another one waiting for seconds (docs/adr/0164).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.support.waiting import poll

REPO = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
# Carries the starter's pid to the child.
PARENT_VARIABLE = "KVPREFETCH_LAB_PARENT"
# Names the program of an engine's process to the template that forks it.
CHILD_VARIABLE = "KVPREFETCH_LAB_CHILD"
# For Popen.  Python 3.10 lacks it: the lab needs 3.11, as vLLM's CPU build does.
OWN_GROUP: Any = {"process_group": 0}


def scratch(name: str) -> Path:
    """A new folder under the checkout's ``build/``; the caller removes it."""
    parent = REPO / "build" / "lab"
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))


def free_ports(count: int) -> list[int]:
    """TCP ports that were free on every address a moment ago; all are held open together, so they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def listens(host: str, port: int) -> bool:
    """Whether connections are taken there."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the request took effect; then nobody would ever send the signal.
    if os.getppid() != int(os.environ.get(PARENT_VARIABLE, os.getppid())):
        os._exit(1)


def bound_to_parent(argv: Sequence[str]) -> list[str]:
    """``argv`` run by a launcher that ties it to our life first (``preexec_fn`` is unsafe beside threads)."""
    return [sys.executable, "-m", "tests.lab.process", *argv]


def spawn(argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a native program in a process group of its own, its output in ``log``; it dies when we do."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            bound_to_parent(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**(os.environ if env is None else env), PARENT_VARIABLE: str(os.getpid())},
            cwd=REPO,
            **OWN_GROUP,
        )


def descendants(pid: int) -> list[int]:
    """Living children of ``pid``, their children, and so on, from /proc."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        below = parents.get(pending.pop(), [])
        found += below
        pending += below
    return found


def alive(pid: int) -> bool:
    """True while ``pid`` runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False


def wait_gone(pids: Iterable[int], timeout_s: float = 10.0) -> list[int]:
    """Wait until none of ``pids`` runs; returns those that still do."""
    pids = list(pids)
    poll(lambda: not any(map(alive, pids)), timeout_s)
    return [pid for pid in pids if alive(pid)]


def comes_up(child: Child, ready: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until a program that was just started is ready; False when it ended or is late.

    An OSError or ValueError of `ready` means "not yet".
    """

    def state() -> str:
        with contextlib.suppress(OSError, ValueError):
            if ready():
                return "ready"
        return "" if child.poll() is None else "ended"

    return poll(state, timeout_s) == "ready"


class Child(Protocol):
    """What the lab needs of a :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...


def reap(process: Child, *, term_s: float = 0.0) -> int:
    """End ``process`` and everything below it: SIGTERM first if ``term_s`` is given, then SIGKILL; returns its code."""
    if process.poll() is None and term_s > 0:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(term_s)
    # Children that left the process group (vLLM's workers may) are only known while their parent lives.
    below = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code = process.wait()
    wait_gone(below)
    return code


def _wait_stopped(pid: int, timeout_s: float = 10.0) -> None:
    """Until one of its threads has taken the signal, the others still run."""

    def stopped() -> bool:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)

    if not poll(stopped, timeout_s, pause_s=0.01):
        raise TimeoutError(f"process does not stop: pid={pid}")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """``pid`` stands still (SIGSTOP) inside the block and goes on afterwards, whatever happens in it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        _wait_stopped(pid)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def exit_on_sigterm() -> None:
    """Let SIGTERM unwind the stack, so that context managers remove what the kernel does not (links, folders)."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def tail(path: Path, lines: int = 40) -> str:
    """The last lines of a log, for error messages."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error})"


if __name__ == "__main__":
    die_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])
