"""How full a Mooncake store is, from its master's own metrics page; None where the master does not say."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

PERIOD_S = 2.0
TIMEOUT_S = 2.0
STALE_S = 10.0  # an older answer says nothing of now
MAX_PAGE_BYTES = 8 << 20  # 26 kB, and half a kilobyte for each segment of a cluster
_LINE = re.compile(rb"^(master_\w+) (\d{1,18})$", re.MULTILINE)
NAMES = {
    "memory_used_bytes": b"master_allocated_bytes",
    "memory_bytes": b"master_total_capacity_bytes",
    "memory_evicted_bytes": b"master_evicted_size_bytes",
    "disk_used_bytes": b"master_allocated_file_size_bytes",
    "disk_bytes": b"master_total_file_capacity_bytes",
    "disk_evictions": b"master_evict_disk_replica_requests_total",
}


class StoreFill(BaseModel):
    """How full the store is, in bytes, and how much it evicted since its master started.

    A block that memory evicted may still be on the disk.  `disk_evictions` counts how often the disk made room; each
    time it removes one value or more, and Mooncake does not say how many.  Without a disk `disk_bytes` is 0.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    memory_used_bytes: int = 0
    memory_bytes: int = 0
    memory_evicted_bytes: int = 0
    disk_used_bytes: int = 0
    disk_bytes: int = 0
    disk_evictions: int = 0


def read(master: str, timeout_s: float = TIMEOUT_S) -> StoreFill | None:
    """Ask the HTTP interface at `master` (host:port). None when it does not answer, or says something else."""
    try:
        with contextlib.closing(http.client.HTTPConnection(master, timeout=timeout_s)) as connection:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            return parse(answer.read(MAX_PAGE_BYTES)) if answer.status == http.client.OK else None
    except (OSError, ValueError, http.client.HTTPException):
        return None


def parse(page: bytes) -> StoreFill | None:
    """Return the numbers of a metrics page; None unless all are there."""
    found = dict(_LINE.findall(page))
    if not found.keys() >= set(NAMES.values()):
        return None
    return StoreFill(**{name: int(found[theirs]) for name, theirs in NAMES.items()})


class FillWatch:
    """Asks a master every PERIOD_S, on a thread of its own: one that hangs blocks nobody. And it calls `look`."""

    def __init__(self, master: str, look: Callable[[], None] = lambda: None) -> None:
        self._master, self._look = master, look
        self._answer: tuple[StoreFill, float] = (StoreFill(), 0.0)  # the last one, and when it came
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-fill", daemon=True)
        self._thread.start()

    @property
    def now(self) -> StoreFill | None:
        """The last answer; None when it is old, or names no memory: the store has not joined yet."""
        fill, at_s = self._answer
        return fill if fill.memory_bytes and time.monotonic() - at_s <= STALE_S else None

    def close(self) -> None:
        self._stop.set()
        self._thread.join(0.5)

    def _run(self) -> None:
        while not self._stop.is_set():
            if (fill := read(self._master)) is not None:
                self._answer = fill, time.monotonic()
            self._look()
            self._stop.wait(PERIOD_S)
