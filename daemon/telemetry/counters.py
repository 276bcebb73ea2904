"""Counts of one epoch of an engine: kept for the status and the log, and now and then added to the daemon's metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from .metrics import OTHER, WAITED, Metrics

# The metrics of which `engine.detached` and the status have this engine's part.
_LOGGED = (
    *("hints", "bad_records", "hit_blocks", "miss_blocks", "failed_blocks", "loaded_blocks", "saved_blocks"),
    *("present_blocks", "failed_saves", "kept_bytes", "requests_taken_back", "promoted_blocks"),
    "device_blocks",
    "kept_blocks",
)


class Counters:
    """The sums of this engine by the names of metrics. The main loop alone writes them.

    `counts`: by name, or name and value of the metric's label.  They never fall; `publish` adds them to the metrics.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.counts: defaultdict[str | tuple[str, str], float] = defaultdict(int)
        self._published: dict[str | tuple[str, str], float] = {}
        self.fetched_blocks = 0  # the metrics have their bytes

    def __getitem__(self, name: str) -> float:
        return sum(count for key, count in self.counts.items() if key == name or key[0] == name)

    def publish(self) -> None:
        """Add to the metrics what was counted since the last time."""
        for key, count in self.counts.items():
            if (grown := count - self._published.get(key, 0)) > 0:
                self._published[key] = count
                self.metrics.add(*((key, grown) if isinstance(key, str) else (key[0], grown, key[1])))

    def request_done(self, line: Mapping[str, Any]) -> None:
        counts, made = self.counts, self.metrics.made
        counts["requests", line["outcome"]] += 1
        counts["loaded_blocks"] += line["loaded_blocks"]
        counts["requests_taken_back"] += line["taken_back"] > 0
        looked_up, seen = line["looked_up_ms"], line["hint_seen_ms"]
        if looked_up is not None:
            made["look_up_seconds"].observe((looked_up - seen) / 1e3)
            counts["miss_blocks"] += line["hint_blocks"] - line["found_blocks"]
        if line["adopted_ms"] is not None:
            made["early_seconds"].observe(line["adopted_ms"] / 1e3)
        outcome = line["outcome"] if line["outcome"] in WAITED else OTHER
        made["exposed_wait_seconds"].labels(outcome).observe(line["exposed_ms"] / 1e3)
        if line["last_byte_ms"] is not None:
            transfer_s = max(0.0, line["last_byte_ms"] - seen) / 1e3
            counts["transfer_seconds"] += transfer_s
            counts["hidden_seconds"] += transfer_s * line["hidden_fraction"]
        if line["unseen_ms"] > 0:
            made["ready_to_seen_seconds"].observe(line["unseen_ms"] / 1e3)

    def totals(self) -> dict[str, int]:
        """Return the numbers of an engine for the log and the status."""
        sums = defaultdict[str, float](int)
        for key, count in self.counts.items():
            sums[key if isinstance(key, str) else key[0]] += count
        told = {name: int(sums[name]) for name in _LOGGED}
        return {**told, "dropped_hints": int(sums["hints_dropped"]), "fetched_blocks": self.fetched_blocks}
