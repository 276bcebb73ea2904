"""A step's copies: their launches, what is copied without the kernel, and what is refused.

Their bytes are tests/gpu/test_copies.py's.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvprefetch.connector.copy import cuda_copy
from kvprefetch.connector.worker import copies as copying
from kvprefetch.connector.worker.copies import PlainCopies, checked
from kvprefetch.shmring.errors import DeviceError
from tests.gpu.side import side
from tests.gpu.test_copies import HOST, NEAR, SHAPES, World
from tests.support import fakecuda

pytestmark = fakecuda.needs_fake

ROOT = Path(__file__).resolve().parents[2]
MISSING = ["vllm", "mooncake", "pydantic", "structlog", "hypothesis", "kvprefetch.shmring._atomics"]
SIZES = SHAPES["llama-70b-tp8"]
Order = tuple[World, list[int], list[int]]  # from these slots, into these blocks


class Recorded:
    """A kernel that remembers the blocks of threads of its launches."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.grids = kernel, list[int]()

    def launch(self, grid: int, *values: Any) -> None:
        self.grids.append(grid)
        self._kernel.launch(grid, *values)


@pytest.fixture
def make() -> Iterator[Callable[[], World]]:
    """make(): a World, which is closed at the end of the test."""
    fakecuda.machine()
    on, made = side(), list[World]()

    def one() -> World:
        made.append(World(on, SIZES))
        return made[-1]

    yield one
    for world in made:
        world.close()
    on.close()


@pytest.fixture
def world(make: Callable[[], World]) -> World:
    return make()


def load(world: World, *orders: Order, beside: bool = False) -> list[int]:
    """Run the loads of a step; return the blocks of threads of its launches."""
    launcher = world.copies.launcher
    launcher.kernel, kernel = Recorded(launcher.kernel), launcher.kernel
    for one, slots, blocks in orders:
        world.on_cpu.load(np.concatenate([one.rows, one.near]), slots, blocks)
    world.copies.run([checked(world.paged, one.epoch, *order) for one, *order in orders], beside=beside).synchronize()
    world.assert_equal()
    launcher.kernel, recorded = kernel, launcher.kernel
    grids: list[int] = recorded.grids
    return grids


@pytest.mark.parametrize(("slots", "launches"), [([4, 5, HOST - 1, HOST], 1), ([5, HOST - 1], 0)])
def test_host_slots_that_are_not_pinned_are_copied_without_the_kernel(
    world: World, slots: list[int], launches: int
) -> None:
    world.epoch.device_cache = SimpleNamespace(slots=NEAR, pinned=5, address=world.device_cache.address)
    assert len(load(world, (world, slots, list(range(len(slots)))))) == launches
    world.save([0, 4, 5, 8], [9, 3, 0, 1])


def test_a_steps_orders_are_one_launch(world: World) -> None:
    assert len(load(world, *[(world, [n, HOST + n], [2 * n, 2 * n + 1]) for n in range(NEAR)])) == 1


def test_orders_of_two_epochs_are_two_launches(make: Callable[[], World]) -> None:
    world, other = make(), make()
    other.epoch.number = 8
    other.rows[:] = 255 - world.rows
    orders = [(one, [3, HOST + 1], [block, block + 1]) for one, block in ((world, 0), (other, 10), (world, 20))]
    assert len(load(world, *orders)) == 2


def test_what_reads_host_memory_beside_a_forward_leaves_it_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copy, "BESIDE_BLOCKS", 3)
    blocks, near, far = list(range(NEAR)), list(range(HOST, HOST + NEAR)), list(range(NEAR))
    [[full], beside] = [load(world, (world, near, blocks), beside=each) for each in (False, True)]
    assert full > 3
    assert beside == [full]
    assert [load(world, (world, far, blocks), beside=each) for each in (False, True)] == [[full], [3]]


def test_the_copies_of_a_step_that_failed_are_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*values: Any) -> None:
        raise DeviceError("cuLaunchKernel: made to fail")

    monkeypatch.setattr(world.copies.launcher.kernel, "launch", fail)
    is_busy = world.on.busy()
    with pytest.raises(DeviceError):
        world.copies.run([checked(world.paged, world.epoch, [1], [1])])
    assert not is_busy()


@pytest.mark.parametrize(
    ("slots", "blocks", "save"),
    [
        ([HOST + NEAR], [0], False),
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
        checked(world.paged, world.epoch, slots, blocks, save=save)


def test_slots_of_another_size_and_device_slots_without_a_device_cache_are_refused(world: World) -> None:
    epoch: Any = SimpleNamespace(rows=world.rows, device_cache=None)
    with pytest.raises(IndexError):
        checked(world.paged, epoch, [HOST], [0])
    epoch.rows = world.rows[:, :-1]
    with pytest.raises(ValueError, match="slot size differs"):
        checked(world.paged, epoch, [0], [0])


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
