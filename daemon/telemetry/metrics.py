"""The Prometheus metrics: their catalogue, and how a scrape renders the main loop's last snapshot.

There is no second bookkeeping.  docs/METRICS.md, the dashboard and the alert rules are tested against the catalogue;
CONTRIBUTING.md has the steps to add one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ... import __version__
from ..store.fill import StoreFill
from .counters import WARM_RESULTS, Counters, Histogram
from .events import Ending
from .logs import EventCounts
from .snapshot import Snapshot, judge

PREFIX = "kvprefetchd_"
MEDIA = ("memory", "disk")


class Described(NamedTuple):
    """One metric: `counter`, `gauge` or `histogram`. Counters are exported with `_total` at the end of their name.

    `of` names the field of Counters, or of an engine's numbers, that has the value; without it `name` does, or
    SnapshotCollector computes the metric.
    """

    kind: str
    meaning: str
    labels: tuple[str, ...] = ()
    of: str = ""


_counter, _gauge, _histogram = (partial(Described, kind) for kind in ("counter", "gauge", "histogram"))
_MEDIUM, _ENGINE, _ENGINE_USE = ("tier",), ("engine",), ("engine", "use")

CATALOGUE: dict[str, Described] = {
    "hints": _counter("Hints read from the rings"),
    "hints_dropped": _counter("Hints that found the engine's ring or flags full", of="dropped_hints"),
    "bad_records": _counter("Hint-ring records that were skipped"),
    "requests": _counter("Hinted requests that ended, by outcome (docs/EVENTS.md)", ("outcome",), of="endings"),
    "requests_taken_back": _counter("Of these, those that lost staged blocks to more urgent requests meanwhile"),
    "hit_blocks": _counter("Blocks beyond the local ones that were there, by medium; staging: fetched before", _MEDIUM),
    "miss_blocks": _counter("Blocks of looked-up requests that were neither local nor in the store"),
    "loaded_blocks": _counter("Blocks that engines copied out of staging"),
    "failed_blocks": _counter("Blocks that the store had and that could not be fetched", _MEDIUM),
    "fetched_bytes": _counter("Bytes fetched from the store, by medium", _MEDIUM),
    "wasted_bytes": _counter(
        "Of these, bytes that no request loaded before their slot was reused or their engine left", _MEDIUM
    ),
    "warmed_blocks": _counter("Blocks that `kvprefetchd warm` listed, by result", ("result",)),
    "transfer_seconds": _counter("Sum over all requests that fetched of their look-up and transfer", of="transfer_s"),
    "hidden_seconds": _counter("Of these, the part that made no scheduler wait", of="hidden_s"),
    "saved_blocks": _counter("Blocks put into the store"),
    "saved_again_blocks": _counter("Of these, those that the same engine had stored before: evicted since, or purged"),
    "present_blocks": _counter("Blocks that were to be saved and were in the store already"),
    "lost_saves": _counter("Blocks that were to be saved and were not"),
    "kept_bytes": _counter("Bytes of staging that never return: their epoch had lost slots, which Mooncake may use"),
    "promoted_blocks": _counter("Staged blocks copied to device memory"),
    "device_blocks": _counter("Of the loaded blocks, those that engines loaded from device memory"),
    "memory_evicted_bytes": _counter("Bytes evicted from the embedded store's memory; their copies on disk stay"),
    "disk_evictions": _counter("How often the embedded store's disk made room, each time by one value or more"),
    "events": _counter("Log events of level warning and error, those held back included", ("event",)),
    "log_lost_lines": _counter("Lines of the log that were lost: nobody read them, or a disk stood still"),
    "push_to_seen_seconds": _histogram("From the engine's push of a hint until the daemon read it", of="push_to_seen"),
    "look_up_seconds": _histogram("From the hint read until the store answered the look-up", of="look_up"),
    "fetch_seconds": _histogram("From a fetch order to its result", _MEDIUM),
    "exposed_wait_seconds": _histogram(
        "How long the scheduler waited for requests, its turns with others excluded", ("outcome",), of="exposed"
    ),
    "ready_to_seen_seconds": _histogram(
        "How long requests waited after their answer came, until the engine's step ended",
        of="ready_to_seen",
    ),
    "engines": _gauge("Attached engines"),
    "staging_slots": _gauge(
        "Staging slots: free, idle (staged, held by nobody), pinned (by requests), stuck (a call may still write), "
        "lost (Mooncake gave a fetch up that may still write; never used again)",
        _ENGINE_USE,
    ),
    "unused_blocks": _gauge(
        "Of the idle slots, those whose block no request loaded yet; warmed ones aside", _ENGINE, of="slots_unused"
    ),
    "prefetch_limited": _gauge(
        "1 while more of the fetched bytes went unused than `wasted_share`: prefetch is for the next request alone",
        _ENGINE,
    ),
    "device_slots": _gauge(
        "Slots in device memory: free, idle (a copy, held by nobody), all (held and being copied to included)",
        _ENGINE_USE,
    ),
    "pending_requests": _gauge("Hinted requests that have not ended", _ENGINE, of="requests"),
    "leases": _gauge("Blocks that wait for their fetch; the store keeps them until then", _ENGINE),
    "fetch_orders": _gauge("Fetches in flight or waiting for a thread", _ENGINE, of="orders"),
    "save_slots": _gauge("Staging slots kept for saves", _ENGINE),
    "save_slots_busy": _gauge("Of these, with the saver", _ENGINE),
    "save_slots_lost": _gauge("Of these, never used again: Mooncake gave a put up that may still read them", _ENGINE),
    "saves_queued": _gauge("Saves running or waiting", _ENGINE),
    "store_open": _gauge("1 when the store can be used"),
    "store_answering": _gauge("0 while the store is left alone, because whole calls failed"),
    "store_used_bytes": _gauge("Bytes of values in the embedded store; no series where not known", _MEDIUM),
    "store_capacity_bytes": _gauge("Bytes that it has room for", _MEDIUM),
    "disk_writable": _gauge("0 when nothing can be kept on disk; 1 also without a disk"),
    "ready": _gauge("1 when /readyz says so"),
    "loop_age_seconds": _gauge("Since the main loop's last heartbeat; up to a quarter when it is well"),
    "call_age_seconds": _gauge(
        "Age of the oldest store call in flight, or GPU call (`copy`); no series without one", ("call",)
    ),
    "rate_bytes": _gauge(
        "Bytes per second while fetches from a medium, or puts (`save`), ran: the median of slices of 5 s in a window; "
        "`now`: the last slice",
        ("path", "window"),
    ),
    "engine_info": _gauge("Always 1, for each attached engine", ("engine", "model", "pid", "uid", "mode")),
    "engine_age_seconds": _gauge("Since the engine attached", _ENGINE, of="age_s"),
    "info": _gauge("Always 1", ("version",)),
}

# Every value of a label that can come is there from the start: a rate over the first one needs the zero before it.
_VALUES = {"outcome": tuple(ending.value for ending in Ending), "tier": MEDIA, "result": WARM_RESULTS}
USES = {  # the number of an engine for each `use`
    "staging_slots": {"pinned": "blocks_pinned", **{use: f"slots_{use}" for use in ("free", "idle", "stuck", "lost")}},
    "device_slots": {"all": "device_slots", "free": "device_slots_free", "idle": "device_slots_idle"},
}

Sample = tuple[tuple[str, ...], float]


class SnapshotCollector(Collector):
    """Renders the last published numbers; reads nothing that the loop still changes."""

    def __init__(self, snapshot: Snapshot, events: EventCounts) -> None:
        self._snapshot, self._events = snapshot, events

    def collect(self) -> Iterator[Metric]:
        totals, computed = self._snapshot.published.totals, self._computed()
        engines = self._engines()
        for name, (kind, meaning, labels, of) in CATALOGUE.items():
            if kind == "histogram":
                yield _rendered(name, meaning, labels, _histograms(totals, name, of))
                continue
            if name in computed:
                samples = computed[name]
            elif kind == "counter":
                samples = _counted(_field(totals, name, of or name), labels, name)
            else:
                uses = USES.get(name, {"": of or name})
                samples = [
                    ((engine, use) if use else (engine,), numbers[key])
                    for engine, numbers in engines.items()
                    for use, key in uses.items()
                ]
            family = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(
                PREFIX + name, meaning, labels=labels
            )
            for values, value in samples:
                family.add_metric(values, value)
            yield family

    def _engines(self) -> dict[str, Counter[str]]:
        """Return the numbers of each engine id: those of two engines with one id are added, for one series."""
        engines: dict[str, Counter[str]] = {}
        for engine in self._snapshot.published.engines:
            numbers = {name: value for name, value in engine.items() if isinstance(value, int)}
            engines.setdefault(str(engine["engine"]), Counter()).update(numbers)
        return engines

    def _computed(self) -> dict[str, Iterable[Sample]]:
        published, health = self._snapshot.published, judge(self._snapshot)
        return {
            "log_lost_lines": [((), self._snapshot.lost_lines)],
            "events": [((event,), count) for event, count in self._events.counts.items()],
            "engines": [((), len(published.engines))],
            "store_open": [((), published.store_open)],
            "store_answering": [((), published.store_answering)],
            "disk_writable": [((), not self._snapshot.disk_fault())],
            "ready": [((), health.ready)],
            "loop_age_seconds": [((), health.loop_age_s)],
            "call_age_seconds": [((call,), age_s) for call, age_s in health.call_age_s.items()],
            "info": [((__version__,), 1)],
            "rate_bytes": [
                ((path, window), rate) for path, known in published.rates.items() for window, rate in known.items()
            ],
            "engine_info": [(labels, 1) for labels in sorted({_info(each) for each in published.engines})],
            **_fill(self._snapshot.fill()),
        }


def _field(totals: Counters, name: str, field: str) -> Any:
    try:
        return getattr(totals, field)
    except AttributeError:
        raise LookupError(
            f"metric {name} has no value: add the field {field} to Counters, name another one with of=, or compute it "
            "in _computed (CONTRIBUTING.md, “Add a metric”)"
        ) from None


def _info(engine: Mapping[str, int | str]) -> tuple[str, ...]:
    return tuple(str(engine.get(name, "")) for name in CATALOGUE["engine_info"].labels)


def _counted(value: float | Counter[str], labels: Sequence[str], name: str) -> list[Sample]:
    if not isinstance(value, Counter):
        return [((), value)]
    values = ("staging", *MEDIA) if name == "hit_blocks" else _VALUES[labels[0]]
    return [((each,), value[each]) for each in values]


def _fill(fill: StoreFill | None) -> dict[str, list[Sample]]:
    """Return the embedded store's samples; none while unknown, and none of a disk without one."""
    names = ("store_used_bytes", "store_capacity_bytes", "memory_evicted_bytes", "disk_evictions")
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    if fill is not None:
        samples["store_used_bytes"].append((("memory",), fill.memory_used_bytes))
        samples["store_capacity_bytes"].append((("memory",), fill.memory_bytes))
        samples["memory_evicted_bytes"].append(((), fill.memory_evicted_bytes))
        if fill.disk_bytes:
            samples["store_used_bytes"].append((("disk",), fill.disk_used_bytes))
            samples["store_capacity_bytes"].append((("disk",), fill.disk_bytes))
            samples["disk_evictions"].append(((), fill.disk_evictions))
    return samples


def _histograms(totals: Counters, name: str, of: str) -> dict[tuple[str, ...], Histogram]:
    if not of:
        return {("memory",): totals.fetch_memory, ("disk",): totals.fetch_disk}
    value = _field(totals, name, of)
    return {(name,): each for name, each in value.items()} if isinstance(value, dict) else {(): value}


def _rendered(
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
