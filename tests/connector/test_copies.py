"""A step's copies from every place a slot can be in: by the copy kernel on the fake driver, and plainly."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvprefetch.connector import copies as copying
from kvprefetch.connector import cuda_copy
from kvprefetch.connector.copies import CudaCopies, PlainCopies, checked
from kvprefetch.connector.paged import PagedCache
from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from tests.support import fakecuda
from tests.support.fakecuda.torch import FakeStreams, array
from tests.support.layouts import caches

pytestmark = fakecuda.needs_fake

ROOT = Path(__file__).resolve().parents[2]
MISSING = ["vllm", "mooncake", "pydantic", "structlog", "hypothesis", "kvprefetch.shmring._atomics"]
SIZES = {"L": 4, "B": 64, "H": 2, "N": 4, "C": 64}  # a slot has a page, so that some may be pinned without the others
HOST, DEVICE = 20, 12


class Recorded:
    """A kernel that remembers the blocks of threads of its launches."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.grids = kernel, list[int]()

    def launch(self, grid: int, *values: Any) -> None:
        self.grids.append(grid)
        self._kernel.launch(grid, *values)


class World:
    """A paged cache and a session with slots of random bytes in host and device memory, `pinned` of them pinned."""

    def __init__(self, layout: str = "LBNHC", pinned: int = HOST) -> None:
        fakecuda.machine()
        self.device = cuda.open_device(fakecuda.UUID)
        self.streams = FakeStreams(self.device)
        self.caches = caches(layout, sizes=SIZES, allocate=self.streams.allocate)
        self.paged = PagedCache(self.caches, list(self.caches), SIZES["B"])
        assert self.paged.block_bytes == mmap.PAGESIZE
        random = np.random.default_rng(0)
        self.map = mmap.mmap(-1, HOST * mmap.PAGESIZE)
        self.rows = np.frombuffer(self.map, np.uint8).reshape(HOST, -1)
        self.rows[:] = random.integers(0, 256, self.rows.shape, np.uint8)
        self.pinned = pinned
        if pinned:
            self.device.register(self.rows.ctypes.data, pinned * mmap.PAGESIZE)
        self.memory = self.device.allocate(DEVICE * mmap.PAGESIZE)
        near = array(self.memory.address, DEVICE * mmap.PAGESIZE).reshape(DEVICE, -1)
        near[:] = random.integers(0, 256, near.shape, np.uint8)
        cache = SimpleNamespace(slots=DEVICE, pinned=pinned, address=self.memory.address)
        self.all = np.concatenate([self.rows, near])
        self.session: Any = SimpleNamespace(epoch=7, rows=self.rows, device_cache=cache)

    def copies(self, kind: str = "kernel") -> Any:
        if kind == "plain":
            return PlainCopies(self.paged)
        streams: Any = self.streams
        copies = CudaCopies(self.paged, self.device, streams)
        copies.launcher.kernel = Recorded(copies.launcher.kernel)  # type: ignore[assignment]
        return copies

    def run(self, copies: PlainCopies, *orders: Any, **options: Any) -> None:
        """Run the copies of a step, and wait for them."""
        fence = copies.run(orders, **options)
        if fence is not None:
            fence.synchronize()
            assert fence.query()

    def value(self, block: int) -> Any:
        row = np.zeros((1, self.paged.block_bytes), np.uint8)
        self.paged.save(row, [0], [block])
        return row[0]

    def launches(self, copies: Any) -> int:
        return len(copies.launcher.kernel.grids)

    def close(self) -> None:
        self.streams.synchronize()
        if self.pinned:
            self.device.unregister(self.rows.ctypes.data)
        self.memory.close()
        self.streams.close()


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    """make(…): a World, which is closed at the end of the test; nothing of it stays on the GPU."""
    made: list[World] = []

    def one(**options: Any) -> World:
        made.append(World(**options))
        return made[-1]

    yield one
    for world in made:
        world.close()
    assert fakecuda.machine().left() == {}


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make()


@pytest.mark.parametrize(("slot", "launches"), [(6, 1), (7, 0), (HOST - 1, 0), (HOST, 1)])
def test_the_kernel_never_touches_host_slots_that_are_not_pinned(
    make: Callable[..., World], slot: int, launches: int
) -> None:
    """The fake driver would end the process."""
    world = make(pinned=7)
    copies = world.copies()
    world.run(copies, checked(world.paged, world.session, [slot], [0]))
    assert (world.value(0) == world.all[slot]).all()
    assert world.launches(copies) == launches


@pytest.mark.parametrize("kind", ["plain", "kernel"])
@pytest.mark.parametrize("pinned", [0, 7, HOST])
def test_blocks_are_saved_into_host_slots(make: Callable[..., World], kind: str, pinned: int) -> None:
    world = make(pinned=pinned)
    slots, blocks = [0, 19, 7, 6, 3], [63, 0, 5, 9, 2]
    expected = [world.value(block) for block in blocks]
    untouched = world.rows[1].copy()
    world.run(world.copies(kind), checked(world.paged, world.session, slots, blocks, save=True), save=True)
    for slot, value in zip(slots, expected, strict=True):
        assert (world.rows[slot] == value).all()
    assert (world.rows[1] == untouched).all()


def test_a_steps_orders_are_one_launch(world: World) -> None:
    copies = world.copies()
    orders = [checked(world.paged, world.session, [n, HOST + n], [2 * n, 2 * n + 1]) for n in range(DEVICE)]
    world.run(copies, *orders)
    assert world.launches(copies) == 1
    for n in range(DEVICE):
        assert (world.value(2 * n) == world.all[n]).all()
        assert (world.value(2 * n + 1) == world.all[HOST + n]).all()


def test_orders_of_two_epochs_are_two_launches(make: Callable[..., World]) -> None:
    world, other = make(), make()
    other.session.epoch = 8
    other.rows[:] = 255 - world.rows
    copies = world.copies()
    orders = [
        checked(world.paged, one.session, [3, HOST + 1], [block, block + 1])
        for one, block in ((world, 0), (other, 10), (world, 20), (other, 30))
    ]
    world.run(copies, *orders)
    assert world.launches(copies) == 2
    for block, one in ((0, world), (10, other), (20, world), (30, other)):
        assert (world.value(block) == one.rows[3]).all()
        assert (world.value(block + 1) == one.all[HOST + 1]).all()


def test_what_reads_host_memory_beside_a_forward_leaves_it_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copy, "BESIDE_BLOCKS", 3)
    world.device.processors = 100
    copies = world.copies()
    near, far = list(range(HOST, HOST + DEVICE)), list(range(DEVICE))
    for slots in (near, far):
        for beside in (False, True):
            world.run(copies, checked(world.paged, world.session, slots, range(DEVICE)), beside=beside)
            assert all((world.value(n) == world.all[slot]).all() for n, slot in enumerate(slots))
    grids = copies.launcher.kernel.grids
    full = grids[0]
    assert full > 3
    assert grids == [full, full, full, 3]


def busy(world: World) -> None:
    """Queue work on the compute stream that takes longer than anything beside it."""
    for _ in range(300):
        world.device.call("memcpyAsync", world.memory.address, world.memory.address + 64, 64, 4, 0)


def test_the_copies_of_a_step_that_failed_are_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = world.copies()

    def fail(*values: Any) -> None:
        raise DeviceError("cuLaunchKernel: made to fail")

    monkeypatch.setattr(copies.launcher.kernel, "launch", fail)
    busy(world)
    forward = world.streams.event()
    forward.record(world.streams.compute)
    with pytest.raises(DeviceError):
        copies.run([checked(world.paged, world.session, [1], [1])])
    assert forward.query()


@pytest.mark.parametrize(
    ("slots", "blocks", "save"),
    [
        ([HOST + DEVICE], [0], False),
        ([-1], [0], False),
        ([0], [SIZES["B"]], False),
        ([0], [-1], False),
        ([0, 1], [0], False),
        ([HOST], [0], True),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_copied(
    world: World, slots: list[int], blocks: list[int], save: bool
) -> None:
    """An address out of bounds would take the whole process's CUDA context with it."""
    with pytest.raises((IndexError, ValueError)):
        checked(world.paged, world.session, slots, blocks, save=save)


def test_slots_of_another_size_and_device_slots_without_a_device_cache_are_refused(world: World) -> None:
    session: Any = SimpleNamespace(rows=world.rows, device_cache=None)
    with pytest.raises(IndexError):
        checked(world.paged, session, [HOST], [0])
    session.rows = world.rows[:, :-1]
    with pytest.raises(ValueError, match="slot size differs"):
        checked(world.paged, session, [0], [0])


def test_a_device_that_cannot_be_used_is_done_without(world: World, caplog: pytest.LogCaptureFixture) -> None:
    paged: Any = SimpleNamespace(device=torch.device("cuda", 7))
    copies, device = copying.for_cache(paged)
    assert (type(copies), device) == (PlainCopies, None)
    assert "no staging in device memory, and copies go block by block: cuDeviceGetUuid" in caplog.text


def test_the_tests_on_a_gpu_need_no_more_than_they_say() -> None:
    """A machine with a GPU may lack all but torch, cupy, numpy and pytest (docs/BENCHMARKS.md)."""
    code = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
from tests.gpu import conftest, peer, test_copies, test_daemon, test_memory, test_speed, worker
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
