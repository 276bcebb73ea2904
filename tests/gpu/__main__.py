"""`make gpu`: all tests of this folder on a GPU, in ten minutes; a row says pass, fail, skip or how fast.

    python -m tests.gpu [--fake] [--minutes M] [FILE ...]

Each file has a process of its own, since a lost CUDA context ends the rest of its process.  As root, tests with two
users run too.  --fake rehearses on the fake driver, without measurements.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from tests.gpu.rows import row

HERE = Path(__file__).resolve().parent
FILES = ("test_memory.py", "test_daemon.py", "test_copies.py", "test_engines.py", "test_speed.py")
# A machine with a GPU brings its own pytest: without its plugins, and without this checkout's configuration.
PYTEST = (
    *("-m", "pytest", "-c", "/dev/null", "--rootdir=.", "--import-mode=importlib"),
    *("-o", "markers=gpu", "-o", "faulthandler_timeout=120", "-p", "no:terminal", "-p", "tests.gpu.rows"),
)


def head(fake: bool) -> str:
    """Return what ran where."""
    if fake:
        device = "fake driver"
    else:
        import torch

        device = torch.cuda.get_device_name(0)
    versions = " ".join(
        f"{found.name}={found.version}"
        for found in importlib.metadata.distributions()
        if found.name in {"torch", "numpy", "cupy-cuda12x", "cupy-cuda13x"}
    )
    today = datetime.datetime.now(datetime.timezone.utc).date()
    return f"{today} {device} python={platform.python_version()} {versions} uid={os.geteuid()}"


def run(file: str, environment: dict[str, str], seconds: float) -> bool:
    """Run one file; whether all of it passed."""
    command = [sys.executable, *PYTEST, str(HERE / file)]
    try:
        status = subprocess.run(command, env={**os.environ, **environment}, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        row("fail", None, f"{file}: no time left, after {seconds:.0f} s")
        return False
    if status not in (0, 1):
        row("fail", None, f"{file}: " + (f"ended by signal {-status}" if status < 0 else f"pytest's status {status}"))
    return status == 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--fake", action="store_true", help="on the fake driver, as every test run does")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("files", nargs="*", default=FILES, metavar="FILE")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if not options.fake:
        environment["KVPREFETCH_GPU"] = "1"
        try:
            cuda.open_device(cuda.uuid_of(0))
        except DeviceError as error:
            print(f"make gpu: no CUDA device here: {error}", file=sys.stderr)
            return 1
    print(head(options.fake), flush=True)
    failed = [file for file in options.files if not run(file, environment, max(1.0, end - time.monotonic()))]
    print(f"make gpu: failed: {' '.join(failed)}" if failed else "make gpu: all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
