"""What the main loop knows of the daemon as a whole, as of its last second. The loop alone writes it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..store.fill import StoreFill

LOST_NS = 60_000_000_000  # for so long a lost line of the log is a problem


@dataclass
class Snapshot:
    """`phase` is `starting`, `serving` or `stopping`."""

    phase: str = "starting"
    started_ns: int = field(default_factory=time.monotonic_ns)
    disk_fault: str = ""  # why nothing can be kept on disk
    fill: StoreFill | None = None  # how full the embedded store is
    missing: list[str] = field(default_factory=list)  # names that others removed (runtime/names.py)
    held: list[dict[str, int | str]] = field(default_factory=list)  # memory that could not be freed
    dropped_lines: int = 0  # of the log
    lost_ns: int = -LOST_NS  # when the last one was lost

    def note_lost(self, lines: int, now_ns: int) -> None:
        """Enter how many lines of the log were lost since the start."""
        if lines > self.dropped_lines:
            self.dropped_lines, self.lost_ns = lines, now_ns

    def log_fault(self, now_ns: int) -> str:
        """Say that lines of the log were lost within LOST_NS; "" where none were."""
        if now_ns - self.lost_ns >= LOST_NS:
            return ""
        return f"lines of the log are lost: nobody reads it, or its disk hangs or is full: lines={self.dropped_lines}"
