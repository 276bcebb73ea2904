"""The worker side: loads and saves between real staging rows and a real paged tensor, and what it reports."""

from __future__ import annotations

import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvprefetch.connector.attach.epoch import WorkerEpoch
from kvprefetch.connector.copy.paged import PagedCache
from kvprefetch.connector.identity.namespace import RankKeys
from kvprefetch.connector.words.metadata import (
    AdapterRead,
    KVPrefetchMetadata,
    KVPrefetchWorkerMeta,
    LoadOrder,
    SaveOrder,
)
from kvprefetch.connector.words.stats import KVPrefetchStats
from kvprefetch.connector.worker.copies import PlainCopies
from kvprefetch.connector.worker.worker import WorkerSide
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.wire.attach import Attached

from .worker_link import FakeWorkerLink

BLOCKS, SLOTS, EPOCH = 6, 4, 77
ONE_GROUP = Groups((Group(Kind.FULL, 16),), 16)
ALONE = RankKeys(("m@tp_rank:0@",), 1, 0)


class Fence:
    """A device's event, done when the test says so."""

    done = False

    def query(self) -> bool:
        return self.done


def make(
    keys: RankKeys = ALONE, groups: Groups = ONE_GROUP
) -> tuple[WorkerSide, torch.Tensor, np.ndarray[Any, Any], PagedCache]:
    cache = torch.zeros(BLOCKS, 1, 2, 8, dtype=torch.uint8)
    paged = PagedCache({"layer": cache}, ["layer"], BLOCKS)
    segment = Segment.create(SLOTS * 16)
    fill = np.frombuffer(segment.buffer, dtype=np.uint8).reshape(SLOTS, 16)
    fill[:] = np.arange(SLOTS)[:, None] + 1
    attached = Attached(epoch=EPOCH, segment_bytes=segment.size_bytes, slot_count=SLOTS, slot_bytes=16)
    epoch = WorkerEpoch(attached, segment)
    side = WorkerSide(FakeWorkerLink(epoch), paged, keys, PlainCopies(paged), one_table=len(groups) == 1)  # type: ignore[arg-type]
    return side, cache, epoch.rows, paged


def load(
    load_id: int = 1, *, asynchronous: bool = False, epoch: int = EPOCH, blocks: tuple[int, ...] = (5, 2)
) -> LoadOrder:
    return LoadOrder(load_id, f"r{load_id}", epoch, asynchronous, list(blocks), [3, 0][: len(blocks)])


def reported(worker: WorkerSide) -> KVPrefetchWorkerMeta:
    report = worker.report()
    assert report is not None
    return report


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_load_fills_its_blocks_and_is_reported_once(asynchronous: bool) -> None:
    """A synchronous load never appears among the received requests: the scheduler asserts that."""
    worker, cache, _, _ = make()
    meta = KVPrefetchMetadata(loads=[load(asynchronous=asynchronous)], live_epochs=(EPOCH,))
    worker.load(pickle.loads(pickle.dumps(meta)))
    assert [int(cache[block].max()) for block in range(BLOCKS)] == [0, 0, 1, 0, 0, 4]
    assert worker.received() == ({"r1"} if asynchronous else set())
    assert worker.received() == set()
    report = reported(worker)
    assert (report.loads, report.saves) == ({1: 1}, {})
    assert worker.report() is None
    assert worker.failed_blocks() == set()
    link: Any = worker.link
    assert link.kept == [(EPOCH,)], "what no step names any more may be unmapped"


def test_bytes_are_counted_and_those_that_came_from_device_memory() -> None:
    """A block has 16 bytes; the device's slots follow the host's."""
    worker, _, rows, _ = make()
    link: Any = worker.link
    epoch = link.epochs[EPOCH] = SimpleNamespace(number=EPOCH, rows=rows, device_cache=None)
    worker.load(KVPrefetchMetadata(loads=[load()]))
    worker.save(KVPrefetchMetadata(saves=[SaveOrder(1, EPOCH, [3], [1])]))
    counted = (worker.counters.take() or KVPrefetchStats()).data
    assert (counted["load_bytes"], counted["save_bytes"]) == (32, 16)
    copies: Any = SimpleNamespace(run=lambda copies, **_: None)
    worker.copies, epoch.device_cache = copies, SimpleNamespace(slots=2)
    worker.load(KVPrefetchMetadata(loads=[LoadOrder(2, "r2", EPOCH, False, [1, 2, 3], [SLOTS - 1, SLOTS, SLOTS + 1])]))
    counted = (worker.counters.take() or KVPrefetchStats()).data
    assert (counted["load_bytes"], counted["load_device_bytes"]) == (48, 32)
    assert 0 < counted["load_seconds"] < 60
    assert worker.counters.take() is None


def test_metadata_shown_twice_is_done_once() -> None:
    worker, _, _, _ = make()
    meta = KVPrefetchMetadata(loads=[load(asynchronous=True)])
    worker.load(meta)
    worker.load(meta)
    assert worker.received() == {"r1"}
    assert reported(worker).loads == {1: 1}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("epoch", "blocks"), [(1, (5, 2)), (EPOCH, (5, BLOCKS))])
def test_a_load_that_fails_is_reported_with_its_blocks(asynchronous: bool, epoch: int, blocks: tuple[int, ...]) -> None:
    """An unknown epoch or an impossible block: the blocks are recomputed, and the load is acknowledged all the same."""
    worker, _, _, _ = make()
    worker.load(KVPrefetchMetadata(loads=[load(asynchronous=asynchronous, epoch=epoch, blocks=blocks)]))
    assert worker.received() == ({"r1"} if asynchronous else set())
    assert worker.failed_blocks() == set(blocks)
    assert worker.failed_blocks() == set()
    report = reported(worker)
    assert (report.loads, report.failed_loads) == ({1: 1}, {1})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_load_for_an_adapter_that_was_replaced_fails(asynchronous: bool, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM recomputes its blocks. A load beside the step also needs the adapter in memory; that is no error."""
    worker, cache, _, _ = make()
    asked: list[tuple[int, bytes, bool]] = []

    class Reads:
        def has(self, number: int, content: bytes, *, loaded: bool) -> bool:
            asked.append((number, content, loaded))
            return content == b"same"

        def take(self) -> list[AdapterRead]:
            return [AdapterRead(7, "sql", "/sql", b"other")] if len(asked) == 2 else []

    worker.adapters = Reads()  # type: ignore[assignment]
    orders = [load(1, asynchronous=asynchronous)._replace(adapter=(7, b"replaced"))]
    orders.append(load(2, asynchronous=asynchronous, blocks=(3,))._replace(adapter=(7, b"same")))
    worker.load(KVPrefetchMetadata(loads=orders, live_epochs=(EPOCH,)))
    assert asked == [(7, b"replaced", asynchronous), (7, b"same", asynchronous)]
    assert worker.failed_blocks() == {5, 2}
    assert [int(cache[block].max()) for block in range(BLOCKS)] == [0, 0, 0, 4, 0, 0]
    report = reported(worker)
    assert (report.loads, report.failed_loads) == ({1: 1, 2: 1}, {1})
    assert report.adapters == {0: [AdapterRead(7, "sql", "/sql", b"other")]}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    other = KVPrefetchWorkerMeta(adapters={1: report.adapters[0], 0: report.adapters[0]})
    assert report.aggregate(other).adapters == {0: report.adapters[0] * 2, 1: report.adapters[0]}


def test_a_save_that_fails_is_reported_and_the_others_are_done(caplog: pytest.LogCaptureFixture) -> None:
    """An impossible block and a slot of the device are errors; that an epoch has ended meanwhile is none."""
    worker, cache, rows, _ = make()
    link: Any = worker.link
    near = SimpleNamespace(slots=2, rows=np.zeros((2, 16), np.uint8))
    link.epochs[EPOCH] = SimpleNamespace(number=EPOCH, rows=rows, device_cache=near)
    cache[:] = 200
    worker.save(KVPrefetchMetadata(saves=[SaveOrder(8, 1, [4], [2])]))
    assert caplog.records == []
    orders = [(9, BLOCKS, 2), (10, 4, 1), (11, 4, SLOTS)]
    worker.save(KVPrefetchMetadata(saves=[SaveOrder(n, EPOCH, [block], [slot]) for n, block, slot in orders]))
    assert "block is out of bounds" in caplog.text
    assert "slot is out of bounds" in caplog.text
    assert [int(row[0]) for row in rows] == [1, 200, 3, 4]
    report = reported(worker)
    assert (report.saves, report.failed_saves) == (dict.fromkeys(range(8, 12), 1), {8, 9, 11})


def test_of_what_other_ranks_hold_too_a_rank_copies_its_share_and_reports_all() -> None:
    """As the daemon counts on: it puts slot 3 from the rank with replica index 1, and the rest from the other."""
    worker, cache, rows, _ = make(RankKeys(("m@tp_rank:0@",), 2, 1))
    cache[:] = 200
    worker.save(KVPrefetchMetadata(saves=[SaveOrder(9, EPOCH, [4, 5, 1], [2, 3, 0]), SaveOrder(10, EPOCH, [4], [0])]))
    assert [int(row[0]) for row in rows] == [1, 2, 3, 200]
    report = reported(worker)
    assert (report.saves, report.failed_saves) == ({9: 1, 10: 1}, set())


def test_slots_that_do_not_fit_their_segment_are_refused() -> None:
    segment = Segment.create(SLOTS * 16)
    attached = Attached(epoch=1, segment_bytes=segment.size_bytes, slot_count=SLOTS * 300, slot_bytes=16)
    with pytest.raises(SegmentCorrupt, match="do not fit"):
        WorkerEpoch(attached, segment)
    segment.close()


class Recorder(PlainCopies):
    """Says in what order things were asked for."""

    def __init__(self, paged: PagedCache) -> None:
        super().__init__(paged)
        self.calls: list[tuple[Any, ...]] = []

    def mark(self) -> None:
        self.calls.append(("mark",))

    def run(self, copies: Any, *, save: bool = False, beside: bool = False, overlap: bool = False) -> Any:
        self.calls.append(("save" if save else "load", "overlap" if overlap else beside, len(copies)))
        return super().run(copies, save=save, beside=beside)


def recording(worker: WorkerSide, paged: PagedCache, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    recorder = Recorder(paged)
    monkeypatch.setattr(worker, "copies", recorder)
    return recorder.calls


def test_a_steps_loads_of_a_kind_are_started_together(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _, _, paged = make()
    calls = recording(worker, paged, monkeypatch)
    orders = [load(n, asynchronous=n % 2 == 1, blocks=(n,)) for n in range(5)]
    meta = KVPrefetchMetadata(loads=orders, saves=[SaveOrder(9, EPOCH, [4], [2]), SaveOrder(10, EPOCH, [3], [1])])
    worker.step_begins(KVPrefetchMetadata(loads=[load()]))  # nothing asynchronous: it marks nothing
    worker.step_begins(meta)
    worker.load(meta)
    worker.save(meta)
    assert calls == [("mark",), ("load", False, 3), ("load", True, 2), ("save", False, 2)]
    assert worker.received() == {"r1", "r3"}


def test_loads_overlap_the_step_before_unless_a_save_still_reads_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may give the blocks of a request that has ended to another one while they are being saved."""
    worker, _, _, paged = make()
    calls, saved = recording(worker, paged, monkeypatch), [False]
    meta = KVPrefetchMetadata(loads=[load(1, asynchronous=True), load(2, blocks=(1,))], overlap=True)
    worker.load(meta)
    monkeypatch.setattr(paged, "fence", lambda: SimpleNamespace(query=lambda: saved[0]))
    worker.save(KVPrefetchMetadata(saves=[SaveOrder(9, EPOCH, [4], [2])]))
    for blocks in ((3,), (4,), (3, 4)):
        worker.load(KVPrefetchMetadata(loads=[load(3, blocks=blocks)], overlap=True))
    saved[0] = True
    worker.load(KVPrefetchMetadata(loads=[load(4, blocks=(4,))], overlap=True))
    loads = [kind for what, kind, _ in calls if what == "load"]
    assert loads == ["overlap", True, "overlap", False, False, "overlap"]


def test_copies_that_cannot_be_started_fail_all_their_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _, _, _ = make()

    def fail(*values: Any, **options: Any) -> None:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(PlainCopies, "run", fail)
    worker.load(KVPrefetchMetadata(loads=[load(1, blocks=(5,)), load(2, blocks=(BLOCKS,)), load(3, blocks=(1,))]))
    worker.save(KVPrefetchMetadata(saves=[SaveOrder(9, EPOCH, [4], [2]), SaveOrder(10, 1, [4], [1])]))
    assert worker.failed_blocks() == {5, BLOCKS, 1}
    report = reported(worker)
    assert (report.failed_loads, report.failed_saves) == ({1, 2, 3}, {9, 10})


def test_what_is_done_is_reported_though_something_longer_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _, _, paged = make()
    fences = [Fence(), Fence()]
    waiting = iter(fences)
    monkeypatch.setattr(paged, "fence", lambda: next(waiting))
    worker.load(KVPrefetchMetadata(loads=[load(1, asynchronous=True)]))
    worker.save(KVPrefetchMetadata(saves=[SaveOrder(9, EPOCH, [4], [2])]))
    assert (worker.received(), worker.report()) == (set(), None)
    fences[1].done = True
    report = reported(worker)
    assert (report.loads, report.saves) == ({}, {9: 1})
    fences[0].done = True
    assert worker.received() == {"r1"}


def test_an_epoch_is_kept_until_its_copies_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays mapped and pinned under the kernel that reads it, also when the link has forgotten it."""
    worker, _, _, paged = make()
    fence = Fence()
    monkeypatch.setattr(paged, "fence", lambda: fence)
    link: Any = worker.link
    epoch = weakref.ref(link.epochs[EPOCH])
    worker.load(KVPrefetchMetadata(loads=[load()]))
    link.epochs.clear()
    gc.collect()
    assert epoch() is not None
    fence.done = True
    worker.report()
    gc.collect()
    assert epoch() is None
