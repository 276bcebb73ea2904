"""The copy kernel on the fake driver against the NumPy copies. What GPUs make of its source: test_kernel.py."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvprefetch.connector import cuda_copy
from kvprefetch.connector.cuda_copy import STEP_BLOCKS, UNIT_BYTES, WIDE_BLOCKS, grid_for, piece_table, step_type
from kvprefetch.connector.paged import PagedCache, Piece, Rows
from kvprefetch.shmring.gpu import cuda
from tests.support import fakecuda
from tests.support.fakecuda.torch import FakeStreams
from tests.support.layouts import SERVED, SIZES, caches

# 9 x 3 bytes with float8 is odd, and no multiple of anything; 600 x 5 x 2 is more than a unit, with a rest.
SHAPES = {
    "small": SIZES,
    "odd": {"L": 3, "B": 7, "H": 2, "N": 9, "C": 3},
    "units": {"L": 2, "B": 5, "H": 2, "N": 600, "C": 5},
    "exact": {"L": 2, "B": 5, "H": 2, "N": 64, "C": UNIT_BYTES // 128},
}


@pytest.fixture
def gpu() -> Iterator[FakeStreams]:
    """A fake GPU; `gpu.allocate` has its memory, the only memory that the kernel may touch here."""
    fakecuda.machine()
    device = cuda.open_device(fakecuda.UUID)
    streams = FakeStreams(device)
    yield streams
    streams.close()


def run(
    gpu: FakeStreams,
    paged: PagedCache,
    rows: Rows,
    slots: list[int],
    blocks: list[int],
    *,
    gather: bool,
    grid: int = 0,
    most: int = STEP_BLOCKS,
) -> None:
    """The copies of one launch of the kernel for `most` blocks."""
    table, units = piece_table(paged.pieces)
    step = np.zeros(1, step_type(most))
    step["pieces"] = gpu.on_device(table.view(np.uint8)).data_ptr()
    step["units"], step["slot_bytes"] = units, paged.block_bytes
    # The last two slots lie elsewhere than the others, as those of a device do.
    host, device = (gpu.on_device(part.reshape(-1)) for part in (rows[:-2], rows[-2:]))
    step["host"], step["host_slots"], step["device"] = host.data_ptr(), len(rows) - 2, device.data_ptr()
    step["count"], step["gather"] = len(slots), gather
    step["slots"][0, : len(slots)], step["blocks"][0, : len(slots)] = slots, blocks
    grid = grid or grid_for(units, len(slots), 2)
    gpu.device.kernel(cuda_copy.source(most), cuda_copy.KERNEL).launch(grid, cuda_copy.THREADS, step, 0)
    gpu.synchronize()
    rows[:-2], rows[-2:] = host.numpy().reshape(-1, rows.shape[1]), device.numpy().reshape(2, -1)


def memory(kv_caches: dict[str, torch.Tensor]) -> bytes:
    storage = next(iter(kv_caches.values())).untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


@fakecuda.needs_fake
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", SERVED)
def test_the_kernel_copies_what_numpy_copies(gpu: FakeStreams, layout: str, shape: str, dtype: torch.dtype) -> None:
    """Gather and scatter, of scattered slots and blocks; nothing beside them is touched."""
    sizes = SHAPES[shape]
    kv_caches = caches(layout, dtype, sizes=sizes, allocate=gpu.allocate)
    paged = PagedCache(kv_caches, list(kv_caches), sizes["B"])
    slots, blocks = [5, 0, 4], [sizes["B"] - 1, 3, 0]
    expected = np.full((6, paged.block_bytes), 7, np.uint8)
    rows = expected.copy()
    paged.save(expected, slots, blocks)
    run(gpu, paged, rows, slots, blocks, gather=True)
    assert (rows == expected).all()

    rows[:] = np.random.default_rng(1).integers(0, 256, rows.shape, np.uint8)
    before = memory(kv_caches)
    paged.load(rows, slots, blocks)
    expected_cache = memory(kv_caches)
    storage = next(iter(kv_caches.values())).untyped_storage()
    ctypes.memmove(storage.data_ptr(), before, len(before))
    run(gpu, paged, rows, slots, blocks, gather=False)
    assert memory(kv_caches) == expected_cache != before


@fakecuda.needs_fake
@pytest.mark.parametrize("grid", [1, 3, 1000])
def test_any_number_of_threads_copies_everything_once(gpu: FakeStreams, grid: int) -> None:
    kv_caches = caches("LHBNC", sizes=SHAPES["units"], allocate=gpu.allocate)
    paged = PagedCache(kv_caches, list(kv_caches), 5)
    expected = np.zeros((5, paged.block_bytes), np.uint8)
    rows = expected.copy()
    paged.save(expected, range(5), range(5))
    run(gpu, paged, rows, list(range(5)), list(range(5)), gather=True, grid=grid)
    assert (rows == expected).all()


@fakecuda.needs_fake
def test_layers_left_out_make_several_pieces(gpu: FakeStreams) -> None:
    kv_caches = caches("LBNHC", sizes={**SIZES, "L": 6}, allocate=gpu.allocate)
    paged = PagedCache(kv_caches, ["layer.0", "layer.1", "layer.3", "layer.5"], SIZES["B"])
    assert len(paged.pieces) > 1
    expected = np.zeros((4, paged.block_bytes), np.uint8)
    rows = expected.copy()
    paged.save(expected, [1, 0], [2, 6])
    run(gpu, paged, rows, [1, 0], [2, 6], gather=True)
    assert (rows == expected).all()


def test_work_is_bounded_by_what_32_bits_count() -> None:
    for piece in (Piece(0, 1, 1 << 32, 1 << 33, 1 << 32), Piece(0, 1 << 24, UNIT_BYTES, 1 << 40, UNIT_BYTES)):
        with pytest.raises(ValueError, match="too large for the copy kernel"):
            piece_table([piece])
    assert grid_for(1, 1, 132) == 1
    assert grid_for(512, 64, 132) == 132 * cuda_copy.BLOCKS_PER_PROCESSOR


@fakecuda.needs_fake
@pytest.mark.parametrize("most", [STEP_BLOCKS, WIDE_BLOCKS])
def test_a_full_launch_copies_all_its_blocks(gpu: FakeStreams, most: int) -> None:
    """The last entry of the argument is reached, and nothing behind it."""
    kv_caches = caches("LBNHC", sizes={**SIZES, "B": most}, allocate=gpu.allocate)
    paged = PagedCache(kv_caches, list(kv_caches), most)
    expected = np.zeros((most, paged.block_bytes), np.uint8)
    rows = expected.copy()
    blocks = list(range(most))
    paged.save(expected, blocks[::-1], blocks)
    run(gpu, paged, rows, blocks[::-1], blocks, gather=True, most=most)
    assert (rows == expected).all()


def test_arguments_are_as_large_as_cuda_allows() -> None:
    assert step_type(STEP_BLOCKS).itemsize <= 4096
    assert step_type(WIDE_BLOCKS).itemsize <= 32_764
