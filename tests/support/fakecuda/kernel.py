"""Compiles the copy kernel's source by g++ for the host: it has no cooperation between threads."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

# nvcc's words and built-in variables that such a kernel needs.
BEFORE = """
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
#line 1
"""
# `Step` and `kvprefetch_copy`: the one kernel that the project has.
AFTER = """
extern "C" const unsigned long fakecuda_argument_bytes = sizeof(Step);
extern "C" __attribute__((no_sanitize("kernel-address"), noinline))
void fakecuda_run_kvprefetch_copy(unsigned grid, unsigned threads, const Step* step) {
    gridDim.x = grid; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kvprefetch_copy(*step);
}
"""
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-fno-strict-aliasing", "-shared", "-fPIC")
# Each access goes through the fake driver's check (kernels.c), and a misaligned one ends the process, as on a GPU.
CHECKED = (
    *("-fsanitize=kernel-address", "--param", "asan-globals=0", "--param", "asan-stack=0"),
    *("--param", "asan-instrumentation-with-call-threshold=0"),
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
)
# Each access beyond a buffer of malloc, and undefined arithmetic, end the process; libasan must be loaded first.
SANITIZED = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compiled(source: str, folder: Path, flags: Sequence[str]) -> Path:
    """Return the library, which `folder` keeps. Raises ValueError with what the compiler says."""
    text = BEFORE + source + AFTER
    path = folder / f"{hashlib.sha256(repr((text, FLAGS, flags)).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        command = ["g++", *FLAGS, *flags, "-x", "c++", "-", "-o", str(made)]
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise ValueError(done.stderr)
        made.rename(path)
    return path
