"""The copy kernel on a GPU: bytes in all layouts and dtypes, from every place, in order with the engine's streams."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvprefetch.connector.copy import cuda_copy
from kvprefetch.connector.copy.cuda_copy import STEP_BLOCKS, UNIT_BYTES
from kvprefetch.connector.copy.device_cache import DeviceCache
from kvprefetch.connector.copy.paged import PagedCache
from kvprefetch.connector.worker.copies import checked
from kvprefetch.shmring.gpu import driver as gpu
from kvprefetch.shmring.gpu.cuda import Device
from tests.gpu.peer import ON_GPU, pattern
from tests.gpu.side import PinnedCache, kv_caches
from tests.support.layouts import SERVED, SIZES
from tests.support.waiting import eventually

# 9 x 3 bytes with float8 is odd, and no multiple of anything; 600 x 5 x 2 is more than a unit, with a rest.
SHAPES = {
    "small": SIZES,
    "odd": {"L": 3, "B": 7, "H": 2, "N": 9, "C": 3},
    "units": {"L": 2, "B": 5, "H": 2, "N": 600, "C": 5},
    "exact": {"L": 2, "B": 5, "H": 2, "N": 64, "C": UNIT_BYTES // 128},
    "llama-8b": {"L": 32, "B": 40, "H": 8, "N": 16, "C": 256},
    "llama-70b-tp8": {"L": 80, "B": 40, "H": 1, "N": 16, "C": 256},
}
SMALLER = {} if ON_GPU else {"N": 4, "C": 64}  # the fake driver runs one thread of a kernel after the other
SHAPES |= {name: {**SHAPES[name], **SMALLER} for name in ("llama-8b", "llama-70b-tp8")}
HOST, NEAR = 9, 6


def storage(kv_caches: dict[str, Any]) -> Any:
    first = next(iter(kv_caches.values()))
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())


class World:
    """A paged cache on the GPU, its copy on the CPU, and slots of random bytes in host and device memory."""

    def __init__(
        self,
        on: Any,
        sizes: dict[str, int],
        layout: str = "LBNHC",
        dtype: Any = torch.bfloat16,
        *,
        pinned: bool = True,
        layers: list[str] | None = None,
    ) -> None:
        self.on, device = on, on.device
        self.caches = kv_caches(layout, dtype, sizes, on)
        raw = storage(self.caches).cpu().clone().view(dtype)
        self.mirror = {n: raw.as_strided(c.shape, c.stride(), c.storage_offset()) for n, c in self.caches.items()}
        self.paged = PagedCache(self.caches, layers or list(self.caches), sizes["B"])
        self.on_cpu = PagedCache(self.mirror, layers or list(self.mirror), sizes["B"])
        slot = self.paged.block_bytes
        self.map = mmap.mmap(-1, -(-HOST * slot // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.rows = np.frombuffer(self.map, np.uint8, HOST * slot).reshape(HOST, slot)
        self.random = np.random.default_rng(1)
        self.rows[:] = self.random.integers(0, 256, self.rows.shape, np.uint8)
        self.device_cache = PinnedCache(device, self.rows, NEAR)
        self.near = self.random.integers(0, 256, (NEAR, slot), np.uint8)
        stream = device.stream()
        stream.copy(self.device_cache.address, self.near.ctypes.data, self.near.nbytes)
        stream.close()
        self.epoch: Any = SimpleNamespace(number=1, rows=self.rows, device_cache=self.device_cache)
        self.copies = on.copies(self.paged)
        if pinned:
            self.wait_until_pinned()

    def wait_until_pinned(self) -> None:
        eventually(lambda: self.device_cache.pinned >= HOST, 30, "pinned slots")

    def load(self, slots: list[int], blocks: list[int], **how: bool) -> Any:
        """On the GPU; and what should come of it, on the CPU."""
        everything = np.concatenate([self.rows, self.near])
        self.on_cpu.load(everything, slots, blocks)
        return self.copies.run([checked(self.paged, self.epoch, slots, blocks)], **how)

    def save(self, slots: list[int], blocks: list[int]) -> None:
        expected = self.rows.copy()
        self.on_cpu.save(expected, slots, blocks)
        self.copies.run([checked(self.paged, self.epoch, slots, blocks, save=True)], save=True).synchronize()
        assert (self.rows == expected).all()

    def assert_equal(self) -> None:
        self.on.synchronize()
        assert torch.equal(storage(self.caches).cpu(), storage(self.mirror))

    def close(self) -> None:
        self.on.synchronize()
        self.device_cache.close()


@pytest.fixture
def make(on: Any) -> Iterator[Callable[..., World]]:
    """make(sizes, …): a World, which is closed at the end of the test."""
    made: list[World] = []

    def one(*options: Any, **more: Any) -> World:
        made.append(World(on, *options, **more))
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    return make(SHAPES["llama-70b-tp8"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", SERVED)
def test_loads_and_saves_are_what_numpy_copies(make: Callable[..., World], layout: str, shape: str, dtype: Any) -> None:
    """Scattered slots and blocks; nothing beside them is touched."""
    made = make(SHAPES[shape], layout, dtype)
    blocks = [int(n) for n in made.random.permutation(SHAPES[shape]["B"])]
    slots = [int(n) for n in made.random.permutation(HOST + NEAR)][: len(blocks)]
    made.load(slots, blocks[: len(slots)])
    made.assert_equal()
    made.save([8, 0, 3], blocks[:3])


def test_layers_left_out_make_several_pieces(make: Callable[..., World]) -> None:
    made = make({**SIZES, "L": 6}, layers=["layer.0", "layer.1", "layer.3", "layer.5"])
    assert len(made.paged.pieces) > 1
    made.load([1, HOST], [2, 6])
    made.assert_equal()
    made.save([1, 0], [2, 6])


@pytest.mark.parametrize("grid", [1, 3, 1000])
def test_any_number_of_threads_copies_everything_once(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch, grid: int
) -> None:
    monkeypatch.setattr(cuda_copy, "grid_for", lambda *_: grid)
    made = make(SHAPES["units"], "LHBNC")
    made.save(list(range(5)), list(range(5)))


def test_slots_load_while_they_are_being_pinned(make: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PIECE_BYTES", 1)
    made = make(SHAPES["llama-8b"], pinned=False)
    rounds = 0
    while made.device_cache.pinned < HOST or rounds < 3:
        made.load(list(range(HOST)), [(rounds + n) % 40 for n in range(HOST)])
        made.assert_equal()
        rounds += 1


def test_another_processs_slab_is_loaded_from(world: World, device: Device, peer: Any) -> None:
    exporter = peer()
    size = NEAR * world.paged.block_bytes
    slab = exporter.ask("allocate", bytes=size, seed=9)
    attached: Any = SimpleNamespace(device_slots=NEAR, slot_bytes=world.paged.block_bytes)
    pages = mmap.mmap(-1, -(-world.paged.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    rows = np.frombuffer(pages, np.uint8, world.paged.block_bytes).reshape(1, -1)
    cache = DeviceCache(device, rows, attached, slab)
    epoch: Any = SimpleNamespace(number=2, rows=rows, device_cache=cache)
    near = pattern(9, size).reshape(NEAR, -1)
    world.on_cpu.load(near, [0, 5, 2], [1, 39, 7])
    world.copies.run([checked(world.paged, epoch, [1, 6, 3], [1, 39, 7])])
    world.assert_equal()
    cache.end()
    assert cache.join(30)


def test_asynchronous_loads_run_while_the_forward_runs(world: World) -> None:
    """Whichever of torch's streams they get: only some of them share a hardware queue with the compute stream."""
    for turn in range(9 if ON_GPU else 2):
        world.copies = world.on.copies(world.paged)
        world.copies.mark()
        is_busy = world.on.busy()
        world.load([1, HOST], [3 + turn, 4 + turn], beside=True).synchronize()
        assert is_busy()
        world.load([2], [5 + turn], beside=True).synchronize()
        assert not is_busy(), "without a mark of its step behind everything on the compute stream"
        world.assert_equal()


def test_loads_that_overlap_run_during_the_step_before_and_are_waited_for(world: World) -> None:
    is_busy = world.on.busy()
    world.load([1, HOST], [3, 4], overlap=True).synchronize()
    assert is_busy()
    world.assert_equal()
    for turn in range(9):
        fence = world.load([turn], [5 + turn], overlap=True)
        is_busy = world.on.queued()
        eventually(lambda: not is_busy(), 30, "the compute stream's work")  # noqa: B023
        assert fence.query(), "the step behind the load did not wait for it"
        world.assert_equal()


def test_asynchronous_loads_wait_for_what_came_before_their_step(world: World) -> None:
    is_busy = world.on.busy()
    world.copies.mark()
    fence = world.load([1, HOST], [3, 4], beside=True)
    fence.synchronize()
    assert not is_busy()
    world.assert_equal()


@pytest.mark.parametrize("save", [False, True])
def test_a_fence_is_for_its_own_copies(world: World, save: bool) -> None:
    """Also when those of another stream are over sooner. Synchronous loads and saves are on the compute stream."""
    world.copies.mark()
    world.on.busy()
    order = checked(world.paged, world.epoch, [1], [3], save=True)
    behind = world.copies.run([order], save=True) if save else world.load([1], [3])
    world.load([2], [4], beside=True).synchronize()
    assert not behind.query()
    world.assert_equal()
    assert behind.query()


def test_a_captured_graph_sees_what_was_loaded_before_its_replay(world: World) -> None:
    source = storage(world.caches)
    seen = world.on.allocate(len(source))
    replay = world.on.captured(seen, source)
    for slot in (1, HOST + 2, 5):
        world.load([slot], [3])
        replay()
        world.on.synchronize()
        assert torch.equal(seen.cpu(), storage(world.mirror))


@pytest.mark.parametrize("blocks", [STEP_BLOCKS, STEP_BLOCKS + 1, 8 * STEP_BLOCKS + 1])
def test_as_many_blocks_as_one_launch_takes_and_more(make: Callable[..., World], blocks: int) -> None:
    made = make({**SIZES, "B": blocks})
    made.load([n % (HOST + NEAR) for n in range(blocks)], list(range(blocks)))
    made.assert_equal()
