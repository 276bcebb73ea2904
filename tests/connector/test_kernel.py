"""The copy kernel's source: what GPUs make of it, and that it touches nothing beyond its buffers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvprefetch.connector.copy.cuda_copy import BLOCKS_PER_PROCESSOR, KERNEL, SOURCE, UNIT_BYTES, grid_for, piece_table
from kvprefetch.connector.copy.paged import Piece
from tests.support import nvrtc
from tests.support.compiler import needs_cxx

ROOT = Path(__file__).resolve().parents[2]
MOST_REGISTERS = 64  # of a thread, with four blocks of 256 threads on a multiprocessor
LAUNCHES = 300
BETWEEN = (80, 86, 89, 90, 100)  # as the oldest and the newest generation; a second each
PTXAS = nvrtc.found("bin/ptxas")
needs_nvrtc = pytest.mark.skipif(not nvrtc.found("lib/libnvrtc.so.*"), reason="not installed: nvidia-cuda-nvrtc-cu12")
needs_ptxas = pytest.mark.skipif(not PTXAS, reason="not installed: nvidia-cuda-nvcc-cu12")


@needs_nvrtc
@needs_ptxas
@pytest.mark.parametrize("capability", [75, *(pytest.param(each, marks=pytest.mark.stress) for each in BETWEEN), 120])
def test_a_gpu_keeps_all_of_it_in_registers(capability: int, tmp_path: Path) -> None:
    """Nothing is spilled, and the argument is read where the driver put it, not copied to local memory."""
    said = assembled(SOURCE, capability, tmp_path)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said) == [
        ("0", "0", "0")
    ], said
    [registers] = re.findall(r"Used (\d+) registers", said)
    assert int(registers) <= MOST_REGISTERS
    assert "lmem" not in said


def assembled(text: str, capability: int, folder: Path) -> str:
    """Return what NVIDIA's assembler says of the kernel."""
    ptx = nvrtc.ptx(text, f"compute_{capability}")
    assert f".entry {KERNEL}(" in ptx
    (folder / "kernel.ptx").write_text(ptx)
    file = str(folder / "kernel.ptx")
    command = [str(PTXAS[0]), "--verbose", f"--gpu-name=sm_{capability}", "--output-file=/dev/null", file]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_work_is_bounded_by_what_32_bits_count() -> None:
    for piece in (Piece(0, 1, 1 << 32, 1 << 33, 1 << 32), Piece(0, 1 << 24, UNIT_BYTES, 1 << 40, UNIT_BYTES)):
        with pytest.raises(ValueError, match="too large for the copy kernel"):
            piece_table([piece])
    assert grid_for(1, 1, 132) == 1
    assert grid_for(512, 64, 132) == 132 * BLOCKS_PER_PROCESSOR


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.stress
@needs_cxx
@pytest.mark.parametrize("seed", range(8))
def test_random_layouts_are_copied_without_an_access_beyond_them(folder: Path, seed: int) -> None:
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {**os.environ, "LD_PRELOAD": library.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-m", "tests.connector.random_copies", str(folder), str(seed), str(LAUNCHES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
