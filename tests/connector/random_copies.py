"""Launches of the copy kernel on random layouts, as C++ under AddressSanitizer and UndefinedBehaviorSanitizer.

    LD_PRELOAD=$(g++ -print-file-name=libasan.so) python -m tests.connector.random_copies FOLDER SEED LAUNCHES

Each buffer has exactly its bytes, between red zones; the bytes are compared with a plain copy.  A process of its own,
since torch does not run with the sanitizers.
"""

from __future__ import annotations

import ctypes
import random
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.modules.setdefault("torch", types.ModuleType("torch"))

from kvprefetch.connector.copy.cuda_copy import SOURCE, STEP, THREADS, grid_for, piece_table  # noqa: E402
from kvprefetch.connector.copy.paged import Piece  # noqa: E402
from tests.support.fakecuda.kernel import SANITIZED, compiled  # noqa: E402

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]


class Segment(NamedTuple):
    """A part of each block's bytes: `offset` in the first block's, `stride` from block to block."""

    buffer: int
    stride: int
    offset: int
    length: int


class Layout:
    """A paged cache of random pieces, and slots in host and device memory."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: list[int] = []
        self.blocks = rng.randint(1, 9)
        self.segments: list[Segment] = []
        self.pieces: list[Piece] = []
        self.caches = [self._piece() for _ in range(rng.randint(1, 4))]
        self.slot_bytes = sum(each.length for each in self.segments)
        self.table, self.units = piece_table(self.pieces)
        self.host, self.device = (self._buffer(rng.randint(1, 5) * self.slot_bytes) for _ in range(2))

    def _buffer(self, size: int) -> Any:
        self._taken.append(libc.malloc(size))
        data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._taken[-1]))
        data[:] = np.frombuffer(self._rng.randbytes(size), np.uint8)
        return data

    def _piece(self) -> Any:
        rng = self._rng
        unit = rng.choice([1, 2, 3, 4, 8, 16, 48])
        length, segments = unit * rng.randint(1, rng.choice([5, 300, 700])), rng.randint(1, 5)
        step = length + unit * rng.randint(0, 3)
        distance, stride = step, step * segments + unit * rng.randint(0, 2)  # a block's segments beside each other
        if rng.random() < 0.5:
            distance, stride = step * self.blocks, step  # a segment's blocks beside each other
        data = self._buffer((self.blocks - 1) * stride + (segments - 1) * distance + length)
        self.pieces.append(Piece(data.ctypes.data, stride=stride, length=length, segments=segments, distance=distance))
        number = len(self.pieces) - 1
        self.segments += [Segment(number, stride, at * distance, length) for at in range(segments)]
        return data

    def launch(self, run: Any) -> None:
        """Copy random blocks and slots, and assert that these bytes have changed and no others."""
        rng = self._rng
        hosts, all_slots = len(self.host) // self.slot_bytes, (len(self.host) + len(self.device)) // self.slot_bytes
        count = rng.randint(1, min(self.blocks, all_slots))
        blocks, slots = rng.sample(range(self.blocks), count), rng.sample(range(all_slots), count)
        table = self._buffer(self.table.nbytes)
        table[:] = self.table.view(np.uint8)
        gather = rng.random() < 0.5
        step = np.zeros(1, STEP)
        step["pieces"], step["units"], step["slot_bytes"] = table.ctypes.data, self.units, self.slot_bytes
        step["host"], step["device"], step["host_slots"] = self.host.ctypes.data, self.device.ctypes.data, hosts
        step["count"], step["gather"] = count, gather
        step["slots"][0, :count], step["blocks"][0, :count] = slots, blocks
        wanted = [each.copy() for each in (*self.caches, self.host, self.device)]
        for slot, block in zip(slots, blocks, strict=True):
            rows = wanted[-2] if slot < hosts else wanted[-1]
            at = (slot if slot < hosts else slot - hosts) * self.slot_bytes
            for part in self.segments:
                paged = wanted[part.buffer][block * part.stride + part.offset :][: part.length]
                row = rows[at : at + part.length]
                (row if gather else paged)[:] = paged if gather else row
                at += part.length
        run(rng.choice([1, 2, 7, grid_for(self.units, count, 4)]), THREADS, ctypes.c_void_p(step.ctypes.data))
        found = (*self.caches, self.host, self.device)
        assert all((a == b).all() for a, b in zip(wanted, found, strict=True)), "bytes differ from a plain copy"

    def close(self) -> None:
        for address in self._taken:
            libc.free(address)


def main(folder: str, seed: str, launches: str) -> None:
    library = ctypes.CDLL(str(compiled(SOURCE, Path(folder), SANITIZED)))
    rng = random.Random(int(seed))
    for _ in range(int(launches)):
        layout = Layout(rng)
        layout.launch(library.fakecuda_run_kvprefetch_copy)
        layout.close()
    print("equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
