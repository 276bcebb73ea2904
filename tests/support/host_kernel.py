"""Compiles the copy kernel's CUDA source as C++ and runs its threads one by one: the same code, without a GPU."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu.device import Argument

# PyTorch, too, compiles C++ for engines of several ranks.
needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

# The built-ins of nvcc that a kernel without cooperation between its threads needs.
BEFORE = """
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
"""
AFTER = """
extern "C" void run(unsigned grid, unsigned threads, const Step* step) {
    gridDim.x = grid; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kvprefetch_copy(*step);
}
"""


class HostKernel:
    """Stands in for shmring.gpu.cuda.Kernel; `grids` are the grids of its launches."""

    def __init__(self, source: str) -> None:
        self._library = _compiled(source)
        self.grids: list[int] = []

    def launch(self, grid: int, threads: int, argument: Argument, stream: int) -> None:
        self.grids.append(grid)
        self._library.run(ctypes.c_uint(grid), ctypes.c_uint(threads), ctypes.c_void_p(argument.ctypes.data))


@functools.cache
def _compiled(source: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        file, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        file.write_text(BEFORE + source + AFTER)
        command = ["g++", "-std=c++17", "-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
        # A misaligned access is an error on a GPU: here it ends the process.
        command += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
        done = subprocess.run(
            [*command, "-shared", "-fPIC", "-o", library, file], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DeviceError(f"kernel: {done.stderr}")
        return ctypes.CDLL(str(library))
