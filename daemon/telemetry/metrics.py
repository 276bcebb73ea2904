"""The Prometheus metrics: their catalogue, and how a scrape renders the main loop's last snapshot.

There is no second bookkeeping.  docs/METRICS.md, the dashboard and the alert rules are tested against the catalogue;
`python -m tests.support.documents metrics` prints its table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ... import __version__
from ..store.fill import StoreFill
from .counters import WARM_RESULTS, Counters, Histogram
from .events import Ending
from .health import judge
from .logs import EventCounts
from .snapshot import Snapshot

PREFIX = "kvprefetchd_"
MEDIA = ("memory", "disk")
HIT_MEDIA = ("staging", *MEDIA)


class Described(NamedTuple):
    """One metric: `counter`, `gauge` or `histogram`. Counters are exported with `_total` at the end of their name."""

    kind: str
    meaning: str
    labels: tuple[str, ...] = ()


CATALOGUE: dict[str, Described] = {
    "hints": Described("counter", "Hints read from the rings"),
    "hints_dropped": Described("counter", "Hints that an engine could not push: its ring or its flags were full"),
    "bad_records": Described("counter", "Hint-ring records that were skipped"),
    "requests": Described("counter", "Hinted requests that ended, by outcome (docs/EVENTS.md)", ("outcome",)),
    "requests_taken_back": Described(
        "counter", "Of these, those that lost staged blocks to more urgent ones meanwhile"
    ),
    "hit_blocks": Described(
        "counter", "Blocks beyond the local ones that were there, by tier; staging: fetched before", ("tier",)
    ),
    "miss_blocks": Described("counter", "Blocks of looked-up requests that were neither local nor in the store"),
    "loaded_blocks": Described("counter", "Blocks that engines copied out of staging"),
    "failed_blocks": Described("counter", "Blocks that the store had and that could not be fetched", ("tier",)),
    "fetched_bytes": Described("counter", "Bytes fetched from the store, by tier", ("tier",)),
    "wasted_bytes": Described(
        "counter", "Of these, those that no request loaded before their room was reused or their engine left", ("tier",)
    ),
    "warmed_blocks": Described("counter", "Blocks that `kvprefetchd warm` listed, by what became of them", ("result",)),
    "transfer_seconds": Described("counter", "Look-up and transfer of all requests that fetched, one beside the other"),
    "hidden_seconds": Described("counter", "Of these, the part that made no scheduler wait"),
    "saved_blocks": Described("counter", "Blocks put into the store"),
    "saved_again_blocks": Described(
        "counter", "Of these, those that the same engine had stored before: evicted since, or purged"
    ),
    "present_blocks": Described("counter", "Blocks that were to be saved and were in the store already"),
    "lost_saves": Described("counter", "Blocks that were to be saved and were not"),
    "kept_bytes": Described(
        "counter",
        "Bytes of staging that are never given back: an epoch with lost slots ended, and Mooncake may use them",
    ),
    "promoted_blocks": Described("counter", "Staged blocks copied to device memory"),
    "device_blocks": Described("counter", "Of the loaded blocks, those that engines loaded from device memory"),
    "memory_evicted_bytes": Described(
        "counter", "Bytes that left the embedded store's memory to make room; what lies on its disk stays there"
    ),
    "disk_evictions": Described(
        "counter",
        "How often the embedded store's disk tier made room, by one value or many: Mooncake does not say how many",
    ),
    "events": Described("counter", "Log events of level warning and error, those held back included", ("event",)),
    "log_lost_lines": Described("counter", "Lines of the log that were lost: nobody read them, or a disk stood still"),
    "push_to_seen_seconds": Described("histogram", "From the engine's push of a hint until the daemon read it"),
    "look_up_seconds": Described("histogram", "From the hint read until the store said what it has"),
    "fetch_seconds": Described("histogram", "From a fetch order to its result", ("tier",)),
    "exposed_wait_seconds": Described(
        "histogram",
        "How long the scheduler waited for requests that were loaded or late, its turns with others excluded",
    ),
    "ready_to_seen_seconds": Described(
        "histogram", "How long requests waited although their answer was there: until the engine's step had ended"
    ),
    "engines": Described("gauge", "Attached engines"),
    "staging_slots": Described(
        "gauge",
        "Staging slots: free, idle (staged, held by nobody), pinned (by requests), stuck (a call may still write), "
        "lost (Mooncake gave a fetch up that may still write; never used again)",
        ("engine", "use"),
    ),
    "device_slots": Described(
        "gauge",
        "Slots in device memory: free, idle (a copy, held by nobody), all (held and being copied to included)",
        ("engine", "use"),
    ),
    "pending_requests": Described("gauge", "Hinted requests that have not ended", ("engine",)),
    "leases": Described("gauge", "Blocks that wait for their fetch; the store keeps them until then", ("engine",)),
    "fetch_orders": Described("gauge", "Fetches in flight or waiting for a thread", ("engine",)),
    "save_slots": Described("gauge", "Staging slots kept for saves", ("engine",)),
    "save_slots_busy": Described("gauge", "Of these, with the saver", ("engine",)),
    "save_slots_lost": Described(
        "gauge", "Of these, never used again: Mooncake gave a put up that may still read them", ("engine",)
    ),
    "saves_queued": Described("gauge", "Saves running or waiting", ("engine",)),
    "store_open": Described("gauge", "1 when the store can be used"),
    "store_answering": Described("gauge", "0 while the store is left alone, because whole calls failed"),
    "store_used_bytes": Described(
        "gauge", "Bytes of values in the embedded store; no series where not known", ("tier",)
    ),
    "store_capacity_bytes": Described("gauge", "Bytes that it has room for", ("tier",)),
    "disk_writable": Described("gauge", "0 when nothing can be kept on the disk tier; 1 also without one"),
    "ready": Described("gauge", "1 when /readyz says so"),
    "loop_age_seconds": Described("gauge", "Since the main loop's last heartbeat; a tenth when it is well"),
    "call_age_seconds": Described(
        "gauge", "Age of the oldest store call in flight, or call to a GPU (`copy`); no series without one", ("call",)
    ),
    "info": Described("gauge", "Always 1", ("version",)),
}


Sample = tuple[tuple[str, ...], float]


class SnapshotCollector(Collector):
    """Renders what was published last; reads nothing that the loop still changes."""

    def __init__(self, snapshot: Snapshot, events: EventCounts) -> None:
        self._snapshot, self._events = snapshot, events

    def collect(self) -> Iterator[Metric]:
        published = self._snapshot.published
        totals = published.totals
        samples = {**self._counters(totals), **self._gauges(), **_fill(self._snapshot.fill())}
        histograms: dict[str, dict[tuple[str, ...], Histogram]] = {
            "push_to_seen_seconds": {(): totals.push_to_seen}, "look_up_seconds": {(): totals.look_up},
            "fetch_seconds": {("memory",): totals.fetch_memory, ("disk",): totals.fetch_disk},
            "exposed_wait_seconds": {(): totals.exposed}, "ready_to_seen_seconds": {(): totals.ready_to_seen},
        }  # fmt: skip
        for name, (kind, meaning, labels) in CATALOGUE.items():
            if kind == "histogram":
                yield _histogram(name, meaning, labels, histograms[name])
                continue
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
                PREFIX + name, meaning, labels=labels
            )
            for values, value in samples[name]:
                family.add_metric(values, value)
            yield family

    def _counters(self, totals: Counters) -> dict[str, Iterable[Sample]]:
        plain = {
            "hints": totals.hints, "hints_dropped": totals.dropped_hints, "bad_records": totals.bad_records,
            "miss_blocks": totals.miss_blocks, "loaded_blocks": totals.loaded_blocks,
            "transfer_seconds": totals.transfer_s, "hidden_seconds": totals.hidden_s,
            "saved_blocks": totals.saved_blocks, "saved_again_blocks": totals.saved_again_blocks,
            "present_blocks": totals.present_blocks,
            "lost_saves": totals.lost_saves, "requests_taken_back": totals.requests_taken_back,
            "kept_bytes": totals.kept_bytes,
            "promoted_blocks": totals.promoted_blocks, "device_blocks": totals.device_blocks,
        }  # fmt: skip
        return {
            **{name: [((), value)] for name, value in plain.items()},
            # Every value that can come is there from the start: a rate over the first one needs the zero before it.
            "requests": [((ending.value,), totals.endings[ending.value]) for ending in Ending],
            "hit_blocks": [((medium,), totals.hit_blocks[medium]) for medium in HIT_MEDIA],
            "failed_blocks": [((medium,), totals.failed_blocks[medium]) for medium in MEDIA],
            "fetched_bytes": [((medium,), totals.fetched_bytes[medium]) for medium in MEDIA],
            "wasted_bytes": [((medium,), totals.wasted_bytes[medium]) for medium in MEDIA],
            "warmed_blocks": [((result,), totals.warmed_blocks[result]) for result in WARM_RESULTS],
            "log_lost_lines": [((), self._snapshot.lost_lines)],
            "events": [((event,), count) for event, count in self._events.counts.items()],
        }

    def _gauges(self) -> dict[str, Iterable[Sample]]:
        published, health = self._snapshot.published, judge(self._snapshot)
        engines: dict[str, Counter[str]] = {}
        for (
            engine
        ) in published.engines:  # two may have one id: their numbers are added, as one series cannot come twice
            numbers = {name: value for name, value in engine.items() if isinstance(value, int)}
            engines.setdefault(str(engine["engine"]), Counter()).update(numbers)

        def each(key: str) -> list[Sample]:
            return [((engine,), numbers[key]) for engine, numbers in engines.items()]

        uses = {"free": "slots_free", "idle": "slots_idle", "pinned": "blocks_pinned", "stuck": "slots_stuck"}
        uses["lost"] = "slots_lost"
        device = {"all": "device_slots", "free": "device_slots_free", "idle": "device_slots_idle"}
        return {
            "engines": [((), len(published.engines))],
            "staging_slots": [
                ((engine, use), numbers[key]) for engine, numbers in engines.items() for use, key in uses.items()
            ],
            "device_slots": [
                ((engine, use), numbers[key]) for engine, numbers in engines.items() for use, key in device.items()
            ],
            "pending_requests": each("requests"),
            "leases": each("leases"),
            "fetch_orders": each("orders"),
            "save_slots": each("save_slots"),
            "save_slots_busy": each("save_slots_busy"),
            "save_slots_lost": each("save_slots_lost"),
            "saves_queued": each("saves_queued"),
            "store_open": [((), published.store_open)],
            "store_answering": [((), published.store_answering)],
            "disk_writable": [((), not self._snapshot.disk_fault())],
            "ready": [((), health.ready)],
            "loop_age_seconds": [((), health.loop_age_s)],
            "call_age_seconds": [((call,), age_s) for call, age_s in health.call_age_s.items()],
            "info": [((__version__,), 1)],
        }


def _fill(fill: StoreFill | None) -> dict[str, list[Sample]]:
    """No series of what is not known, nor of a tier that is not there."""
    samples: dict[str, list[Sample]] = {
        name: [] for name in ("store_used_bytes", "store_capacity_bytes", "memory_evicted_bytes", "disk_evictions")
    }
    if fill is not None:
        samples["store_used_bytes"].append((("memory",), fill.memory_used_bytes))
        samples["store_capacity_bytes"].append((("memory",), fill.memory_bytes))
        samples["memory_evicted_bytes"].append(((), fill.memory_evicted_bytes))
        if fill.disk_bytes:
            samples["store_used_bytes"].append((("disk",), fill.disk_used_bytes))
            samples["store_capacity_bytes"].append((("disk",), fill.disk_bytes))
            samples["disk_evictions"].append(((), fill.disk_evictions))
    return samples


def _histogram(
    name: str, meaning: str, labels: Sequence[str], series: Mapping[tuple[str, ...], Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(PREFIX + name, meaning, labels=labels)
    for label_values, values in series.items():
        buckets, count = [], 0
        for bound, here in zip((*map(str, values.bounds_s), "+Inf"), values.counts, strict=True):
            count += here
            buckets.append((bound, count))
        family.add_metric(label_values, buckets, values.sum_s)
    return family
