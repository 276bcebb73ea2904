"""What a process's open descriptors lead to."""

from __future__ import annotations

import contextlib
import os


def targets(pid: int | str) -> list[str]:
    """Return the target of each open descriptor, for example `socket:[4711]`, without those closed meanwhile."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found
