"""The Prometheus metrics: their catalogue, and prometheus_client's objects for them, which are the book of record.

docs/METRICS.md, the dashboard and the alert rules are tested against the catalogue; CONTRIBUTING.md has the steps to
add one.
"""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from kvprefetch import __version__

from ...shmring.wire.admin import ENDS
from ..store.fill import StoreFill
from .events import EVENTS, Ending
from .health import DaemonHealth

PREFIX = "kvprefetchd_"
MEDIA = ("memory", "disk")
# Results of a block that is announced, as AnnounceStep names them, and the last outcomes of an announcement.
ANNOUNCED_RESULTS = ("staged", "fetched", "absent", "no_room", "failed")
OTHER = "other"
WAITED = (*(each.value for each in (Ending.LOADED, Ending.TIMED_OUT, Ending.RECOMPUTED, Ending.MISS)), OTHER)
# Upper bounds in seconds: fast ones for shared memory, slow ones for the network and disks.
FAST_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 0.01, 0.05, 0.25, 1.0)
SLOW_S = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Described(NamedTuple):
    """One metric: `counter`, `gauge` or `histogram`. Counters are exported with `_total` at the end of their name.

    `values`: all that the one label of a counter or histogram can be, where _VALUES has others.  `of` names the number
    of an engine that a gauge shows, where its name differs.
    """

    kind: str
    meaning: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    of: str = ""
    buckets: tuple[float, ...] = SLOW_S


_counter, _gauge, _histogram = (partial(Described, kind) for kind in ("counter", "gauge", "histogram"))
_MEDIUM, _ENGINE, _ENGINE_USE = ("medium",), ("engine",), ("engine", "use")

CATALOGUE: dict[str, Described] = {
    "hints": _counter("Hints read from the rings"),
    "hints_dropped": _counter("Hints that found the engine's ring or flags full"),
    "bad_records": _counter("Hint-ring records that were skipped"),
    "requests": _counter("Hinted requests that ended, by outcome (docs/EVENTS.md)", ("outcome",)),
    "requests_taken_back": _counter("Of these, those that lost staged blocks to more urgent requests meanwhile"),
    "hit_blocks": _counter(
        "Blocks beyond the local ones that were there, by medium; staging: fetched before",
        _MEDIUM,
        values=("staging", *MEDIA),
    ),
    "miss_blocks": _counter("Blocks of looked-up requests that were neither local nor in the store"),
    "loaded_blocks": _counter("Blocks that engines copied out of staging"),
    "failed_blocks": _counter("Blocks that the store had and that could not be fetched", _MEDIUM),
    "fetched_bytes": _counter("Bytes fetched from the store, by medium", _MEDIUM),
    "wasted_bytes": _counter(
        "Of these, bytes that no request loaded before their slot was reused or their engine left", _MEDIUM
    ),
    "announcements": _counter(
        "Prompts announced before their requests, by their last outcome; expired: no request came",
        ("outcome",),
        values=ENDS,
    ),
    "announced_blocks": _counter("Blocks of announced prompts, by result", ("result",)),
    "kept_blocks": _counter("Blocks that sessions or engines hold, which the store was asked for to keep their leases"),
    "transfer_seconds": _counter("Sum over all requests that fetched of their look-up and transfer"),
    "hidden_seconds": _counter("Of these, the part that made no scheduler wait"),
    "saved_blocks": _counter("Blocks put into the store"),
    "present_blocks": _counter("Blocks that were to be saved and were in the store already"),
    "failed_saves": _counter("Blocks that were to be saved and were not"),
    "kept_bytes": _counter("Bytes of staging that never return: their epoch had quarantined slots"),
    "promoted_blocks": _counter("Staged blocks copied to device memory"),
    "device_blocks": _counter("Of the loaded blocks, those that engines loaded from device memory"),
    "memory_evicted_bytes": _counter("Bytes evicted from the embedded store's memory; their copies on disk stay"),
    "disk_evictions": _counter("How often the embedded store's disk made room, each time by one value or more"),
    "events": _counter("Log events of level warning and error, those held back included", ("event",)),
    "log_dropped_lines": _counter("Lines of the log that were not written: nobody read them, or a disk stood still"),
    "push_to_seen_seconds": _histogram("From the engine's push of a hint until the daemon read it", buckets=FAST_S),
    "early_seconds": _histogram("From an early hint until the scheduler had its request"),
    "look_up_seconds": _histogram("From the hint read until the store answered the look-up"),
    "fetch_seconds": _histogram("From a fetch order to its result", _MEDIUM),
    "exposed_wait_seconds": _histogram(
        "How long the scheduler waited for requests, its turns with others excluded", ("outcome",), values=WAITED
    ),
    "ready_to_seen_seconds": _histogram(
        "How long requests waited after their answer came, until the engine's step ended"
    ),
    "engines": _gauge("Attached engines"),
    "staging_slots": _gauge(
        "Staging slots: free, idle (staged, held by nobody), pinned (by requests), stuck (a call may still write), "
        "quarantined (Mooncake gave a fetch up that may still write; never used again)",
        _ENGINE_USE,
    ),
    "unused_blocks": _gauge(
        "Of the idle slots, those whose block no request loaded yet; announced ones aside", _ENGINE, of="slots_unused"
    ),
    "announcements_open": _gauge("Announced prompts whose request may still come", _ENGINE),
    "blocks_ahead": _gauge("Blocks fetched for announced prompts, or to be fetched", _ENGINE),
    "sessions": _gauge("Sessions whose newest prompt is known", _ENGINE),
    "device_slots": _gauge("Slots in device memory: free, all (those with a block's copy included)", _ENGINE_USE),
    "pending_requests": _gauge("Hinted requests that have not ended", _ENGINE, of="requests"),
    "leases": _gauge("Blocks that wait for their fetch; the store keeps them until then", _ENGINE),
    "fetch_orders": _gauge("Fetches in flight or waiting for a thread", _ENGINE, of="orders"),
    "save_slots": _gauge("Staging slots kept for saves", _ENGINE),
    "save_slots_busy": _gauge("Of these, with the saver", _ENGINE),
    "save_slots_quarantined": _gauge(
        "Of these, never used again: Mooncake gave a put up that may still read them", _ENGINE
    ),
    "saves_queued": _gauge("Saves running or waiting", _ENGINE),
    "store_open": _gauge("1 when the store can be used"),
    "store_answering": _gauge("0 while the store is left alone, because whole calls failed"),
    "store_used_bytes": _gauge("Bytes of values in the embedded store; no series where not known", _MEDIUM),
    "store_capacity_bytes": _gauge("Bytes that it has room for", _MEDIUM),
    "disk_writable": _gauge("0 when nothing can be kept on disk; 1 also without a disk"),
    "ready": _gauge("1 when /readyz says so"),
    "loop_age_seconds": _gauge("Since the main loop's last heartbeat; up to half a second when it is well"),
    "call_age_seconds": _gauge(
        "Age of the oldest store call in flight, or GPU call (`copy`); no series without one", ("call",)
    ),
    "rate_bytes_per_second": _gauge(
        "Bytes per second while fetches from a medium, or puts (`save`), ran: the median of slices of 5 s in a window; "
        "`now`: the last slice, while it is of the last ten seconds",
        ("path", "window"),
    ),
    "engine_info": _gauge("Always 1, for each attached engine", ("engine", "model", "pid", "uid", "mode")),
    "engine_age_seconds": _gauge("Since the engine attached", _ENGINE, of="age_s"),
    "info": _gauge("Always 1", ("version",)),
}

# Every value of a label that can come is there from the start: a rate over the first one needs the zero before it.
_VALUES = {
    "outcome": tuple(ending.value for ending in Ending),
    "medium": MEDIA,
    "result": ANNOUNCED_RESULTS,
    "event": tuple(name for name, level in EVENTS.items() if level in ("warning", "error")),
}
# Names of the release before, exported for one release longer.
FORMER = {
    "lost_saves_total": "failed_saves_total",
    "log_lost_lines_total": "log_dropped_lines_total",
    "save_slots_lost": "save_slots_quarantined",
}
USES = {  # the number of an engine for each `use`
    "staging_slots": {
        "pinned": "blocks_pinned",
        **{use: f"slots_{use}" for use in ("free", "idle", "stuck", "quarantined")},
    },
    "device_slots": {"all": "device_slots", "free": "device_slots_free"},
}
Labels = tuple[str, ...]


class Metrics:
    """One daemon's metrics. Any thread may call; no call waits for another one's text.

    `made`: prometheus_client's objects, by name.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.made: dict[str, Any] = {name: self._make(name, described) for name, described in CATALOGUE.items()}
        self._shown: dict[str, Mapping[Labels, float]] = {}
        self._reached: dict[str, float] = {}
        self.show("info", {(__version__,): 1})
        ProcessCollector(registry=self._registry)

    def _make(self, name: str, described: Described) -> Any:
        kind, meaning, labels, values, _, buckets = described
        makers: dict[str, Callable[..., Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        more = {"buckets": buckets} if kind == "histogram" else {}
        made = makers[kind](PREFIX + name, meaning, labels, registry=self._registry, **more)
        for value in (values or _VALUES[labels[0]]) if labels and kind != "gauge" else ():
            made.labels(value)
        return made

    def add(self, name: str, count: float = 1, *label: str) -> None:
        """Count, with the value of the counter's label where it has one; what is not above zero counts nothing."""
        if count > 0:
            (self.made[name].labels(*label) if label else self.made[name]).inc(count)

    def reach_all(self, totals: Mapping[str, float]) -> None:
        """Count up to totals that other parts keep; one that began anew counts from where it is."""
        for name, total in totals.items():
            grown, self._reached[name] = total - self._reached.get(name, 0), total
            if grown > 0:
                self.add(name, grown)

    def show(self, name: str, samples: Mapping[Labels, float]) -> None:
        """Let a gauge have these samples, by the values of its labels, and no others."""
        gauge, before = self.made[name], self._shown.get(name, {})
        for labels, value in samples.items():
            (gauge.labels(*labels) if labels else gauge).set(value)
        for labels in before.keys() - samples.keys():
            gauge.remove(*labels)
        self._shown[name] = samples

    def show_all(self, gauges: Mapping[str, Mapping[Labels, float]]) -> None:
        """Show those of these gauges that have changed."""
        for name, samples in gauges.items():
            if samples != self._shown.get(name, {}):
                self.show(name, samples)

    def show_engines(self, engines: Iterable[Mapping[str, int | str]]) -> None:
        """Show the numbers of the attached engines: those of two with one id are added, for one series."""
        sums: dict[str, Sums[str]] = {}
        gauges: dict[str, Mapping[Labels, float]] = {}
        infos: dict[Labels, float] = {}
        for engine in engines:
            numbers = {name: value for name, value in engine.items() if isinstance(value, int)}
            sums.setdefault(str(engine["engine"]), Sums()).update(numbers)
            infos[tuple(str(engine.get(name, "")) for name in CATALOGUE["engine_info"].labels)] = 1
        for name, described in CATALOGUE.items():
            if described.labels[:1] == _ENGINE and name != "engine_info":
                uses = USES.get(name, {"": described.of or name})
                gauges[name] = {
                    ((engine, use) if use else (engine,)): float(numbers[key])
                    for engine, numbers in sums.items()
                    for use, key in uses.items()
                }
        self.show_all({**gauges, "engine_info": infos})

    def show_fill(self, fill: StoreFill | None) -> None:
        """Show how full the embedded store is; no series while unknown, and none of a disk without one."""
        used: dict[Labels, float] = {}
        room: dict[Labels, float] = {}
        if fill is not None:
            used["memory",], room["memory",] = fill.memory_used_bytes, fill.memory_bytes
            if fill.disk_bytes:
                used["disk",], room["disk",] = fill.disk_used_bytes, fill.disk_bytes
            self.reach_all({"memory_evicted_bytes": fill.memory_evicted_bytes, "disk_evictions": fill.disk_evictions})
        self.show_all({"store_used_bytes": used, "store_capacity_bytes": room})

    def show_health(self, health: DaemonHealth) -> None:
        """Show what changes without the main loop, from the thread that serves the text."""
        ages: dict[Labels, float] = {(call,): age_s for call, age_s in health.call_age_s.items()}
        self.show_all(
            {"ready": {(): health.ready}, "loop_age_seconds": {(): health.loop_age_s}, "call_age_seconds": ages}
        )

    def totals(self, name: str) -> dict[str, float]:
        """Return a counter's value by the value of its label, or by ""."""
        label = CATALOGUE[name].labels
        samples = (sample for family in self.made[name].collect() for sample in family.samples)
        return {sample.labels[label[0]] if label else "": sample.value for sample in samples}

    def text(self) -> bytes:
        """Return the exposition, in Prometheus' text format. Former names of metrics follow, untyped."""
        text = prometheus_client.generate_latest(self._registry).decode()
        former = [
            line.replace(name, former, 1)
            for former, name in FORMER.items()
            for line in text.splitlines(keepends=True)
            if line.startswith(PREFIX + name)
        ]
        return "".join([text, *former]).encode()
