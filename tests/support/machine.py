"""Boots a Debian root with its own systemd in a container, and runs scripts in it as a login on that machine would.

`systemd-nspawn` gives it all namespaces of its own, so nothing of it reaches this machine: network, units, temporary
folders and processes are the container's, and end with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

from tests.lab import process
from tests.support.empty_root import EmptyRoot
from tests.support.waiting import poll

LONGEST_S = 3600
INSIDE = {"PATH": "/opt/kvprefetch/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}


def missing() -> str:
    """Return why this machine cannot boot a container; empty when it can."""
    absent = [name for name in ("systemd-nspawn", "nsenter") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)}: not installed"
    closed = [str(group) for group in own_groups() if not os.access(group, os.W_OK)]
    return f"{', '.join(closed)}: no control group can be made" if closed else ""


def own_groups() -> list[Path]:
    """Return this process's control group in each hierarchy that a systemd uses."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        kind, option = ("cgroup", controllers) if controllers else ("cgroup2", "rw")
        for _, mount, its_kind, options, *_ in mounts:
            if controllers in ("", "name=systemd") and its_kind == kind and option in options.split(","):
                found.append(Path(mount, path.lstrip("/")))
    return found


class Machine:
    """A root that is booted inside the block. With `bpf` its systemd may load programs into the kernel."""

    def __init__(self, root: EmptyRoot, *, bpf: bool = False) -> None:
        self._log = root.path.with_suffix(".console")
        self._groups = [group / f"{root.path.parent.name}-{os.getpid()}" for group in own_groups()]
        join = "".join(f"echo $$ > {group}/cgroup.procs; " for group in self._groups)
        self._command = ["sh", "-ec", f'{join} exec "$@"', "join"]
        self._command += ["nice", "timeout", "--foreground", "-s", "KILL", str(LONGEST_S)]
        self._command += ["systemd-nspawn", "-q", "-b", f"-D{root.path}", "--private-network", "--console=pipe"]
        # Neither the machine's own systemd nor its machined, where there is one, hears of the container.
        self._command += ["--register=no", "--keep-unit", "--link-journal=no", "--resolv-conf=off", "--timezone=off"]
        self._command += ["--system-call-filter=bpf"] * bpf
        # One hierarchy of control groups, as on any machine today, whatever this one has.
        self._env = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}

    def __enter__(self) -> Machine:
        self._log.write_bytes(b"")
        for group in self._groups:
            group.mkdir()
        self._child = process.spawn(self._command, log=self._log, env=self._env)
        try:
            found = poll(self._leader, 60)
            assert found, self.console()
            self._pid = found
            # `degraded`: a unit of Debian's failed, which may need more than a container has.
            self.eventually("systemctl is-system-running --wait | grep -E 'running|degraded'")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        process.reap(self._child, term_s=90)  # an orderly shutdown
        for group in self._groups:
            for below, _, _ in os.walk(group, topdown=False):
                os.rmdir(below)

    def console(self) -> str:
        return process.tail(self._log)

    def _leader(self) -> int:
        """The first process of the container, which has the number 1 in there."""
        for pid in process.descendants(self._child.pid):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            if status.split("NSpid:")[1].split("\n")[0].split()[1:] == ["1"] and status.startswith("Name:\tsystemd\n"):
                return pid
        return 0

    def start(self, script: str, *, user: str = "root") -> subprocess.Popen[str]:
        """Start a bash script in there as this user, its output in a pipe."""
        login = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user != "root" else []
        enter = ["nsenter", f"--target={self._pid}", "--all", "--root"]
        environment = ["env", "-i", *(f"{name}={value}" for name, value in INSIDE.items())]
        return subprocess.Popen(
            [*enter, *environment, *login, "bash", "-ec", f"cd /\n{script}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **process.OWN_GROUP,
            cwd="/",
            env={"PATH": os.environ["PATH"]},
        )

    @staticmethod
    def end(child: subprocess.Popen[str]) -> str:
        """Kill a script with what it started, and return its output."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        return child.communicate()[0]

    def run(self, script: str, *, user: str = "root", timeout_s: float = 120.0) -> str:
        """Run it to its end and return its output; raise AssertionError when it fails or takes longer."""
        child = self.start(script, user=user)
        try:
            said, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s: {script}\n{self.end(child)}") from None
        assert child.returncode == 0, f"exit status {child.returncode}: {script}\n{said}"
        return said

    def eventually(self, script: str, timeout_s: float = 60.0) -> str:
        """Run it again and again until it succeeds; return its output."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.run(script)
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
