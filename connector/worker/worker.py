"""The worker side: copy between staging slots and this rank's paged KV cache, and report the ends of copies."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..attach.epoch import WorkerEpoch
from ..attach.link import Link
from ..copy.paged import PagedCache
from ..identity.namespace import RankKeys
from ..identity.updates import Updates
from ..words.metadata import KVPrefetchMetadata, KVPrefetchWorkerMeta, LoadOrder
from ..words.stats import Tally
from .adapter_reads import AdapterReads
from .copies import Copy, PlainCopies, checked

log = logging.getLogger("vllm.kvprefetch.worker")


@dataclass
class _Batch:
    """Copies that are done when `fence` says so (None: already); until then their memory stays mapped.

    `report` and `received` are told then.
    """

    report: KVPrefetchWorkerMeta
    received: list[str] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    fence: Any = None


class WorkerSide:
    """One rank. vLLM calls it on the worker's main thread only. `updates`: of its weights.

    `counted`: there is something new in `counters`.  `failed`: a load did, some time.
    """

    def __init__(
        self, link: Link[WorkerEpoch], paged: PagedCache, keys: RankKeys, copies: PlainCopies, *, one_table: bool
    ) -> None:
        self.link, self.paged, self.keys, self.copies = link, paged, keys, copies
        self.adapters: AdapterReads | None = None
        self._one_table = one_table
        self._running: list[_Batch] = []
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._report = KVPrefetchWorkerMeta()
        self.counters, self.counted, self.failed = Tally(), False, False
        self.updates, self.rank = Updates(), 0

    def step_begins(self, meta: KVPrefetchMetadata) -> None:
        """Nothing of this step is queued on the compute stream yet."""
        self.updates.step_begins(meta.weights, loads=bool(meta.loads))
        if any(order.asynchronous for order in meta.loads):
            self.copies.mark()

    def load(self, meta: KVPrefetchMetadata) -> None:
        """Do this step's loads: before the forward for synchronous ones, after its launch otherwise."""
        self.link.keep(meta.live_epochs)
        orders, meta.loads = meta.loads, []  # the metadata may be shown again in the same step
        for asynchronous in (False, True):
            if chosen := [order for order in orders if order.asynchronous is asynchronous]:
                hold, overlap = self.updates.hold(meta.weights), meta.overlap and not asynchronous
                self._load(chosen, asynchronous, hold=hold, overlap=overlap and not self._being_saved(chosen))

    def _being_saved(self, orders: list[LoadOrder]) -> bool:
        """Whether a save of an earlier step may still read any of these blocks, which vLLM gave to another request."""
        saves = [
            each for each in self._running if each.report.saves and each.fence is not None and not each.fence.query()
        ]
        read = {block for batch in saves for copy in batch.copies for block in copy.block_ids}
        return bool(read) and not all(read.isdisjoint(order.block_ids) for order in orders)

    def _load(self, orders: list[LoadOrder], asynchronous: bool, *, hold: bool, overlap: bool) -> None:
        batch = _Batch(KVPrefetchWorkerMeta(loads=dict.fromkeys([order.load_id for order in orders], 1)))
        if asynchronous:
            batch.received = [order.request_id for order in orders]
        begun = time.perf_counter_ns()
        good: list[LoadOrder] = []
        for order in orders:
            try:
                if not (hold and self._holds(order)):  # the scheduler side did not know that they changed
                    self._load_failed(batch, order)
                    continue
                if (epoch := self.link.mapped(order.epoch)) is None:
                    raise LookupError(f"epoch is not mapped: epoch={order.epoch}")
                if not order.slots:
                    raise ValueError("the engine's blocks are not those that the groups' rules name")
                batch.copies.append(checked(self.paged, epoch, order.slots, order.block_ids))
                good.append(order)
            except Exception as error:
                self._load_failed(batch, order, error)
        try:
            if good:
                batch.fence = self.copies.run(batch.copies, beside=asynchronous, overlap=overlap)
                self._count_loads(batch.copies)
        except Exception as error:
            for order in good:
                self._load_failed(batch, order, error)
        self.counters["load_ns"] += time.perf_counter_ns() - begun
        self.counted = True
        self._running.append(batch)

    def _holds(self, order: LoadOrder) -> bool:
        """Whether this rank's adapter is the one whose KV was found; for a load beside the step, and in memory."""
        if order.adapter is None:
            return True
        return self.adapters is not None and self.adapters.has(*order.adapter, loaded=order.asynchronous)

    def _load_failed(self, batch: _Batch, order: LoadOrder, error: Exception | None = None) -> None:
        if error is not None:
            # A bug or a broken machine: the scheduler side answers only for mapped, verified blocks.
            log.error("kvprefetch: load failed: request=%s: %s", order.request_id, error)
        if self._one_table:
            self._failed_blocks.update(order.block_ids)
        else:  # vLLM cannot tell blocks of several groups apart; all of their loads are asynchronous
            self._failed_requests.add(order.request_id)
        batch.report.failed_loads.add(order.load_id)
        self.failed = True

    def _count_loads(self, copies: list[Copy]) -> None:
        for epoch, slots, _ in copies:
            self.counters["load_bytes"] += len(slots) * self.paged.block_bytes
            if epoch.device_cache is not None and epoch.device_cache.slots:
                device = int(np.count_nonzero(np.asarray(slots) >= len(epoch.rows)))
                self.counters["load_device_bytes"] += device * self.paged.block_bytes

    def save(self, meta: KVPrefetchMetadata) -> None:
        """Queue this step's saves behind its forward: this rank's share of blocks that other ranks hold, too."""
        orders, meta.saves = meta.saves, []
        if not orders:
            return
        batch = _Batch(KVPrefetchWorkerMeta(saves=dict.fromkeys([order.save_id for order in orders], 1)))
        begun, hold, keys = time.perf_counter_ns(), self.updates.hold(meta.weights), self.keys
        for order in orders:
            try:
                epoch = self.link.mapped(order.epoch)
                if epoch is None or not hold:
                    batch.report.failed_saves.add(order.save_id)
                    continue
                mine = [i for i, slot in enumerate(order.slots) if slot % keys.replicas == keys.replica_index]
                slots, block_ids = [order.slots[i] for i in mine], [order.block_ids[i] for i in mine]
                copy = checked(self.paged, epoch, slots, block_ids, save=True)
                if mine:
                    batch.copies.append(copy)
            except Exception as error:
                # Reported, so that the bytes in the slots are never put.
                log.error("kvprefetch: save failed: blocks=%d: %s", len(order.block_ids), error)
                batch.report.failed_saves.add(order.save_id)
        try:
            if batch.copies:
                batch.fence = self.copies.run(batch.copies, save=True)
                self.counters["save_bytes"] += sum(len(copy.slots) for copy in batch.copies) * self.paged.block_bytes
        except Exception as error:
            log.error("kvprefetch: saves failed: saves=%d: %s", len(orders), error)
            batch.report.failed_saves.update(batch.report.saves)
        self.counters["save_ns"] += time.perf_counter_ns() - begun
        self.counted = True
        self._running.append(batch)

    def received(self) -> set[str]:
        """Requests with an asynchronous load that ended since the last call, each exactly once."""
        if self._running:
            self._collect()
        received, self._received = self._received, set()
        return received

    def failed_requests(self) -> set[str]:
        """Requests whose asynchronous load failed, and ended, since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> KVPrefetchWorkerMeta | None:
        """Loads and saves that ended since the last call, and what is new of weights and adapters."""
        if self._running:
            self._collect()
        report, self._report = self._report, KVPrefetchWorkerMeta()
        if self.updates.report is not None:
            report.weights[self.rank], self.updates.report = self.updates.report, None
        if self.adapters is not None and (reads := self.adapters.take()):
            report.adapters[self.rank] = reads
        return report if report.loads or report.saves or report.weights or report.adapters else None

    def _collect(self) -> None:
        """Asynchronous loads run beside the rest, so batches may end in any order."""
        running, self._running = self._running, []
        for batch in running:
            if batch.fence is not None and not batch.fence.query():
                self._running.append(batch)
                continue
            self._report = self._report.aggregate(batch.report)
            self._received.update(batch.received)
