"""The main loop's view for other threads: gauges once a second, the heartbeat, and the totals of engines gone.

The loop writes, the threads of the metrics server read.  Published data never changes, so no thread waits;
when the loop hangs, the last view stays and `beat_ns` says how old it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ..store.fill import StoreFill
from .counters import Counters

PUBLISH_NS = 1_000_000_000


@dataclass(frozen=True)
class Published:
    """One second's view: each attached engine's gauges and counters, and the totals since the daemon started."""

    engines: list[dict[str, int | str]] = field(default_factory=list)
    totals: Counters = field(default_factory=Counters)
    store_open: bool = False
    store_answering: bool = False


class Snapshot:
    """Phases are `starting`, `serving` and `stopping`."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock_ns = clock_ns
        self.phase = "starting"
        self.started_ns = self.beat_ns = clock_ns()
        self.published = Published()
        self.lost_lines = 0  # of the log
        # These answer at any time, on any thread.
        self.running: Callable[[], Mapping[str, int]] = dict  # start of the oldest store call of each kind, ns
        self.disk_fault: Callable[[], str] = str  # why nothing can be kept on disk, or nothing
        self.fill: Callable[[], StoreFill | None] = lambda: None  # how full the embedded store is
        self.fill_earlier: Callable[[], StoreFill | None] = lambda: None
        self._retired = Counters()
        self._published_ns = 0

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
    ) -> None:
        """Show what `engines` hold; `counters` are those of every epoch that was not retired, ended ones included."""
        self._published_ns = now_ns
        totals = Counters()
        for each in (self._retired, *counters):
            totals.add(each)
        self.published = Published(engines, totals, store_open, store_answering)
