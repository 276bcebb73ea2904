"""A second "host" on this machine: a network namespace behind a veth pair of limited rate. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.lab import process

# Addresses of the pairs, four each; private, and no packet leaves the machine.
NETWORK = ipaddress.ip_network("10.231.0.0/20")
_NAMESPACES = Path("/run/netns")
_PREFIX = "kvpl"
# Linux's default, whatever this machine has: BBR sends next to nothing for a fifth of a second in each ten.
_CONGESTION = ["congctl", "cubic"]


class LinkError(RuntimeError):
    """A command that builds the link failed."""


def available() -> str | None:
    """Why a limited link cannot be made here, or None if it can."""
    if os.geteuid() != 0:
        return "not root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not installed (package iproute2)"
    probe = f"{_PREFIX}{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    try:
        shaped = subprocess.run(
            ["ip", "netns", "exec", probe, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *_shape(1000, 256)],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return None if shaped.returncode == 0 else f"no tbf qdisc here: {shaped.stderr.strip()}"


def _shape(rate_mbit: float, burst_kib: int) -> list[str]:
    return ["rate", f"{rate_mbit}mbit", "burst", f"{burst_kib}kb", "latency", "50ms"]


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LinkError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def remove_stale() -> None:
    """Remove the links of runs that were killed: their processes, their namespaces, and with them both ends."""
    for namespace in _NAMESPACES.glob(f"{_PREFIX}*") if _NAMESPACES.is_dir() else ():
        owner = namespace.name.removeprefix(_PREFIX).rstrip("p")
        if owner.isdigit() and not process.alive(int(owner)):
            _remove(namespace.name)


def _remove(namespace: str) -> None:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    pids = [int(pid) for pid in listed.stdout.split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait_gone(pids)
    # The outer end goes first: the kernel may keep a namespace for seconds, and its end of the pair with it.
    subprocess.run(["ip", "link", "delete", namespace], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


class LimitedLink:
    """The namespace and its link; ``host_ip`` is our end, ``remote_ip`` the far one. One per process at a time."""

    def __init__(self, *, rate_mbit: float = 1000, burst_kib: int = 256) -> None:
        self.rate_mbit = rate_mbit
        self.burst_kib = burst_kib
        self.namespace = f"{_PREFIX}{os.getpid()}"
        self.host_ip = ""
        self.remote_ip = ""

    def __enter__(self) -> LimitedLink:
        remove_stale()
        _remove(self.namespace)
        pair = self._free_pair()
        self.host_ip, self.remote_ip = str(pair[1]), str(pair[2])
        outer, inner, inside = self.namespace, "far0", ["ip", "netns", "exec", self.namespace]
        try:
            _run("ip", "netns", "add", self.namespace)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", self.namespace)
            _run("ip", "addr", "add", f"{self.host_ip}/30", "dev", outer)
            _run("ip", "link", "set", outer, "up")
            _run(*inside, "ip", "addr", "add", f"{self.remote_ip}/30", "dev", inner)
            _run(*inside, "ip", "link", "set", inner, "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            _run("ip", "route", "add", self.remote_ip, "dev", outer, "src", self.host_ip, *_CONGESTION)
            _run(*inside, "ip", "route", "add", self.host_ip, "dev", inner, "src", self.remote_ip, *_CONGESTION)
            self.limit(self.rate_mbit)
        except BaseException:
            _remove(self.namespace)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        _remove(self.namespace)

    def limit(self, rate_mbit: float) -> None:
        """Give both directions this rate from now on."""
        self.rate_mbit, shape = rate_mbit, _shape(rate_mbit, self.burst_kib)
        _run("tc", "qdisc", "replace", "dev", self.namespace, "root", "tbf", *shape)
        _run(*self.in_namespace(["tc", "qdisc", "replace", "dev", "far0", "root", "tbf", *shape]))

    def cut(self, *, down: bool = True) -> None:
        """Let no packet through, and let neither side know; `down` False: let them through again."""
        _run(*self.in_namespace(["ip", "link", "set", "far0", "down" if down else "up"]))

    def lose(self, percent: int) -> None:
        """Let so many of a hundred packets vanish from now on, in both directions. Needs `nft`."""
        rule = f"priority 0; numgen random mod 100 < {percent} drop;" if percent else "priority 0;"
        chains = "".join(f"chain {hook} {{ type filter hook {hook} {rule} }}\n" for hook in ("input", "output"))
        _run(*self.in_namespace(["nft", f"flush ruleset\ntable inet lost {{\n{chains}}}\n"]))

    @property
    def received_bytes(self) -> int:
        """What came from the far side so far, headers included."""
        return int(Path(f"/sys/class/net/{self.namespace}/statistics/rx_bytes").read_text())

    def in_namespace(self, argv: Sequence[str]) -> list[str]:
        """``argv`` as it runs on the far side; ``ip netns exec`` replaces itself by it."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def run_in_ns(
        self, argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program on the far side; the caller ends it with :func:`tests.lab.process.reap`."""
        return process.spawn(self.in_namespace(argv), log=log, env=env)

    @staticmethod
    def _free_pair() -> ipaddress.IPv4Network:
        taken = [
            ipaddress.ip_interface(word).network
            for line in _run("ip", "-4", "-o", "addr").splitlines()
            for word in line.split()
            if "/" in word and word[0].isdigit()
        ]
        # Runs at the same moment begin their search at different places.
        pairs = [ipaddress.IPv4Network(each) for each in NETWORK.subnets(new_prefix=30)]
        start = os.getpid() % len(pairs)
        for pair in pairs[start:] + pairs[:start]:
            if not any(pair.overlaps(other) for other in taken):
                return pair
        raise LinkError(f"no free addresses in {NETWORK}")
