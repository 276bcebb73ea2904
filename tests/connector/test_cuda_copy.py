"""The copy kernel's source, compiled as C++, against the NumPy copies; and compiled for GPUs where nvrtc is."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from kvprefetch.connector import cuda_copy
from kvprefetch.connector.cuda_copy import STEP_BLOCKS, UNIT_BYTES, WIDE_BLOCKS, grid_for, piece_table, step_type
from kvprefetch.connector.paged import PagedCache, Piece, Rows
from tests.support.host_kernel import HostKernel, needs_cxx
from tests.support.layouts import SERVED, SIZES, caches

# 9 x 3 bytes with float8 is odd, and no multiple of anything; 600 x 5 x 2 is more than a unit, with a rest.
SHAPES = {
    "small": SIZES,
    "odd": {"L": 3, "B": 7, "H": 2, "N": 9, "C": 3},
    "units": {"L": 2, "B": 5, "H": 2, "N": 600, "C": 5},
    "exact": {"L": 2, "B": 5, "H": 2, "N": 64, "C": UNIT_BYTES // 128},
}


def run(
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
    step["pieces"], step["units"], step["slot_bytes"] = table.ctypes.data, units, paged.block_bytes
    # The last two slots lie elsewhere than the others, as those of a device do.
    near = rows[-2:].copy()
    step["host"], step["host_slots"], step["device"] = rows.ctypes.data, len(rows) - 2, near.ctypes.data
    step["count"], step["gather"] = len(slots), gather
    step["slots"][0, : len(slots)], step["blocks"][0, : len(slots)] = slots, blocks
    grid = grid or grid_for(units, len(slots), 2)
    HostKernel(cuda_copy.source(most)).launch(grid, cuda_copy.THREADS, step, 0)
    rows[-2:] = near


def memory(kv_caches: dict[str, torch.Tensor]) -> bytes:
    storage = next(iter(kv_caches.values())).untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


@needs_cxx
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", SERVED)
def test_the_kernel_copies_what_numpy_copies(layout: str, shape: str, dtype: torch.dtype) -> None:
    """Gather and scatter, of scattered slots and blocks; nothing beside them is touched."""
    sizes = SHAPES[shape]
    kv_caches = caches(layout, dtype, sizes=sizes)
    paged = PagedCache(kv_caches, list(kv_caches), sizes["B"])
    slots, blocks = [5, 0, 4], [sizes["B"] - 1, 3, 0]
    expected = np.full((6, paged.block_bytes), 7, np.uint8)
    rows = expected.copy()
    paged.save(expected, slots, blocks)
    run(paged, rows, slots, blocks, gather=True)
    assert (rows == expected).all()

    rows[:] = np.random.default_rng(1).integers(0, 256, rows.shape, np.uint8)
    before = memory(kv_caches)
    paged.load(rows, slots, blocks)
    expected_cache = memory(kv_caches)
    storage = next(iter(kv_caches.values())).untyped_storage()
    ctypes.memmove(storage.data_ptr(), before, len(before))
    run(paged, rows, slots, blocks, gather=False)
    assert memory(kv_caches) == expected_cache != before


@needs_cxx
@pytest.mark.parametrize("grid", [1, 3, 1000])
def test_any_number_of_threads_copies_everything_once(grid: int) -> None:
    kv_caches = caches("LHBNC", sizes=SHAPES["units"])
    paged = PagedCache(kv_caches, list(kv_caches), 5)
    expected = np.zeros((5, paged.block_bytes), np.uint8)
    rows = expected.copy()
    paged.save(expected, range(5), range(5))
    run(paged, rows, list(range(5)), list(range(5)), gather=True, grid=grid)
    assert (rows == expected).all()


@needs_cxx
def test_layers_left_out_make_several_pieces() -> None:
    kv_caches = caches("LBNHC", sizes={**SIZES, "L": 6})
    paged = PagedCache(kv_caches, ["layer.0", "layer.1", "layer.3", "layer.5"], SIZES["B"])
    assert len(paged.pieces) > 1
    expected = np.zeros((2, paged.block_bytes), np.uint8)
    rows = expected.copy()
    paged.save(expected, [1, 0], [2, 6])
    run(paged, rows, [1, 0], [2, 6], gather=True)
    assert (rows == expected).all()


def test_work_is_bounded_by_what_32_bits_count() -> None:
    for piece in (Piece(0, 1, 1 << 32, 1 << 33, 1 << 32), Piece(0, 1 << 24, UNIT_BYTES, 1 << 40, UNIT_BYTES)):
        with pytest.raises(ValueError, match="too large for the copy kernel"):
            piece_table([piece])
    assert grid_for(1, 1, 132) == 1
    assert grid_for(512, 64, 132) == 132 * cuda_copy.BLOCKS_PER_PROCESSOR


@needs_cxx
@pytest.mark.parametrize("most", [STEP_BLOCKS, WIDE_BLOCKS])
def test_a_full_launch_copies_all_its_blocks(most: int) -> None:
    """The last entry of the argument is reached, and nothing behind it."""
    kv_caches = caches("LBNHC", sizes={**SIZES, "B": most})
    paged = PagedCache(kv_caches, list(kv_caches), most)
    expected = np.zeros((most, paged.block_bytes), np.uint8)
    rows = expected.copy()
    blocks = list(range(most))
    paged.save(expected, blocks[::-1], blocks)
    run(paged, rows, blocks[::-1], blocks, gather=True, most=most)
    assert (rows == expected).all()


def test_arguments_are_as_large_as_cuda_allows() -> None:
    assert step_type(STEP_BLOCKS).itemsize <= 4096
    assert step_type(WIDE_BLOCKS).itemsize <= 32_764


@pytest.mark.parametrize("most", [STEP_BLOCKS, WIDE_BLOCKS])
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_100"])
def test_the_source_compiles_for_gpus(architecture: str, most: int) -> None:
    """NVIDIA's own compiler, which needs no GPU; the pip package brings it."""
    spec = importlib.util.find_spec("nvidia")
    found = [
        path
        for folder in (spec.submodule_search_locations or [] if spec else [])
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))
    ]
    if not found:
        pytest.skip("nvrtc is not installed (pip install nvidia-cuda-nvrtc-cu12)")
    nvrtc = ctypes.CDLL(str(found[0]))
    program = ctypes.c_void_p()
    source = cuda_copy.source(most).encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"copy.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"-std=c++17")
    status = nvrtc.nvrtcCompileProgram(program, 2, options)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert (status, log.value) == (0, b"")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    assert size.value > 1000
