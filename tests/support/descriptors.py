"""What a process's open descriptors lead to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# An engine costs the daemon shared memory, a doorbell and connections; Mooncake opens TCP sockets whenever it likes.
ENGINES = ("/memfd:kvprefetch", "anon_inode:[eventfd]")


def targets(pid: int | str) -> list[str]:
    """Return the target of each open descriptor, for example `socket:[4711]`, without those closed meanwhile."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def of_engines(pid: int) -> list[str]:
    """Return the targets of a daemon's descriptors that engines cost it: memory, doorbells, Unix sockets."""
    lines = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
    unix = {f"socket:[{line.split()[6]}]" for line in lines}
    return [target for target in targets(pid) if target.startswith(ENGINES) or target in unix]
