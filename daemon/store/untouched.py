"""How much of the embedded store's memory has no pages yet: the kernel gives them only as values come.

What is available on the machine counts that memory as free, so the ledger of engines' staging must subtract it.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_CHUNK_BYTES = 64 << 20  # a look at one takes 40 us, and once all of it has pages none
_mincore = ctypes.CDLL(None).mincore  # without the interpreter's lock
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
Area = tuple[int, int]


def anonymous_areas(maps: Path = Path("/proc/self/maps")) -> list[Area]:
    """Return (start, end) of this process's writable memory that belongs to no file, in order."""
    fields = (line.split() for line in maps.read_text().splitlines())
    areas = (each[0].split("-") for each in fields if len(each) == 5 and each[1].startswith("rw-p"))
    return [(int(start, 16), int(end, 16)) for start, end in areas]


class Untouched:
    """Memory of `size_bytes` that is taken after this was made; `opened` then looks for it. `bytes`: as of `look`."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = self._size_bytes = size_bytes
        self._before = anonymous_areas()
        self._chunks: list[Area] = []
        self._others_bytes = 0  # untouched, and not of this memory: the kernel joins areas, such as threads' stacks

    def opened(self) -> None:
        """Nothing of the memory has pages yet. Where no area that came since is large enough, it counts in full."""
        new = [area for area in _without(anonymous_areas(), self._before) if area[1] - area[0] >= self._size_bytes]
        chunks = [(at, min(at + _CHUNK_BYTES, end)) for start, end in new for at in range(start, end, _CHUNK_BYTES)]
        self._others_bytes = max(0, sum(_untouched(*chunk) for chunk in chunks) - self._size_bytes)
        self._chunks = chunks

    def look(self) -> None:
        """Count again; any thread may call, one at a time."""
        if self._chunks:
            left = {chunk: _untouched(*chunk) for chunk in self._chunks}
            self._chunks = [chunk for chunk, count in left.items() if count]
            self.bytes = min(self._size_bytes, max(0, sum(left.values()) - self._others_bytes))


def _untouched(start: int, end: int) -> int:
    """Return how many bytes have no page; 0 for memory that is gone."""
    pages = (end - start) // mmap.PAGESIZE
    found = (ctypes.c_char * pages)()
    if _mincore(start, end - start, found):
        return 0
    return found.raw.count(b"\0") * mmap.PAGESIZE


def _without(areas: list[Area], others: list[Area]) -> list[Area]:
    """Return the parts of these areas that are in none of the others; both in order."""
    left = []
    for start, end in areas:
        for other_start, other_end in others:
            if other_end > start and other_start < end:
                if other_start > start:
                    left.append((start, other_start))
                start = max(start, other_end)
        if start < end:
            left.append((start, end))
    return left
