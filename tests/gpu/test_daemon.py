"""The daemon's device cache and a worker in another process: blocks promoted, loaded from either place, given back.

It needs neither vLLM nor Mooncake, nor the daemon's other packages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvprefetch.daemon.engine.device import DeviceStaging
from kvprefetch.daemon.engine.promoter import COPY_BYTES, DeviceJob, Promoter
from kvprefetch.daemon.planning.copies import Copies
from kvprefetch.daemon.planning.promotion import Promotions
from kvprefetch.daemon.planning.requests import Key, Request
from kvprefetch.daemon.planning.runs import Lane, Run
from kvprefetch.daemon.work.calls import Call, CallKind, EngineCalls
from kvprefetch.daemon.work.pools import Pools
from kvprefetch.shmring.gpu.cuda import Device
from kvprefetch.shmring.gpu.driver import GRAIN_BYTES
from tests.daemon.planning.support import request_of
from tests.gpu.peer import pattern, write
from tests.gpu.worker import SLOT_BYTES, Worker, digest

SLOTS, NEAR = 40, 32
SLAB_BYTES = NEAR * SLOT_BYTES
TIMEOUT_S = 60.0


class Segment:
    """Host staging of one rank in a memory file, as the daemon has it."""

    def __init__(self) -> None:
        self.slot_count, self.block_bytes = SLOTS, [SLOT_BYTES]
        self.size = -(-SLOTS * SLOT_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("kvprefetch-test")
        os.ftruncate(self.fd, self.size)
        self.map = mmap.mmap(self.fd, self.size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.rows = np.frombuffer(self.map, np.uint8, SLOTS * SLOT_BYTES).reshape(SLOTS, SLOT_BYTES)
        self.random = np.random.default_rng(5)
        self.fill()

    def fill(self) -> list[str]:
        """New bytes in every slot; their digests."""
        self.rows[:] = self.random.integers(0, 256, self.rows.shape, np.uint8)
        return [digest(row) for row in self.rows]

    def areas(self) -> list[tuple[int, int]]:
        return [(self.base, SLOTS * SLOT_BYTES)]

    def addresses(self, slot: int) -> list[int]:
        return [self.base + slot * SLOT_BYTES]


class Tables:
    """The slot tables of requests that nobody claims."""

    def __init__(self) -> None:
        self.entries: dict[int, list[int]] = {}

    def move(self, key: Key, entries: Sequence[tuple[int, int]]) -> bool:
        for block, slot in entries:
            self.entries[key[0]][block] = slot
        return True


class Log:
    """The daemon's log."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **values: Any) -> None:
        self.events.append((event, values))

    debug = warning = error = info


class Rig:
    """A daemon's part of one engine, with the main loop in `until`, and one worker."""

    def __init__(self, gpu: Device) -> None:
        self.host, self.tables, self.log = Segment(), Tables(), Log()
        self.gpu = gpu
        self._warm_up()
        self.before = self.gpu.free_bytes()
        staging: Any = self.host
        self.staging = DeviceStaging([SLOT_BYTES], [gpu.uuid], budget_bytes=SLAB_BYTES, margin_bytes=0)
        self.staging.follow(staging)
        assert self.staging.slots == NEAR
        self.pools, self.engine, self.promoted, self.off = Pools(1), EngineCalls(self.log), 0, ""
        self.requests: dict[Key, Request] = {}
        runs = [Run([b""], array("I", [slot]), Lane.MEMORY, None, pins=1) for slot in range(SLOTS)]
        copies = Copies(range(SLOTS, SLOTS + NEAR), runs)
        self.promotions = Promotions(copies, self.requests, self.tables, chunk_blocks=COPY_BYTES // SLOT_BYTES)
        self.promoter = Promoter(self.staging, self.promotions)
        self.worker = Worker(self.host.fd, self.staging.descriptor(0), SLOTS, NEAR)
        self.staging.hang_up()
        try:
            assert self.worker.ask("hello") == NEAR
            mapped: Any = SimpleNamespace(device=True)
            self.off = self.promoter.start([mapped])
            self.until(lambda: self.promoter.ready)
        except BaseException:
            self.close()
            raise

    def _warm_up(self) -> None:
        """Make the GPU keep whatever its first use keeps, before the test counts."""
        memory, stream = self.gpu.allocate(GRAIN_BYTES), self.gpu.stream()
        write(stream, memory, 0)
        stream.close()
        memory.close()

    def until(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (self.off, self.log.events)
            self.pools.run_finished()
            self.carry_on()
            time.sleep(0.001)

    def carry_on(self) -> None:
        """Start what the promoter wants, as an epoch does."""
        while (job := self.promoter.next_job()) is not None:
            overdue = partial(self.overdue, job)
            self.pools.start(Call(CallKind.COPY, job.run, partial(self.done, job), overdue, self.engine))

    def overdue(self, job: DeviceJob) -> None:
        self.off = self.promoter.overdue(job) or self.off

    def done(self, job: DeviceJob, error: str) -> None:
        self.off = self.promoter.done(job, error) or self.off
        self.promoted += len(job.order.slots) if job.order is not None and not error else 0

    def publish(self, number: int, slots: Sequence[int]) -> None:
        """A request's blocks are staged in these host slots."""
        request = request_of(number, slots)
        request.held.extend(slots)
        request.published = len(slots)
        self.requests[request.key] = request
        self.tables.entries[number] = list(self.promotions.published(request, 0, slots))

    def near(self, number: int) -> int:
        return sum(slot >= SLOTS for slot in self.tables.entries[number])

    def end(self) -> None:
        """As the daemon's epoch ends."""
        self.promotions.close()
        self.pools.start(Call(CallKind.COPY, self.staging.close, lambda _: None, None, self.engine))
        self.until(lambda: self.engine.running == 0)

    def close(self) -> None:
        """The worker is gone and the epoch ended: nothing is left of either."""
        self.until(lambda: self.before - self.gpu.free_bytes() < SLAB_BYTES // 2)
        assert self.pools.close()
        os.close(self.host.fd)


@pytest.fixture
def rig(device: Device) -> Iterator[Rig]:
    made = Rig(device)
    yield made
    made.worker.kill()
    made.end()
    made.close()


def test_a_worker_loads_from_both_places_what_the_daemon_staged(rig: Rig) -> None:
    """Unpinned, pinned, from the device alone, beside a step; and what it saves the daemon reads."""
    old = rig.host.fill()
    rig.publish(1, range(10))
    rig.until(lambda: rig.near(1) == 10)
    rig.publish(2, range(10, SLOTS))
    rig.until(lambda: rig.near(2) == NEAR - 10)
    assert rig.promoted == NEAR
    slots = rig.tables.entries[1] + rig.tables.entries[2]
    blocks = list(range(SLOTS))
    assert rig.worker.ask("load", slots=slots, blocks=blocks) == old
    rig.worker.ask("pinned")
    assert rig.worker.ask("load", slots=slots, blocks=blocks[::-1]) == old
    new = rig.host.fill()
    expected = [old[n] if slot >= SLOTS else new[n] for n, slot in enumerate(slots)]
    assert rig.worker.ask("load", slots=slots, blocks=blocks, beside=True) == expected
    rig.worker.ask("save", slots=[31, 39], blocks=[3, 35])
    assert [digest(rig.host.rows[slot]) for slot in (31, 39)] == [expected[3], expected[35]]


def test_the_slab_is_freed_when_both_sides_let_go(rig: Rig) -> None:
    """The daemon's epoch ends first; the worker still copies from what it has mapped."""
    old = rig.host.fill()
    rig.publish(1, range(NEAR))
    rig.until(lambda: rig.near(1) == NEAR)
    slots, blocks = rig.tables.entries[1], list(range(NEAR))
    rig.worker.ask("load", slots=slots, blocks=blocks)
    rig.end()
    time.sleep(0.5)
    held = rig.gpu.free_bytes()
    assert rig.worker.ask("load", slots=slots, blocks=blocks) == old[:NEAR]
    rig.worker.ask("end")
    rig.until(lambda: rig.gpu.free_bytes() - held >= SLAB_BYTES // 2)


def test_a_killed_worker_holds_nothing(rig: Rig) -> None:
    """Killed between two copies of the daemon's, which hears of it later and copies on."""
    rig.publish(1, range(4))
    rig.until(lambda: rig.near(1) == 4)
    rig.worker.kill()
    rig.publish(2, range(10, 14))
    rig.until(lambda: rig.near(2) == 4)


def test_a_worker_loads_on_from_the_slab_of_a_killed_daemon(peer: Any) -> None:
    """By the copy kernel, again and again; then it unmaps as ever.

    In a process of its own: where the driver does not keep the memory, its CUDA context is lost.
    """
    host, exporter = Segment(), peer()
    slab = exporter.ask("allocate", bytes=SLAB_BYTES, seed=9)
    worker = Worker(host.fd, slab, SLOTS, NEAR)
    os.close(slab)
    near = pattern(9, SLAB_BYTES)[: NEAR * SLOT_BYTES].reshape(NEAR, -1)
    slots, blocks = list(range(SLOTS, SLOTS + NEAR)), list(range(NEAR))
    try:
        assert worker.ask("hello") == NEAR
        exporter.kill()
        for _ in range(3):
            assert worker.ask("load", slots=slots, blocks=blocks) == [digest(row) for row in near]
        worker.ask("pinned")
        assert worker.ask("load", slots=[2, SLOTS + 1], blocks=[0, 1]) == [digest(host.rows[2]), digest(near[1])]
        worker.ask("end")
    finally:
        worker.kill()
        os.close(host.fd)
