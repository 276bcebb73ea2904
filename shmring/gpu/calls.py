"""Running calls into a device's driver: nobody can interrupt one that hangs, so its device is left alone meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..errors import DeviceError


class DeviceCalls:
    """The running calls of one process; thread-safe."""

    def __init__(self) -> None:
        self._running: dict[object, tuple[frozenset[str], float]] = {}

    @contextmanager
    def to(self, uuids: Iterable[str]) -> Iterator[None]:
        """Register one call to these devices for the length of the block."""
        call = object()
        self._running[call] = (frozenset(uuids), time.monotonic())
        try:
            yield
        finally:
            del self._running[call]

    def check(self, uuids: Iterable[str], timeout_s: float) -> None:
        """Raise DeviceError when a call to one of these devices has run for longer than `timeout_s`."""
        wanted, now = frozenset(uuids), time.monotonic()
        for called, since in list(self._running.values()):
            if now - since > timeout_s and (silent := sorted(wanted & called)):
                raise DeviceError(f"the GPU does not answer: uuid={','.join(silent)} call_age_s={now - since:.1f}")


calls = DeviceCalls()
