"""What the machine gives this process: cores, memory and the limits of its control group."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

MIN_CORES = 2
MIN_THREADS = 64  # the daemon and the master it starts have 59 on two cores, with a disk tier 63
DESCRIPTORS = 65536  # as LimitNOFILE= of our unit
# What the kernel takes back from a control group before its limit hurts: its share of the page cache, above all.
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def quota_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """The least CPU quota (in cores) of this process's control group and its parents; None where none is set.

    Only the unified hierarchy (cgroup v2) is read.
    """
    quotas = [line.partition(" ") for folder in _groups(root, own) for line in _lines(folder / "cpu.max")[:1]]
    return min((int(quota) / int(period) for quota, _, period in quotas if quota != "max"), default=None)


def startable_threads(most: int) -> int:
    """How many threads, up to `most`, may be started beside those that run (RLIMIT_NPROC, pids.max)."""
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, daemon=True) for _ in range(most)]
    started = 0
    try:
        for thread in threads:
            thread.start()
            started += 1
    except RuntimeError:
        pass
    over.set()
    for thread in threads[:started]:
        thread.join()
    return started


def use_more_descriptors() -> None:
    """Raise the soft limit of open files (`ulimit -n`), which is 1,024 in most shells, as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def machine_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def address_bytes() -> int | None:
    """What this process may map (RLIMIT_AS, `ulimit -v`); None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def available_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that can be had without swapping, here and in this process's control group and its parents (v2 or v1)."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for folder in _groups(root, own):
        most, used = _lines(folder / "memory.max"), _lines(folder / "memory.current")
        if most and used and most[0].isdigit():
            stat = dict(line.split() for line in _lines(folder / "memory.stat"))
            free = min(free, int(most[0]) - int(used[0]) + sum(int(stat.get(name, 0)) for name in _RECLAIMABLE))
    for folder in _groups(root / "memory", own, "memory"):
        most, used = _lines(folder / "memory.limit_in_bytes"), _lines(folder / "memory.usage_in_bytes")
        if most and used:  # the limit is enormous where there is none
            stat = dict(line.split() for line in _lines(folder / "memory.stat"))
            cache = sum(int(stat.get(f"total_{name}", 0)) for name in _RECLAIMABLE)
            free = min(free, int(most[0]) - int(used[0]) + cache)
    return free


def _groups(root: Path, own: Path, controller: str = "") -> Iterator[Path]:
    """The folder of this process's control group, then those of its parents. With a controller, that of cgroup v1."""
    groups = (line.split(":", 2) for line in _lines(own))
    path = next((path for _, names, path in groups if controller in names.split(",")), None)
    if path is None:
        return
    here = root / path.lstrip("/")
    while here != root and root in here.parents:
        yield here
        here = here.parent
    yield root


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
