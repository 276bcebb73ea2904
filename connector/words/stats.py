"""The connector's statistics as vLLM collects them: counts since the last step, summed over ranks and over time.

The scheduler side reports its decisions, each worker its copies.  vLLM adds the reports up (`aggregate`), carries the
sum to its logger (`to_dict`, `build_kv_connector_stats`), prints it (`reduce`), exports it (KVPrefetchPromMetrics).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Every name that may be reported, with its help text; all only grow.
COUNTERS: Mapping[str, str] = {
    "hints": "Hints sent to the daemon",
    "on_demand_hints": "Hints sent only when the scheduler asked for the request",
    "hints_dropped": "Hints not sent at first because the ring or the flags had no room",
    "hints_resent": "Those sent when there was room again, before the scheduler asked",
    "loads": "Loads dispatched to the workers",
    "load_blocks": "Blocks of the dispatched loads",
    "failed_loads": "Loads that failed on a worker; their blocks are recomputed",
    "unknown_loads": "Acknowledgements of loads this engine does not know",
    "misses": "Requests that the store had nothing for",
    "timed_out": "Requests whose first block was not there in time",
    "recomputed": "Requests that had nothing to take yet and did not wait, recomputing being sooner",
    "stopped": "Requests that waited only for the blocks under way: recomputing the others was sooner",
    "cut_short": "Loads of the ready part of a fetch that was not over",
    "bad_overrides": "Requests whose own wait policy or hints could not be read",
    "waits": "Requests that the scheduler had to wait for",
    "wait_seconds": "Time that the scheduler waited for requests; a pass that went to others ends it",
    "slack_seconds": "Time that the scheduler waited for requests while a step ran, at no cost",
    "slack_overruns": "Such waits that seem to have delayed a step",
    "saves": "Saves dispatched to the workers",
    "save_blocks": "Blocks of the dispatched saves",
    "saves_dropped": "Blocks copied for a save that the engine then gave up: a reset, or a copy or a load that failed",
    "save_blocks_unsaved": "Blocks that found no save slot as long as the engine held them",
    "save_blocks_again": "Blocks of the engine's own cache that are saved again, as the store had lost them",
    "detached": "Attachments given up because the daemon's memory could not be true",
    "load_bytes": "Bytes copied from staging to the KV cache, all ranks",
    "load_device_bytes": "Those of these bytes that came from staging in device memory",
    "load_seconds": "Time the workers' threads spent on these copies (CUDA: on queueing them), all ranks",
    "save_bytes": "Bytes copied from the KV cache to staging, all ranks",
    "save_seconds": "Time the workers' threads spent on these copies (CUDA: on queueing them), all ranks",
}

# Names of the release before, exported for one release longer.
FORMER = {"timed_out": "late", "on_demand_hints": "late_hints"}


class KVPrefetchStats(KVConnectorStats):
    """`data` maps names of COUNTERS to counts since the last report; absent means 0."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add `other`, of another rank or a later step, to this one, and return it."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 6) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class Tally(Counter[str]):
    """Growing counts, and their values in the last report. Times are counted in ns and reported in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._reported: dict[str, int] = {}

    def take(self) -> KVPrefetchStats | None:
        """Return the counts since the last call; None when there are none."""
        before, self._reported = self._reported, dict(self)
        fresh: dict[str, float] = {}
        for name, value in self.items():
            if added := value - before.get(name, 0):
                fresh.update({f"{name[:-3]}_seconds": added / 1e9} if name.endswith("_ns") else {name: added})
        return KVPrefetchStats(fresh) if fresh else None


class KVPrefetchPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter `vllm:kvprefetch_<name>_total` for each name of COUNTERS and each engine."""

    def __init__(
        self, vllm_config: VllmConfig, types: dict[Any, Any], labelnames: list[str], engines: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, types, labelnames, engines)
        families = {
            name: self._counter_cls(name=f"vllm:kvprefetch_{name}_total", documentation=text, labelnames=labelnames)
            for name, text in [*COUNTERS.items(), *((former, f"Now {name}") for name, former in FORMER.items())]
        }
        self._counters = {
            engine: {name: family.labels(*values) for name, family in families.items()}
            for engine, values in engines.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report. Skip unknown names: an error would end vLLM's metrics for good."""
        counters = self._counters[engine_idx]
        for name, value in transfer_stats_data.items():
            for each in (name, FORMER.get(name)):
                if each in counters:
                    counters[each].inc(value)
