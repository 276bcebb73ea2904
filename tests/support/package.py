"""A copy of the package as an installation has it: one folder with all of its parts."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("kv", "shmring", "connector", "daemon", "systemd")


def copy_package(folder: Path) -> Path:
    """Make `folder`/kvprefetch, and return it."""
    copy = folder / "kvprefetch"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "package", copy, ignore=ignored)
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=ignored)
    return copy
