"""Counts of one epoch of an engine: kept for the status and the log, and added to the daemon's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .metrics import OTHER, WAITED, Metrics

# The metrics of which `engine.detached` and the status have this engine's part.
_LOGGED = (
    *("hints", "bad_records", "hit_blocks", "miss_blocks", "failed_blocks", "loaded_blocks", "saved_blocks"),
    *("saved_again_blocks", "present_blocks", "failed_saves", "kept_bytes", "requests_taken_back", "promoted_blocks"),
    "device_blocks",
    "kept_blocks",
    "lost_values",
)


class Counters:
    """The sums of this engine by the names of metrics, over all values of a label. The main loop alone writes them."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._sums: Counter[str] = Counter()
        self._reached: Counter[tuple[str, ...]] = Counter()
        self.fetched_blocks = 0  # the metrics have their bytes

    def __getitem__(self, name: str) -> float:
        return self._sums[name]

    def add(self, name: str, count: float = 1, *label: str) -> None:
        """Count what is above zero, with the value of the metric's label where it has one."""
        if count > 0:
            self._sums[name] += count  # type: ignore[assignment]  # of seconds
            self.metrics.add(name, count, *label)

    def reach(self, name: str, total: int, *label: str) -> None:
        """Count up to a total that another part keeps."""
        key = name, *label
        grown, self._reached[key] = total - self._reached[key], total
        self.add(name, max(0, grown), *label)

    def request_done(self, line: Mapping[str, Any]) -> None:
        self.add("requests", 1, line["outcome"])
        self.add("loaded_blocks", line["loaded_blocks"])
        self.add("requests_taken_back", line["taken_back"] > 0)
        looked_up, seen = line["looked_up_ms"], line["hint_seen_ms"]
        if looked_up is not None:
            self.metrics.observe("look_up_seconds", (looked_up - seen) / 1e3)
            self.add("miss_blocks", line["hint_blocks"] - line["found_blocks"])
        if line["adopted_ms"] is not None:
            self.metrics.observe("early_seconds", line["adopted_ms"] / 1e3)
        outcome = line["outcome"] if line["outcome"] in WAITED else OTHER
        self.metrics.observe("exposed_wait_seconds", line["exposed_ms"] / 1e3, outcome)
        if line["last_byte_ms"] is not None:
            transfer_s = max(0.0, line["last_byte_ms"] - seen) / 1e3
            self.add("transfer_seconds", transfer_s)
            self.add("hidden_seconds", transfer_s * line["hidden_fraction"])
        if line["unseen_ms"] > 0:
            self.metrics.observe("ready_to_seen_seconds", line["unseen_ms"] / 1e3)

    def totals(self) -> dict[str, int]:
        """Return the numbers of an engine for the log and the status."""
        sums = {name: int(self._sums[name]) for name in _LOGGED}
        return {**sums, "dropped_hints": int(self._sums["hints_dropped"]), "fetched_blocks": self.fetched_blocks}
