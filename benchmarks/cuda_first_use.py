"""Measures a process's first use of the GPU, and how long its other threads stand still meanwhile.

    python -m benchmarks.cuda_first_use

A daemon's main loop stands still for the longest gap when the first engine on a GPU attaches.  Prints milliseconds, as
one JSON object: the gap should be far below the whole, since `shmring/gpu/driver.py` lets other threads run.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda


class Gaps(threading.Thread):
    """Wakes every millisecond; `longest_s` is the longest time between two wakings."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(0.001):
            now = time.perf_counter()
            self.longest_s, last = max(self.longest_s, now - last), now

    def end(self) -> None:
        self._ended.set()
        self.join()


def main() -> int:
    gaps = Gaps()
    gaps.start()
    begun = time.perf_counter()
    try:
        cuda.open_device(cuda.uuid_of("cuda", 0)).free_bytes()
    except DeviceError as error:
        print(f"no CUDA device: {error}", file=sys.stderr)
        return 1
    whole = time.perf_counter() - begun
    gaps.end()
    print(json.dumps({"first_use_ms": round(whole * 1e3), "longest_gap_ms": round(gaps.longest_s * 1e3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
