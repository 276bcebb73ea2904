"""Watch one engine from outside and note every broken promise.

It follows each load and save from the step that orders it to the copies on every rank and the report to the scheduler.
Copies are watched where the worker side starts them, which is also where load failures are planted.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.wire.records import FlagState
from tests.scheduler.model import Truth
from tests.scheduler.workers import Workers
from tests.support import scheduler_checks

ON_PURPOSE = "made to fail"  # in the text of errors that are no findings


# A block: its group, and the tokens up to its end.
Content = tuple[int, tuple[int, ...]]


@dataclass
class Load:
    """A dispatched load: the content that its slots must hold, and the ranks that have not copied it yet."""

    order: Any
    handle: Any
    content: list[Content]
    ranks_left: set[int] = field(default_factory=set)


@dataclass
class Save:
    order: Any
    content: list[Content]
    ranks_left: set[int] = field(default_factory=set)


class Oracle:
    """`tokens` maps each block hash that ever existed to the tokens it stands for; `wrong` are findings."""

    def __init__(self, scheduler: Any, side: Any, workers: Workers, truth: Truth, lag: Callable[[], int]) -> None:
        self.wrong: list[str] = []
        self.tokens: dict[bytes, tuple[int, ...]] = {}
        self.fail_next: set[int] = set()
        self.lag = lag
        self.fences: list[_Fence] = []
        self.counts: Counter[str] = Counter()
        self._scheduler, self._side, self._workers, self._truth = scheduler, side, workers, truth
        self.groups = truth.groups
        self._loads: dict[int, Load] = {}
        self._saves: dict[int, Save] = {}
        self._receiving: Counter[str] = Counter()
        self._used: list[tuple[Any, set[int]]] = []
        for rank in workers.ranks:
            worker = rank.connector.worker_side
            worker.copies = _Watched(worker.paged, rank.number, self)

    # --- the scheduler's side ---------------------------------------------------------------------------------------

    def scheduled(self, output: Any) -> None:
        """A step was scheduled: learn which tokens exist, and what is to be loaded and saved."""
        for request in self._scheduler.requests.values():
            tokens = tuple(request.all_token_ids)
            for i, digest in enumerate(request.block_hashes):
                self.tokens.setdefault(bytes(digest), tokens[: (i + 1) * self.groups.hash_tokens])
        scheduler_checks.check(self._side)
        self._overlapping(output)
        everyone = {rank.number for rank in self._workers.ranks}
        for order in output.kv_connector_metadata.loads:
            request = self._scheduler.requests[order.request_id]
            held = self._content(request, order.block_ids, f"load {order.load_id}")
            handle = self._side.loads.running[order.load_id].handle
            self._loads[order.load_id] = Load(order, handle, held, set(everyone))
            if order.asynchronous:
                self._receiving[order.request_id] += 1
                if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                    self.wrong.append(f"asynchronous load of a request that does not wait: {request.status.name}")
            elif not output.has_sync_kv_loads or order.request_id not in output.num_scheduled_tokens:
                self.wrong.append(f"synchronous load outside its step: {order.request_id}")
        for order in output.kv_connector_metadata.saves:
            save = self._side.saves.waiting[order.save_id]
            ranks = {rank for rank in everyone if any(self._share(rank, order.slots))}
            self._saves[order.save_id] = Save(order, self._content_to_save(order, save.names), ranks)

    def _overlapping(self, output: Any) -> None:
        """Loads that may run during a step in flight fill none of its requests' blocks."""
        self._used = [used for used in self._used if any(step.output is used[0] for step in self._workers.steps)]
        if output.kv_connector_metadata.overlap:
            self.counts["overlaps"] += 1
            filled = {block for order in output.kv_connector_metadata.loads for block in order.block_ids}
            if any(filled & blocks for _, blocks in self._used):
                self.wrong.append(f"an overlapping load fills blocks of a step in flight: {sorted(filled)}")
        tables = map(self._scheduler.kv_cache_manager.get_block_ids, output.num_scheduled_tokens)
        self._used.append((output, {block for groups in tables for table in groups for block in table}))

    def _content_to_save(self, order: Any, names: Sequence[bytes]) -> list[Content]:
        """The saved blocks by their names, which must be hashes of tokens that exist."""
        found = []
        for block_id, name in zip(order.block_ids, names, strict=True):
            group, tokens = name[-1], self.tokens.get(name[:-1], ())
            if not tokens or len(tokens) % self.groups.groups[group].block_tokens:
                self.wrong.append(f"save {order.save_id}: block {block_id} before its tokens exist")
            found.append((group, tokens))
        return found

    def _content(self, request: Any, block_ids: Sequence[int], what: str) -> list[Content]:
        """What belongs into the blocks, by the engine's tables; each must be full of tokens that exist now."""
        tables = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        where = {block: (group, at) for group, table in enumerate(tables) for at, block in enumerate(table) if block}
        existing = tuple(request.all_token_ids)
        found = []
        for block_id in block_ids:
            group, at = where[block_id]
            stop = (at + 1) * self.groups.groups[group].block_tokens
            if stop > len(existing):
                self.wrong.append(f"{what}: block before its tokens exist: {stop} of {len(existing)}")
            found.append((group, existing[:stop]))
        return found

    def reported(self, output: Any) -> None:
        """Check the report of all ranks before the scheduler sees it."""
        for request_id in output.finished_recving or ():
            self._receiving[request_id] -= 1
            if self._receiving[request_id] < 0:
                self.wrong.append(f"finished_recving without an asynchronous load, or twice: {request_id}")
            request = self._scheduler.requests.get(request_id)
            if request is None or not (request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished()):
                self.wrong.append(f"finished_recving of a request that does not wait: {request_id}")
        if (report := output.kv_connector_worker_meta) is not None:  # refused before any byte was copied
            for orders, failed in ((self._loads, report.failed_loads), (self._saves, report.failed_saves)):
                for number in failed:
                    orders[number].ranks_left.clear()  # type: ignore[attr-defined]
        if output.finished_sending:
            self.wrong.append(f"finished_sending: {output.finished_sending}")

    # --- the ranks' side --------------------------------------------------------------------------------------------

    def loading(self, rank: int, slots: Sequence[int], block_ids: Sequence[int]) -> Load | None:
        """A rank starts to copy slots into blocks."""
        found = (one for one in self._loads.values() if rank in one.ranks_left)
        load = next((one for one in found if (one.order.slots, one.order.block_ids) == (slots, block_ids)), None)
        if load is None:
            self.wrong.append(f"rank {rank}: load that was not ordered: slots={slots}")
            return None
        load.ranks_left.discard(rank)
        return load

    def copied(self, load: Load, rank: int, rows: Any) -> None:
        """The copy happens now: the slots must still be held, and hold what a plain run computes."""
        what = f"rank {rank}: load {load.order.load_id}"
        try:
            held = load.handle.look().state == FlagState.CLAIMED
        except SegmentCorrupt:
            held = False
        if not held:
            self.wrong.append(f"{what}: slots given back before they were copied")
        for slot, (group, tokens) in zip(load.order.slots, load.content, strict=True):
            if rows[slot].tobytes() != self._truth.block(self._workers.weights, tokens, rank, group):
                self.wrong.append(f"{what}: slot {slot} holds other bytes: group={group} tokens={len(tokens)}")

    def fails(self, load: Load, rank: int) -> bool:
        """Whether this load was chosen to fail on this rank."""
        if rank not in self.fail_next or not load.order.asynchronous:
            return False
        self.fail_next.discard(rank)
        self.counts["failed_ranks"] += 1
        return True

    def saving(self, rank: int, values: Any, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """A rank took the bytes of blocks for its slots: they must be what a plain run computes for their tokens."""
        for save in self._saves.values():
            mine = self._share(rank, save.order.slots)
            share = [list(itertools.compress(part, mine)) for part in (save.order.slots, save.order.block_ids)]
            if rank in save.ranks_left and share == [slots, block_ids]:
                break
        else:
            self.wrong.append(f"rank {rank}: save that was not ordered: slots={slots}")
            return
        save.ranks_left.discard(rank)
        for value, (group, tokens) in zip(values, itertools.compress(save.content, mine), strict=True):
            if tokens and value.tobytes() != self._truth.block(self._workers.weights, tokens, rank, group):
                what = f"rank {rank}: save {save.order.save_id}"
                self.wrong.append(f"{what}: block is not as computed: group={group} tokens={len(tokens)}")

    def land(self) -> None:
        """All copies queued so far are done, whether their fences were asked or not."""
        for fence in self.fences:
            fence.land()
        self.fences.clear()

    def _share(self, rank: int, slots: Sequence[int]) -> list[bool]:
        """Which of these slots this rank fills, where other ranks hold the same bytes."""
        replicas = self._truth.replicas
        return [slot % replicas == rank % replicas for slot in slots]

    # --- the end ----------------------------------------------------------------------------------------------------

    def left_behind(self) -> list[str]:
        """With no request left."""
        wrong = [f"never reported as received: {name}" for name, count in self._receiving.items() if count]
        for what, orders in (("load", self._loads), ("save", self._saves)):
            wrong += [f"{what} {number}: not done by every rank" for number, one in orders.items() if one.ranks_left]  # type: ignore[attr-defined]
        return wrong + scheduler_checks.held(self._side)


class _Fence:
    """A device's event: it is not done a few times; the copies queued before it land when it first is."""

    def __init__(self, waits: int, copies: list[Callable[[], None]]) -> None:
        self._waits, self._copies = waits, copies

    def query(self) -> bool:
        self._waits -= 1
        if self._waits >= 0:
            return False
        self.land()
        return True

    def land(self) -> None:
        while self._copies:
            self._copies.pop(0)()


class _Watched:
    """A rank's copies with the oracle in front of them, as late as a device's.

    A synchronous load is there before the forward, as the stream orders it.  An asynchronous one, and the bytes of a
    save taken behind the forward, land when the fence of their batch is done.
    """

    def __init__(self, paged: Any, rank: int, oracle: Oracle) -> None:
        self._paged, self._rank, self._oracle = paged, rank, oracle

    def mark(self) -> None: ...

    def run(self, copies: Sequence[Any], *, save: bool = False, beside: bool = False, overlap: bool = False) -> _Fence:
        del overlap  # of blocks that no step in flight uses, so it is as if it came behind that
        queued = self._saves(copies) if save else self._loads(copies)
        if not save and not beside:
            while queued:
                queued.pop(0)()
        self._oracle.fences.append(fence := _Fence(self._oracle.lag(), queued))
        return fence

    def _saves(self, copies: Sequence[Any]) -> list[Callable[[], None]]:
        queued: list[Callable[[], None]] = []
        for epoch, slots, block_ids in copies:
            taken = np.zeros((len(slots), epoch.rows.shape[1]), dtype=epoch.rows.dtype)
            self._paged.save(taken, range(len(slots)), block_ids)
            self._oracle.saving(self._rank, taken, slots, block_ids)
            queued.append(functools.partial(epoch.rows.__setitem__, list(slots), taken))
        return queued

    def _loads(self, copies: Sequence[Any]) -> list[Callable[[], None]]:
        queued: list[Callable[[], None]] = []
        loads = [self._oracle.loading(self._rank, slots, block_ids) for _, slots, block_ids in copies]
        for copy, load in zip(copies, loads, strict=True):
            if load is None:
                continue
            rows = copy.epoch.rows
            if self._oracle.fails(load, self._rank):
                self._load(copy, load)
                # The last block got something else.
                self._paged.load(rows[::-1], copy.slots[-1:], copy.block_ids[-1:])
                raise OSError(ON_PURPOSE)
            queued.append(functools.partial(self._load, copy, load))
        return queued

    def _load(self, copy: Any, load: Load) -> None:
        self._oracle.copied(load, self._rank, copy.epoch.rows)
        self._paged.load(copy.epoch.rows, copy.slots, copy.block_ids)
