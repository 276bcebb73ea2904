"""What the machine gives this process: cores, memory and the limits of its control group."""

from __future__ import annotations

import os
from pathlib import Path

MIN_CORES = 2


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def quota_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """The least CPU quota (in cores) of this process's control group and its parents; None where none is set.

    Only the unified hierarchy (cgroup v2) is read.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return None
    least: float | None = None
    here = root / path.lstrip("/")
    while True:
        try:
            quota, _, period = (here / "cpu.max").read_text().strip().partition(" ")
            if quota != "max":
                cores = int(quota) / int(period)
                least = cores if least is None else min(least, cores)
        except (OSError, ValueError):
            pass  # the root group has no such file
        if here == root or root not in here.parents:
            return least
        here = here.parent


def machine_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Free memory, or what is left of this control group's limit where that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    group = next((line[3:] for line in _lines(Path("/proc/self/cgroup")) if line.startswith("0::")), None)
    if group is not None:
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        most, used = _lines(folder / "memory.max"), _lines(folder / "memory.current")
        if most and used and most[0].isdigit():
            free = min(free, int(most[0]) - int(used[0]))
    return free


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
