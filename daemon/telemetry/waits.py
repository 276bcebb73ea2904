"""Judges, minute by minute, how much of the time for which an engine's scheduler waited was lost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from . import causes
from .events import Ending

WINDOW_NS = 60_000_000_000
LOST_SHARE, LOST_MS = 0.25, 1000.0  # of all waiting of a window: both, or nobody is warned
_IN_VAIN = (Ending.LATE.value, Ending.RECOMPUTED.value, Ending.MISS.value)


class LostWaits:
    """Waits of requests that loaded nothing; what they waited for the engine's own step is no loss of ours."""

    def __init__(self) -> None:
        self._began_ns = 0
        self._begin(0)

    def _begin(self, now_ns: int) -> None:
        self._began_ns, self._requests = now_ns, 0
        self._waited_ms = self._lost_ms = 0.0
        self._causes: Counter[str] = Counter()

    def add(self, line: Mapping[str, Any]) -> None:
        """Enter a `request.done` line."""
        self._waited_ms += line["exposed_ms"]
        lost = line["exposed_ms"] - line["unseen_ms"] if line["outcome"] in _IN_VAIN else 0.0
        if lost > 0:
            self._lost_ms += lost
            self._requests += 1
            self._causes[causes.label(line["cause"] or "unknown")] += 1

    def tick(self, now_ns: int) -> dict[str, Any] | None:
        """Return the fields of `wait.lost` at the end of a window of which too much was lost."""
        if now_ns - self._began_ns < WINDOW_NS:
            return None
        waited_ms, lost_ms, requests, found = self._waited_ms, self._lost_ms, self._requests, self._causes
        self._begin(now_ns)
        if lost_ms < LOST_MS or lost_ms < LOST_SHARE * waited_ms:
            return None
        named = ", ".join(f"{cause} {count}" for cause, count in found.most_common())
        return {
            "requests": requests,
            "waited_s": round(waited_ms / 1e3, 1),
            "lost_s": round(lost_ms / 1e3, 1),
            "causes": named,
        }
