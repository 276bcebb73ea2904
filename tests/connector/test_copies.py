"""A step's copies from every place a slot can be in: with the copy kernel run on the CPU, and plainly."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvprefetch.connector import copies as copying
from kvprefetch.connector import cuda_copy
from kvprefetch.connector.copies import Copies, CudaCopies, PlainCopies, checked
from kvprefetch.connector.paged import PagedCache
from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.device import GRAIN_BYTES
from tests.support.host_device import UUID, HostDevice, HostDevices
from tests.support.layouts import caches

ROOT = Path(__file__).resolve().parents[2]
MISSING = ["vllm", "mooncake", "pydantic", "structlog", "hypothesis", "kvprefetch.shmring._atomics"]
SIZES = {"L": 3, "B": 64, "H": 2, "N": 4, "C": 8}
HOST, DEVICE = 20, 12


class FakeEvent:
    """Logs the streams that recorded it; done when the test says so."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.done, self.waited = log, True, False

    def record(self, stream: Any) -> None:
        self.log.append(("record", self, stream))

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited = self.done = True


class FakeStream:
    """Says what was asked of it."""

    cuda_stream = 1

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.synchronized = 0

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(("wait", event, self))

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeStreams:
    """torch's streams without a GPU: whatever is queued is done at once."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.compute, self.side = FakeStream(self.log), FakeStream(self.log)

    def current(self) -> FakeStream:
        return self.compute

    def use(self, stream: FakeStream) -> contextlib.AbstractContextManager[None]:
        self.log.append(("use", None, stream))
        return contextlib.nullcontext()

    def event(self) -> FakeEvent:
        return FakeEvent(self.log)

    def on_device(self, data: Any) -> torch.Tensor:
        return torch.from_numpy(data.copy())


class World:
    """A paged cache and a session with slots of random bytes in host and device memory."""

    def __init__(self, layout: str = "LBNHC", pinned: int = HOST) -> None:
        self.caches = caches(layout, sizes=SIZES)
        self.paged = PagedCache(self.caches, list(self.caches), SIZES["B"])
        self.device = HostDevice(64 << 20, UUID)
        random = np.random.default_rng(0)
        self.rows = random.integers(0, 256, (HOST, self.paged.block_bytes), np.uint8)
        memory = self.device.allocate(GRAIN_BYTES)
        near = random.integers(0, 256, (DEVICE, self.paged.block_bytes), np.uint8)
        cache: Any = SimpleNamespace(slots=DEVICE, pinned=pinned, address=memory.address, rows=near)
        flat = (ctypes.c_uint8 * near.nbytes).from_address(memory.address)
        np.ctypeslib.as_array(flat)[:] = near.reshape(-1)
        self.all = np.concatenate([self.rows, near])
        self.session: Any = SimpleNamespace(epoch=7, rows=self.rows, device_cache=cache)
        self.streams: Any = FakeStreams()

    def copies(self, kind: str) -> Copies:
        if kind == "plain":
            return PlainCopies(self.paged)
        return CudaCopies(self.paged, self.device, self.streams)

    def value(self, block: int) -> Any:
        row = np.zeros((1, self.paged.block_bytes), np.uint8)
        self.paged.save(row, [0], [block])
        return row[0]

    def grids(self, copies: Copies) -> list[int]:
        """Blocks of threads of each launch, but those that only load the kernels."""
        assert isinstance(copies, CudaCopies)
        kernels: Any = [launcher.kernel for launcher in (copies.few, *{copies.many} - {copies.few})]
        return [grid for kernel in kernels for grid in kernel.grids[1:]]

    def launches(self, copies: Copies) -> int:
        return len(self.grids(copies))


@pytest.mark.parametrize("kind", ["plain", "kernel"])
@pytest.mark.parametrize("pinned", [0, 7, HOST])
@pytest.mark.parametrize("count", [1, 30])
def test_slots_are_loaded_wherever_they_lie(kind: str, pinned: int, count: int) -> None:
    world = World(pinned=pinned)
    slots = [int(n) for n in np.random.default_rng(count).permutation(HOST + DEVICE)[:count]]
    blocks = list(range(SIZES["B"] - count, SIZES["B"]))
    before = world.value(0)
    copies = world.copies(kind)
    copy = checked(world.paged, world.session, slots, blocks)
    fence = copies.run([copy])
    assert fence is None or fence.query()
    for slot, block in zip(slots, blocks, strict=True):
        assert (world.value(block) == world.all[slot]).all()
    assert (world.value(0) == before).all()
    if kind == "kernel":
        direct = [slot for slot in slots if slot < pinned or slot >= HOST]
        assert world.launches(copies) == (1 if direct else 0)


@pytest.mark.parametrize(("slot", "launches"), [(6, 1), (7, 0), (HOST - 1, 0), (HOST, 1)])
def test_the_kernel_never_touches_host_slots_that_are_not_pinned(slot: int, launches: int) -> None:
    world = World(pinned=7)
    copies = world.copies("kernel")
    copies.run([checked(world.paged, world.session, [slot], [0])])
    assert (world.value(0) == world.all[slot]).all()
    assert world.launches(copies) == launches


@pytest.mark.parametrize("kind", ["plain", "kernel"])
@pytest.mark.parametrize("pinned", [0, 7, HOST])
def test_blocks_are_saved_into_host_slots(kind: str, pinned: int) -> None:
    world = World(pinned=pinned)
    slots, blocks = [0, 19, 7, 6, 3], [63, 0, 5, 9, 2]
    expected = [world.value(block) for block in blocks]
    untouched = world.rows[1].copy()
    world.copies(kind).run([checked(world.paged, world.session, slots, blocks, save=True)], save=True)
    for slot, value in zip(slots, expected, strict=True):
        assert (world.rows[slot] == value).all()
    assert (world.rows[1] == untouched).all()


def test_a_steps_orders_are_one_launch() -> None:
    world = World()
    copies = world.copies("kernel")
    orders = [checked(world.paged, world.session, [n, HOST + n], [2 * n, 2 * n + 1]) for n in range(DEVICE)]
    copies.run(orders)
    assert world.launches(copies) == 1
    for n in range(DEVICE):
        assert (world.value(2 * n) == world.all[n]).all()
        assert (world.value(2 * n + 1) == world.all[HOST + n]).all()


def test_orders_of_two_epochs_are_two_launches() -> None:
    world, other = World(), World()
    other.session.epoch = 8
    other.rows[:] = 255 - world.rows
    copies = world.copies("kernel")
    copies.run(
        [
            checked(world.paged, one.session, [3, HOST + 1], [block, block + 1])
            for one, block in ((world, 0), (other, 10), (world, 20), (other, 30))
        ]
    )
    assert world.launches(copies) == 2
    for block, one in ((0, world), (10, other), (20, world), (30, other)):
        assert (world.value(block) == one.rows[3]).all()
        assert (world.value(block + 1) == one.all[HOST + 1]).all()


def load_many(world: World, count: int) -> tuple[int, int]:
    """Load so many blocks; the launches of each kernel."""
    copies: Any = world.copies("kernel")
    slots = [n % (HOST + DEVICE) for n in range(count)]
    copies.run([checked(world.paged, world.session, slots, range(count))])
    assert all((world.value(n) == world.all[slot]).all() for n, slot in enumerate(slots))
    few, many = (len(launcher.kernel.grids) - 1 for launcher in (copies.few, copies.many))
    return few, many


@pytest.mark.parametrize(("count", "launches"), [(7, (1, 0)), (8, (0, 1)), (30, (0, 1)), (31, (0, 2)), (64, (0, 3))])
def test_a_launch_takes_what_its_argument_holds(
    monkeypatch: pytest.MonkeyPatch, count: int, launches: tuple[int, int]
) -> None:
    monkeypatch.setattr(cuda_copy, "STEP_BLOCKS", 7)
    monkeypatch.setattr(cuda_copy, "WIDE_BLOCKS", 30)
    assert load_many(World(), count) == launches


def test_a_driver_that_takes_no_large_argument_gets_several_small_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_copy, "STEP_BLOCKS", 7)
    world = World()
    make = world.device.kernel

    def kernel(source: str, name: str) -> Any:
        made = make(source, name)
        if f"{cuda_copy.WIDE_BLOCKS}u" in source:

            def launch(*values: Any) -> None:
                raise DeviceError("cuLaunchKernel: made to fail")

            monkeypatch.setattr(made, "launch", launch)
        return made

    monkeypatch.setattr(world.device, "kernel", kernel)
    with caplog.at_level("INFO"):
        assert load_many(world, 30) == (5, 5), "one and the same"
    assert "no more than 7 blocks" in caplog.text


def test_nothing_is_left_to_be_loaded_at_the_first_step() -> None:
    """Both kernels are launched when they are made, with nothing to do."""
    world = World()
    before = world.value(0)
    copies: Any = world.copies("kernel")
    assert [launcher.kernel.grids for launcher in (copies.few, copies.many)] == [[1], [1]]
    assert (world.value(0) == before).all()


def test_what_reads_host_memory_beside_a_forward_leaves_it_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copy, "BESIDE_BLOCKS", 3)
    world = World()
    world.device.processors = 100
    copies = world.copies("kernel")
    near, far = list(range(HOST, HOST + DEVICE)), list(range(DEVICE))
    for slots in (near, far):
        for beside in (False, True):
            copies.run([checked(world.paged, world.session, slots, range(DEVICE))], beside=beside)
            assert all((world.value(n) == world.all[slot]).all() for n, slot in enumerate(slots))
    full = world.grids(copies)[0]
    assert full > 3
    assert world.grids(copies) == [full, full, full, 3]


def test_asynchronous_loads_run_beside_and_behind_the_mark() -> None:
    world = World()
    copies, streams = world.copies("kernel"), world.streams
    copies.mark()
    ((_, mark, where),) = streams.log
    assert where is streams.compute
    streams.log.clear()
    fence = copies.run([checked(world.paged, world.session, [1], [1])], beside=True)
    assert streams.log == [("wait", mark, streams.side), ("record", fence, streams.side)]
    streams.log.clear()
    # Without a mark of this step: behind everything on the compute stream.
    copies.run([checked(world.paged, world.session, [1], [1])], beside=True)
    assert [(what, stream) for what, _, stream in streams.log[:2]] == [
        ("record", streams.compute),
        ("wait", streams.side),
    ]


def test_synchronous_loads_and_saves_run_on_the_compute_stream() -> None:
    world = World()
    copies, streams = world.copies("kernel"), world.streams
    for save in (False, True):
        streams.log.clear()
        copies.run([checked(world.paged, world.session, [1], [1], save=save)], save=save)
        assert {stream for _, _, stream in streams.log} == {streams.compute}


def test_a_failed_launch_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    copies = world.copies("kernel")

    def fail(*values: Any) -> None:
        raise DeviceError("cuLaunchKernel: made to fail")

    monkeypatch.setattr(copies.few.kernel, "launch", fail)  # type: ignore[attr-defined]
    with pytest.raises(DeviceError):
        copies.run([checked(world.paged, world.session, [1], [1])])
    assert world.streams.compute.synchronized == 1


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
    slots: list[int], blocks: list[int], save: bool
) -> None:
    """An address out of bounds would take the whole process's CUDA context with it."""
    world = World()
    with pytest.raises((IndexError, ValueError)):
        checked(world.paged, world.session, slots, blocks, save=save)


def test_slots_of_another_size_are_refused() -> None:
    world = World()
    session: Any = SimpleNamespace(rows=world.rows[:, :-1], device_cache=None)
    with pytest.raises(ValueError, match="slot size differs"):
        checked(world.paged, session, [0], [0])


def test_without_a_device_cache_there_are_no_device_slots() -> None:
    world = World()
    session: Any = SimpleNamespace(rows=world.rows, device_cache=None)
    with pytest.raises(IndexError):
        checked(world.paged, session, [HOST], [0])


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> HostDevices:
    devices = HostDevices(64 << 20)
    monkeypatch.setattr(cuda, "devices", devices)
    return devices


def test_the_cpu_has_no_device_unless_a_test_gives_it_one(
    provider: HostDevices, caplog: pytest.LogCaptureFixture
) -> None:
    paged = World().paged
    copies, device = copying.for_cache(paged)
    assert isinstance(copies, PlainCopies)
    assert device is provider.device
    cuda.devices = cuda.CudaDevices()
    assert copying.for_cache(paged)[1] is None
    assert caplog.records == []


@pytest.mark.parametrize("fail", ["uuid_of", "open_device"])
def test_a_device_that_cannot_be_used_is_done_without(
    provider: HostDevices, fail: str, caplog: pytest.LogCaptureFixture
) -> None:
    provider.device.fail.add(fail)
    copies, device = copying.for_cache(World().paged)
    assert (type(copies), device) == (PlainCopies, None)
    assert "made to fail" in caplog.text


def test_the_tests_on_a_gpu_need_no_more_than_they_say() -> None:
    """A machine with a GPU may lack everything but torch, cupy, numpy and pytest (docs/BENCHMARKS.md)."""
    code = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
from tests.gpu import conftest, peer, test_copies, test_daemon, test_memory, test_speed, worker
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
