"""The worker side: copies between staging slots and this rank's paged KV cache, and reports what was copied."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .keys import RankKeys
from .link import Link
from .metadata import KVPrefetchMetadata, KVPrefetchWorkerMeta
from .paged import PagedCache
from .session import WorkerSession
from .stats import Tally

log = logging.getLogger("vllm.kvprefetch.worker")


@dataclass
class _Batch:
    """Copies that are done when `fence` says so (None: already)."""

    fence: Any
    loads: list[int] = field(default_factory=list)
    saves: list[int] = field(default_factory=list)
    failed_saves: list[int] = field(default_factory=list)
    failed_loads: list[int] = field(default_factory=list)
    received: list[str] = field(default_factory=list)


class WorkerSide:
    """One rank. vLLM calls it on the worker's main thread only."""

    def __init__(self, link: Link[WorkerSession], paged: PagedCache, keys: RankKeys) -> None:
        self._link, self._paged, self._keys = link, paged, keys
        self._running: list[_Batch] = []
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._report = KVPrefetchWorkerMeta()
        self._counters: Counter[str] = Counter()
        self.tally = Tally(self._counters)

    def load(self, meta: KVPrefetchMetadata) -> None:
        """Do this step's loads: before the forward for synchronous ones, after its launch otherwise."""
        self._link.keep(meta.live_epochs)
        orders, meta.loads = meta.loads, []  # the metadata may be shown again in the same step
        if not orders:
            return
        batch = _Batch(None)
        begun = time.perf_counter_ns()
        for order in orders:
            try:
                session = self._link.mapped(order.epoch)
                if session is None:
                    raise LookupError(f"epoch is not mapped: epoch={order.epoch}")
                self._paged.load(session.rows, order.slots, order.block_ids)
                self._counters["load_bytes"] += len(order.slots) * self._paged.block_bytes
            except Exception as error:
                # The scheduler side answers only for mapped, verified blocks, so this is a bug or a broken machine.
                log.error("kvprefetch: load failed: request=%s: %s", order.request_id, error)
                self._failed_blocks.update(order.block_ids)
                batch.failed_loads.append(order.load_id)
            batch.loads.append(order.load_id)
            if order.asynchronous:
                batch.received.append(order.request_id)
        self._counters["load_ns"] += time.perf_counter_ns() - begun
        batch.fence = self._paged.fence()
        self._running.append(batch)

    def save(self, meta: KVPrefetchMetadata) -> None:
        """Queue this step's saves behind its forward; of what other ranks hold too, this rank's share."""
        orders, meta.saves = meta.saves, []
        if not orders:
            return
        batch = _Batch(None)
        begun = time.perf_counter_ns()
        for order in orders:
            batch.saves.append(order.save_id)
            try:
                session = self._link.mapped(order.epoch)
                if session is None:
                    batch.failed_saves.append(order.save_id)
                    continue
                mine = [i for i, slot in enumerate(order.slots) if self._keys.saves(slot)]
                if mine:
                    slots, block_ids = [order.slots[i] for i in mine], [order.block_ids[i] for i in mine]
                    self._paged.save(session.rows, slots, block_ids)
                    self._counters["save_bytes"] += len(mine) * self._paged.block_bytes
            except Exception as error:
                # Reported, so that the bytes in the slots are never put.
                log.error("kvprefetch: save failed: blocks=%d: %s", len(order.block_ids), error)
                batch.failed_saves.append(order.save_id)
        self._counters["save_ns"] += time.perf_counter_ns() - begun
        batch.fence = self._paged.fence()
        self._running.append(batch)

    def received(self) -> set[str]:
        """Requests whose asynchronous load ended since the last call, each exactly once."""
        self._collect()
        received, self._received = self._received, set()
        return received

    def failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> KVPrefetchWorkerMeta | None:
        """Loads and saves that ended since the last call."""
        self._collect()
        report, self._report = self._report, KVPrefetchWorkerMeta()
        return report if report.loads or report.saves else None

    def _collect(self) -> None:
        while self._running and (self._running[0].fence is None or self._running[0].fence.query()):
            batch = self._running.pop(0)
            self._report.loads.update(dict.fromkeys(batch.loads, 1))
            self._report.saves.update(dict.fromkeys(batch.saves, 1))
            self._report.failed_saves.update(batch.failed_saves)
            self._report.failed_loads.update(batch.failed_loads)
            self._received.update(batch.received)
