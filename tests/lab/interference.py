"""How much of the machine others used during a measurement: figures from a disturbed moment are not worth keeping."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path

from tests.lab.process import descendants

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def _machine_busy_s() -> float:
    user, nice, system, _idle, _wait, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) * _TICK_S


def cpu_s(pids: Iterable[int]) -> float:
    """Seconds of CPU that processes have used so far; those that ended count nothing."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S


def ours() -> list[int]:
    """This process and all below it."""
    return [os.getpid(), *descendants(os.getpid())]


class Interference:
    """Measures from its creation on; our processes must stay the same meanwhile."""

    def __init__(self) -> None:
        self._begun = (time.monotonic(), _machine_busy_s(), cpu_s(ours()))

    def cores(self) -> float:
        """Cores that processes other than ours kept busy on average (interrupts count as theirs)."""
        seconds, busy, own = (
            now - then
            for now, then in zip((time.monotonic(), _machine_busy_s(), cpu_s(ours())), self._begun, strict=True)
        )
        return max(0.0, busy - own) / seconds if seconds > 0 else 0.0


def children_s() -> float:
    """CPU seconds of processes that this one started and saw end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
