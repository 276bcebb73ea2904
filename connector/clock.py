"""The clock of the scheduler side: CLOCK_MONOTONIC, and the sleep between two looks of an idle engine."""

import time
from functools import partial
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int: ...
    def pause(self) -> None: ...


class SystemClock:
    now_ns = staticmethod(time.monotonic_ns)
    pause = staticmethod(partial(time.sleep, 50e-6))  # the kernel makes it about twice as long
