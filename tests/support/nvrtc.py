"""NVIDIA's compiler for kernels, which needs no GPU; the pip package nvidia-cuda-nvrtc-cu12 brings it.

It runs in a process of its own, since it looks for a driver, and the fake one is not enough for it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from pathlib import Path


def found(name: str) -> list[Path]:
    """Return the files of this name, such as `lib/libnvrtc.so.*`, in NVIDIA's pip packages."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or []) if spec else []
    return [path for folder in folders for path in sorted(Path(folder).glob(f"*/{name}"))]


def ptx(source: str, architecture: str) -> str:
    """Compile CUDA C++ for an architecture such as `compute_90`, without a warning."""
    command = [sys.executable, __file__, str(found("lib/libnvrtc.so.*")[0]), architecture]
    return subprocess.run(command, input=source, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout


def main(library: str, architecture: str) -> None:
    nvrtc, program, size = ctypes.CDLL(library), ctypes.c_void_p(), ctypes.c_size_t()
    source = sys.stdin.read().encode()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 2)(f"--gpu-architecture={architecture}".encode(), b"-std=c++17")
    status = nvrtc.nvrtcCompileProgram(program, 2, options)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert (status, log.value) == (0, b""), log.value.decode()
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, made)
    print(made.value.decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
