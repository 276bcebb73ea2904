"""The main loop's view for other threads, and the verdict on it: is the daemon well?

The loop writes, the threads of the metrics server read.  Published data never changes, so no thread waits;
when the loop hangs, the last view stays and `beat_ns` says how old it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..store.fill import StoreFill
from .counters import Counters

PUBLISH_NS = 1_000_000_000
LOST_NS = 60_000_000_000  # for so long a lost line of the log is a problem
LOOP_READY_S, LOOP_HEALTHY_S = 2.0, 10.0
# A question to the master, whose own bound is `rpc_timeout_ms` of at most 60 s; an older one will not come back.
CALL_READY_S, CALL_HEALTHY_S = 10.0, 90.0


@dataclass(frozen=True)
class Published:
    """One second's view: each attached engine's gauges and counters, and the totals since the daemon started."""

    engines: list[dict[str, int | str]] = field(default_factory=list)
    totals: Counters = field(default_factory=Counters)
    store_open: bool = False
    store_answering: bool = False
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # bytes per second, by path and window


class Snapshot:
    """Phases are `starting`, `serving` and `stopping`."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock_ns = clock_ns
        self.phase = "starting"
        self.started_ns = self.beat_ns = clock_ns()
        self.published = Published()
        self.lost_lines = 0  # of the log
        self._lost_ns = -LOST_NS  # when the last one was lost
        # These answer at any time, on any thread.
        self.running: Callable[[], Mapping[str, int]] = dict  # start of the oldest store call of each kind, ns
        self.disk_fault: Callable[[], str] = str  # why nothing can be kept on disk, or nothing
        self.lease_fault: Callable[[], str] = str  # that `lease_ms` is not the master's, or nothing
        self.fill: Callable[[], StoreFill | None] = lambda: None  # how full the embedded store is
        self.fill_earlier: Callable[[], StoreFill | None] = lambda: None
        self._retired = Counters()
        self._published_ns = 0

    def note_lost(self, lines: int, now_ns: int) -> None:
        """Enter how many lines of the log were lost since the start."""
        if lines > self.lost_lines:
            self.lost_lines, self._lost_ns = lines, now_ns

    @property
    def log_fault(self) -> str:
        """That lines of the log were lost within LOST_NS, or nothing."""
        if self.clock_ns() - self._lost_ns >= LOST_NS:
            return ""
        return (
            f"lines of the log are lost: nobody reads it, or its disk stands still or is full: lines={self.lost_lines}"
        )

    def retire(self, counters: Counters) -> None:
        """Keep the numbers of an engine that is gone in the totals."""
        self._retired.add(counters)

    def tick(self, now_ns: int) -> bool:
        """Note that the loop lives; return True once a second: publish now."""
        self.beat_ns = now_ns
        return now_ns - self._published_ns >= PUBLISH_NS

    def publish(
        self,
        now_ns: int,
        engines: list[dict[str, int | str]],
        counters: Iterable[Counters],
        store_open: bool,
        store_answering: bool = True,
        rates: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        """Publish the gauges of `engines`, and the `counters` of each epoch that is not retired, ended or not."""
        self._published_ns = now_ns
        totals = Counters()
        for each in (self._retired, *counters):
            totals.add(each)
        self.published = Published(engines, totals, store_open, store_answering, rates)


@dataclass(frozen=True)
class Health:
    """Ages in seconds; each line of `problems` names an age above its bound, or a fault."""

    phase: str
    ready: bool
    healthy: bool
    loop_age_s: float
    call_age_s: Mapping[str, float]
    store_open: bool
    problems: tuple[str, ...]


def judge(snapshot: Snapshot) -> Health:
    """Judge by what a restart mends: the loop's heartbeat, and questions to the master. Any thread may ask.

    Ready: engines may count on the daemon now.  Healthy: it may recover by itself; otherwise only a restart helps.
    Other calls may take long in a daemon that works: transfers of a node that trickles, a purge, the reservation of
    much staging, a GPU's.  No request waits for one beyond its deadline, and a restart would make none faster.  A disk
    that keeps nothing, and a log that loses lines, are listed as problems, and the daemon serves on.
    """
    published, now = snapshot.published, snapshot.clock_ns()
    loop_age_s = max(0, now - snapshot.beat_ns) / 1e9
    call_age_s = {kind: max(0, now - since) / 1e9 for kind, since in snapshot.running().items()}
    asked_s = call_age_s.get("look_up", 0.0)
    serving = snapshot.phase == "serving"
    problems = []
    if not serving:
        problems.append(snapshot.phase)
    elif loop_age_s > LOOP_READY_S:
        problems.append(
            f"the main loop hangs: loop_age_s={loop_age_s:.1f} ready<={LOOP_READY_S} alive<={LOOP_HEALTHY_S}"
        )
    if asked_s > CALL_READY_S:
        problems.append(
            f"a question to the master does not come back: age_s={asked_s:.1f} ready<={CALL_READY_S} "
            f"alive<={CALL_HEALTHY_S}"
        )
    if serving and not published.store_open:
        problems.append("the store is not open: everything is a miss")
    elif serving and not published.store_answering:
        problems.append("the store does not answer: new requests are misses")
    healthy = asked_s <= CALL_HEALTHY_S and (not serving or loop_age_s <= LOOP_HEALTHY_S)
    ready = not problems
    problems += filter(None, (snapshot.disk_fault(), snapshot.lease_fault(), snapshot.log_fault))
    return Health(snapshot.phase, ready, healthy, loop_age_s, call_age_s, published.store_open, tuple(problems))
