"""The machine's limits for this process: cores, memory, threads, descriptors."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

MIN_CORES = 2
MIN_THREADS = 64  # the daemon and the master it starts have 59 on two cores, with a disk 63
DESCRIPTORS = 65536  # as LimitNOFILE= of our unit
# Memory that the kernel takes back from a control group at its limit, above all its share of the page cache.
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def quota_cores(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the least CPU quota, in cores, of this process's control group and its parents (v2); None for none."""
    quotas = [line.partition(" ") for folder in _groups(root, own) for line in _lines(folder / "cpu.max")[:1]]
    return min((int(quota) / int(period) for quota, _, period in quotas if quota != "max"), default=None)


def startable_threads(most: int) -> int:
    """Return how many more threads, up to `most`, may be started (RLIMIT_NPROC, pids.max): it starts and ends them."""
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
    """Raise the soft limit of open files (`ulimit -n`, 1,024 in most shells) to DESCRIPTORS, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def address_bytes() -> int | None:
    """Return the bytes that this process may map (RLIMIT_AS, `ulimit -v`); None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def available_bytes(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory available without swapping: of the machine, of this process's control group and its parents."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    groups = [(folder, "memory.max", "memory.current", "") for folder in _groups(root, own)]
    for folder in _groups(root / "memory", own, "memory"):  # cgroup v1, whose limit is enormous where there is none
        groups.append((folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"))
    for folder, limit, usage, prefix in groups:
        most, used = _lines(folder / limit), _lines(folder / usage)
        if most and used and most[0].isdigit():
            stat = dict(line.split() for line in _lines(folder / "memory.stat"))
            reclaimable = sum(int(stat.get(prefix + name, 0)) for name in _RECLAIMABLE)
            free = min(free, int(most[0]) - int(used[0]) + reclaimable)
    return free


def _groups(root: Path, own: Path, controller: str = "") -> Iterator[Path]:
    """Yield the folder of this process's control group, then those of its parents. A controller names one of v1."""
    groups = (line.split(":", 2) for line in _lines(own))
    path = next((path for _, names, path in groups if controller in names.split(",")), None)
    if path is not None:
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
