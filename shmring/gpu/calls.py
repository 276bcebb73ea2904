"""Calls into a device's driver that run now: one that does not come back cannot be interrupted, so its device is left
alone until it does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .cuda import DeviceError


class DeviceCalls:
    """Those of one process. From any thread."""

    def __init__(self) -> None:
        self._running: dict[object, tuple[frozenset[str], float]] = {}

    @contextmanager
    def to(self, uuids: Iterable[str]) -> Iterator[None]:
        """A call to these devices, from its start to its end."""
        call = object()
        self._running[call] = (frozenset(uuids), time.monotonic())
        try:
            yield
        finally:
            del self._running[call]

    def check(self, uuids: Iterable[str], timeout_s: float) -> None:
        """Raises DeviceError where a call to one of these devices has been running for longer than that."""
        wanted, now = frozenset(uuids), time.monotonic()
        for called, since in list(self._running.values()):
            if now - since > timeout_s and (silent := sorted(wanted & called)):
                raise DeviceError(f"the GPU does not answer: uuid={','.join(silent)} call_age_s={now - since:.1f}")


calls = DeviceCalls()
