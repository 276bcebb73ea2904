"""The device cache of one engine: when it is ready, what to pin and copy next, and what ends it. Pure.

Whatever goes wrong with a device ends promotion for this engine and nothing else: every block is in host memory too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..planning.promotion import CopyOrder, Promotions
from .device import DeviceStaging

if TYPE_CHECKING:  # what tests on a GPU do without (docs/BENCHMARKS.md)
    from ...shmring.wire.attach import Mapped

COPY_BYTES = 32 << 20  # of one job: the Python around a copy must not count beside it
IN_FLIGHT = 2  # copy jobs of one engine: one runs, and the next is ready when it ends
_SILENT = {
    "open": "the GPU does not answer: it was asked to get ready for copies",
    "pin": "the GPU does not answer: it was asked to pin host memory",
    "copy": "a copy did not come back in time",
}


class DeviceJob(NamedTuple):
    """One use of the device, on a thread; `run` returns what went wrong, or nothing."""

    kind: Literal["open", "pin", "copy"]
    run: Callable[[], str]
    order: CopyOrder | None = None


class Promoter:
    """Says what to do with the device. Without one it says nothing."""

    def __init__(self, device: DeviceStaging | None, promotions: Promotions) -> None:
        self._device, self._promotions = device, promotions
        self._setup: deque[DeviceJob] = deque()  # what is left to do beside copies, one after the other
        self._setting_up = False
        self._copying = 0
        self.ready = False  # copies are made
        self.on = device is not None  # until it fails

    def start(self, workers: Sequence[Mapped]) -> str:
        """All ranks mapped the epoch, and `workers` say whether they have device slots.

        Returns why the device is off from now on, if it is.
        """
        if self._device is None:
            return ""
        for rank, mapped in enumerate(workers):
            if not mapped.device:
                return self._end(f"a worker has no device slots: rank={rank}")
        self._setup.append(DeviceJob("open", self._device.open))
        return ""

    def next_job(self) -> DeviceJob | None:
        """Return what to do now: get ready, then pin one piece after the other, with copies in between."""
        if not self.on or self._device is None:
            return None
        if self._setup and not self._setting_up:
            self._setting_up = True
            return self._setup.popleft()
        if self.ready and self._copying < IN_FLIGHT and (order := self._promotions.next_order()) is not None:
            self._copying += 1
            return DeviceJob("copy", partial(self._device.copy, order.slots), order)
        return None

    def done(self, job: DeviceJob, error: str) -> str:
        """Take what a job returned. Returns why the device is off from now on, if it is."""
        if job.order is not None:
            self._copying -= 1
            self._promotions.copied(job.order, ok=not error)
            return self._end(error) if error else ""
        self._setting_up = False
        if job.kind == "pin":
            if error:
                self._setup.clear()  # copies work without, through a bounce buffer
            return ""
        if not error and self.on and self._device is not None:
            self.ready = True
            self._setup.extend(DeviceJob("pin", partial(self._device.pin, *piece)) for piece in self._device.pieces())
        return self._end(error) if error else ""

    def overdue(self, job: DeviceJob) -> str:
        """A job is past its deadline. Returns why the device is off from now on, if it is."""
        return self._end(_SILENT[job.kind])

    def _end(self, error: str) -> str:
        """Once, and for this epoch."""
        if not self.on:
            return ""
        self.ready = self.on = False
        self._promotions.close()
        return error
