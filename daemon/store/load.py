"""Makes calls for so long, several at a time, and says how long each took."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def loaded(
    what: str, call: Callable[[int, int], object], *, parallel: int, seconds: float, most: int | None = None
) -> dict[str, Any]:
    """Return `what`, the `ms` of each call, and the `seconds` of all of them.

    `call` gets the number of its thread, of `parallel` ones, and its own.  Each thread makes one call at least, and
    together they make `most`.  An exception of a call ends the load.
    """
    numbers, lock, took = iter(range(most) if most is not None else itertools.count()), threading.Lock(), list[float]()
    began = time.perf_counter()

    def work(worker: int) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            started = time.perf_counter()
            call(worker, number)
            ended = time.perf_counter()
            took.append((ended - started) * 1e3)
            if ended - began >= seconds:
                return

    with ThreadPoolExecutor(parallel) as threads:
        list(threads.map(work, range(parallel)))
    return {"what": what, "ms": took, "seconds": time.perf_counter() - began}
