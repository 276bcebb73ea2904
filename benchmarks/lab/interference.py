"""How much of the machine others used during a measurement: figures from a disturbed moment are not worth keeping."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from benchmarks.lab.process import descendants

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def _machine_busy_s() -> float:
    user, nice, system, _idle, _wait, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) * _TICK_S


def _ours_s() -> float:
    ticks = 0
    for pid in (os.getpid(), *descendants(os.getpid())):
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S


class Interference:
    """Measures from its creation on; our processes must stay the same meanwhile."""

    def __init__(self) -> None:
        self._begun = (time.monotonic(), _machine_busy_s(), _ours_s())

    def cores(self) -> float:
        """Cores that processes other than ours kept busy on average (interrupts count as theirs)."""
        seconds, busy, ours = (
            now - then for now, then in zip((time.monotonic(), _machine_busy_s(), _ours_s()), self._begun, strict=True)
        )
        return max(0.0, busy - ours) / seconds if seconds > 0 else 0.0
