"""A worker in a process of its own, without vLLM: a rank's paged cache, its device cache, the connector's copies.

`python worker.py SEGMENT_FD SLAB_FD SLOTS DEVICE_SLOTS`.  It reads orders and writes answers, one JSON object a
line.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvprefetch.connector.copy.device_cache import DeviceCache
from kvprefetch.connector.copy.paged import PagedCache
from kvprefetch.connector.worker.copies import checked
from tests.gpu.peer import ON_GPU
from tests.gpu.side import kv_caches, side
from tests.support.waiting import eventually

SIZES = {"L": 8, "B": 40, "H": 8, "N": 16, "C": 512 if ON_GPU else 128}
SLOT_BYTES = SIZES["L"] * SIZES["H"] * SIZES["N"] * SIZES["C"] * 2


def digest(value: Any) -> str:
    return hashlib.sha256(value.tobytes()).hexdigest()


class Rank:
    """The connector's worker side of an epoch."""

    def __init__(self, segment: int, slab: int, slots: int, device_slots: int) -> None:
        on = side()
        self.synchronize = on.synchronize
        caches = kv_caches("LBNHC", torch.bfloat16, SIZES, on)
        self.paged = PagedCache(caches, list(caches), SIZES["B"])
        assert self.paged.block_bytes == SLOT_BYTES
        self.copies, device = on.copies(self.paged), on.device
        rows = np.frombuffer(mmap.mmap(segment, 0), np.uint8, slots * SLOT_BYTES).reshape(slots, SLOT_BYTES)
        attached: Any = SimpleNamespace(device_slots=device_slots, slot_bytes=SLOT_BYTES)
        self.device_cache = DeviceCache(device, rows, attached, slab)
        self.epoch: Any = SimpleNamespace(number=1, rows=rows, device_cache=self.device_cache)

    def hello(self) -> int:
        return self.device_cache.slots

    def pinned(self) -> None:
        eventually(lambda: self.device_cache.pinned >= len(self.epoch.rows), 30, "pinned slots")

    def load(self, slots: Sequence[int], blocks: Sequence[int], beside: bool = False) -> list[str]:
        """Load, and read back from the paged cache; what every block holds then."""
        self.copies.run([checked(self.paged, self.epoch, slots, blocks)], beside=beside).synchronize()
        values = np.zeros((len(blocks), SLOT_BYTES), np.uint8)
        self.paged.save(values, range(len(blocks)), blocks)
        self.synchronize()
        return [digest(value) for value in values]

    def save(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self.copies.run([checked(self.paged, self.epoch, slots, blocks, save=True)], save=True).synchronize()

    def end(self) -> None:
        """As at the end of the epoch."""
        self.device_cache.end()
        assert self.device_cache.join(30)


def main(*numbers: str) -> None:
    rank = Rank(*map(int, numbers))
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(rank, order.pop("do"))(**order)), flush=True)


class Worker:
    """Such a process, from the test's side."""

    def __init__(self, segment: int, slab: int, slots: int, device_slots: int) -> None:
        command = [sys.executable, __file__, *map(str, (segment, slab, slots, device_slots))]
        pipe = subprocess.PIPE
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, pass_fds=(segment, slab), env=environment
        )

    def ask(self, do: str, **values: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the worker ended"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


if __name__ == "__main__":
    main(*sys.argv[1:])
