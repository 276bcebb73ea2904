"""How full a Mooncake store is, as its master's own metrics page says it; not known where that cannot be had."""

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
LATELY_S = 300.0
MAX_PAGE_BYTES = 8 << 20  # 26 kB, and half a kilobyte for each segment of a cluster
_LINE = re.compile(rb"^(master_\w+) (\d{1,18})$", re.MULTILINE)
_NAMES = {
    "memory_used_bytes": b"master_allocated_bytes",
    "memory_bytes": b"master_total_capacity_bytes",
    "memory_evicted_bytes": b"master_evicted_size_bytes",
    "disk_used_bytes": b"master_allocated_file_size_bytes",
    "disk_bytes": b"master_total_file_capacity_bytes",
    "disk_evictions": b"master_evict_disk_replica_requests_total",
}


class StoreFill(BaseModel):
    """How full the store is, in bytes, and what left it since its master started.

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


EMPTY = StoreFill()


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
    """None unless each of the numbers is there."""
    found = dict(_LINE.findall(page))
    if not found.keys() >= set(_NAMES.values()):
        return None
    return StoreFill(**{name: int(found[theirs]) for name, theirs in _NAMES.items()})


class FillWatch:
    """Asks a master that has just started every PERIOD_S, on a thread of its own: one that hangs keeps nobody else."""

    def __init__(self, master: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, monotonic."""
        self._master, self._clock = master, clock
        # Those of the last LATELY_S, the newest last.
        self._answers: tuple[tuple[float, StoreFill], ...] = ((clock(), EMPTY),)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-fill", daemon=True)
        self._thread.start()

    @property
    def now(self) -> StoreFill | None:
        """What it said last; None when that is long ago, or without memory: its owner is still on its way. From any
        thread, as `earlier`."""
        at, fill = self._answers[-1]
        return fill if fill.memory_bytes and self._clock() - at <= STALE_S else None

    @property
    def earlier(self) -> StoreFill:
        """What it said five minutes ago, or at its start."""
        return self._answers[0][1]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(0.5)

    def _run(self) -> None:
        while not self._stop.is_set():
            if (fill := read(self._master)) is not None:
                now = self._clock()
                self._answers = (*(each for each in self._answers if now - each[0] <= LATELY_S), (now, fill))
            self._stop.wait(PERIOD_S)
