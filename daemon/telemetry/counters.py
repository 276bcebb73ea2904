"""Counters of one epoch of an engine, which only grow: for the status, the metrics and the log.

The main loop alone writes them.  When an engine goes, its counters are added to those of earlier engines, so that no
total ever falls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .events import Ending

# Upper bounds in seconds: fast ones for shared memory, slow ones for the network and disks.
FAST_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 0.01, 0.05, 0.25, 1.0)
SLOW_S = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Results of a block that an operator warms, as the message Warmed names them.
WARM_RESULTS = ("staged", "fetched", "absent", "no_room", "failed")
OTHER = "other"
WAITED = (*(each.value for each in (Ending.LOADED, Ending.LATE, Ending.RECOMPUTED, Ending.MISS)), OTHER)


class Histogram:
    """Counts of values in seconds by upper bound; the last count is for values above every bound."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float) -> None:
        self.counts[bisect_left(self.bounds_s, value_s)] += 1
        self.sum_s += value_s

    def add(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s


def _fast() -> Histogram:
    return Histogram(FAST_S)


def _slow() -> Histogram:
    return Histogram(SLOW_S)


@dataclass
class Counters:
    """Counts of blocks, bytes, seconds or events, as their names say.

    Some are kept by medium: `memory` and `disk`, for hits also `staging` (blocks already staged, or on their way).
    """

    hints: int = 0
    dropped_hints: int = 0
    bad_records: int = 0
    miss_blocks: int = 0
    fetched_blocks: int = 0
    loaded_blocks: int = 0
    saved_blocks: int = 0
    saved_again_blocks: int = 0
    present_blocks: int = 0
    lost_saves: int = 0
    kept_bytes: int = 0
    requests_taken_back: int = 0
    promoted_blocks: int = 0
    device_blocks: int = 0
    transfer_s: float = 0.0
    hidden_s: float = 0.0
    endings: Counter[str] = field(default_factory=Counter)
    hit_blocks: Counter[str] = field(default_factory=Counter)
    failed_blocks: Counter[str] = field(default_factory=Counter)
    fetched_bytes: Counter[str] = field(default_factory=Counter)
    wasted_bytes: Counter[str] = field(default_factory=Counter)
    warmed_blocks: Counter[str] = field(default_factory=Counter)
    push_to_seen: Histogram = field(default_factory=_fast)
    look_up: Histogram = field(default_factory=_slow)
    fetch_memory: Histogram = field(default_factory=_slow)
    fetch_disk: Histogram = field(default_factory=_slow)
    exposed: dict[str, Histogram] = field(default_factory=lambda: {outcome: _slow() for outcome in WAITED})
    ready_to_seen: Histogram = field(default_factory=_slow)

    def request_done(self, line: Mapping[str, Any]) -> None:
        self.endings[line["outcome"]] += 1
        self.loaded_blocks += line["loaded_blocks"]
        self.requests_taken_back += line["taken_back"] > 0
        looked_up, seen = line["looked_up_ms"], line["hint_seen_ms"]
        if looked_up is not None:
            self.look_up.observe((looked_up - seen) / 1e3)
            self.miss_blocks += line["hint_blocks"] - line["found_blocks"]
        outcome = line["outcome"] if line["outcome"] in WAITED else OTHER
        self.exposed[outcome].observe(line["exposed_ms"] / 1e3)
        if line["last_byte_ms"] is not None:
            transfer = max(0.0, line["last_byte_ms"] - seen) / 1e3
            self.transfer_s += transfer
            self.hidden_s += transfer * line["hidden_fraction"]
        if line["unseen_ms"] > 0:
            self.ready_to_seen.observe(line["unseen_ms"] / 1e3)

    def add(self, other: Counters) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Histogram):
                mine.add(theirs)
            elif isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, dict):
                for name, histogram in theirs.items():
                    mine[name].add(histogram)
            else:
                setattr(self, each.name, mine + theirs)

    def totals(self) -> dict[str, int]:
        """Return the plain counters by name, and the sums of hits and failures over their media."""
        plain = {each.name: value for each in fields(self) if isinstance(value := getattr(self, each.name), int)}
        return {**plain, "hit_blocks": self.hit_blocks.total(), "failed_blocks": self.failed_blocks.total()}
