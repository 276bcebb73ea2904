"""One epoch, an attachment to the daemon: the mapped memory of a scheduler or a worker, and the parts that use it.

An epoch never changes and is dropped by reference: its holder can use the memory safely, also when the daemon is gone
and a newer epoch has taken its place.  Its end unmaps nothing: the link unmaps `segment` on its own thread, once no
view stands on it any more.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from ...shmring._atomics import Words
from ...shmring.credits import CreditTaker
from ...shmring.doorbell import Doorbell
from ...shmring.errors import SegmentCorrupt, SegmentError
from ...shmring.flags import FlagAllocator
from ...shmring.gpu.cuda import Device
from ...shmring.layout import Layout
from ...shmring.liveness import Liveness, PeerState, PeerStatus
from ...shmring.ring import Producer
from ...shmring.segment import Segment
from ...shmring.wire.attach import Attached, Mapped
from ..copy.device_cache import DeviceCache
from ..copy.paged import Rows

ALIVE = int(PeerStatus.ALIVE)


class SchedulerEpoch:
    """The control segment of one epoch, from the engine's side."""

    def __init__(self, attached: Attached, segment: Segment, doorbell: Doorbell) -> None:
        """Take over `segment` and `doorbell`. Raises SegmentCorrupt."""
        # The holder of an epoch may ring: until it is dropped, no other file may get the doorbell's number.
        weakref.finalize(self, doorbell.close)
        layout = Layout.read(segment.buffer)
        found = (layout.epoch, layout.slot_count, layout.device_slots)
        expected = (attached.epoch, attached.slot_count, attached.device_slots)
        if found != expected:
            raise SegmentCorrupt(
                f"segment is of another epoch: epoch, slot_count, device_slots={found} expected={expected}"
            )
        self.number, self.use_again_ns = layout.epoch, attached.use_again_ms * 1_000_000
        words = Words(segment.buffer)
        self.flags = FlagAllocator(segment.buffer, words, layout)
        self.credits = CreditTaker(segment.buffer, words, layout)
        self.producer = Producer(segment.buffer, words, layout, doorbell.ring)
        self.liveness = Liveness(words, consumer=False)
        self.liveness.set_state(PeerState.ACTIVE)
        self.status = self.liveness.status  # of the daemon: status(now_ns) is ALIVE while it serves this epoch
        self.segment = segment
        segment.close()  # its descriptor; the views above keep the memory mapped

    @classmethod
    def map(cls, attached: Attached, fds: Sequence[int]) -> SchedulerEpoch:
        """Map the memory that came with Attached; owns the descriptors. Raises SegmentError, SegmentCorrupt."""
        _check_fds(fds, 2)
        doorbell = Doorbell(fds[1])
        with ExitStack() as undo:
            undo.callback(doorbell.close)
            undo.callback((segment := Segment(fds[0], attached.segment_bytes)).close)
            made = cls(attached, segment, doorbell)
            undo.pop_all()
        return made

    def alive(self, now_ns: int) -> bool:
        """Whether the daemon serves this epoch at that time (CLOCK_MONOTONIC)."""
        return self.status(now_ns) == ALIVE

    def mapped(self) -> Mapped:
        return Mapped(epoch=self.number)

    def tick(self, now_ns: int) -> None:
        """Beat, about once a second."""
        self.liveness.beat(now_ns)

    def ended(self) -> None:
        """The control connection is closed."""
        self.liveness.peer_is_gone()


class WorkerEpoch:
    """The staging slots of one rank in one epoch.

    `rows` is a [slot_count, slot_bytes] view of those in host memory; the device cache's slots follow them.
    """

    def __init__(
        self, attached: Attached, segment: Segment, device: Device | None = None, slab: int | None = None
    ) -> None:
        """Take over `segment` and `slab`, the descriptor of the device slots. Raises SegmentCorrupt."""
        if attached.slot_bytes * attached.slot_count > attached.segment_bytes or attached.slot_bytes == 0:
            raise SegmentCorrupt(
                f"slots do not fit the segment: slot_bytes={attached.slot_bytes} slot_count={attached.slot_count} "
                f"segment_bytes={attached.segment_bytes}"
            )
        self.number = attached.epoch
        # A NumPy view, not torch's: it pins the mapping, torch.frombuffer would let close() unmap under the tensor.
        flat = np.frombuffer(segment.buffer, dtype=np.uint8, count=attached.slot_bytes * attached.slot_count)
        self.rows: Rows = flat.reshape(attached.slot_count, attached.slot_bytes)
        self.segment = segment
        segment.close()  # its descriptor; `rows` keeps the memory mapped
        self.device_cache: DeviceCache | None = None
        if device is not None:
            self.device_cache = DeviceCache(device, self.rows, attached, slab)
            # Not at the process's end: the driver gives everything back then, and the interpreter would stop the thread
            # in the middle of a call.
            weakref.finalize(self, self.device_cache.end).atexit = False
        elif slab is not None:
            os.close(slab)

    @classmethod
    def map(cls, attached: Attached, fds: Sequence[int], device: Device | None = None) -> WorkerEpoch:
        """Map the memory that came with Attached; owns the descriptors. Raises SegmentError, SegmentCorrupt.

        Without device slots, where they cannot be mapped; `mapped` reports it.
        """
        _check_fds(fds, 2 if attached.device_slots else 1)
        slab = fds[1] if attached.device_slots else None
        with ExitStack() as undo:
            if slab is not None:
                undo.callback(os.close, slab)
            undo.callback((segment := Segment(fds[0], attached.segment_bytes)).close)
            made = cls(attached, segment, device, slab)
            undo.pop_all()
        return made

    def mapped(self) -> Mapped:
        return Mapped(epoch=self.number, device=self.device_cache is not None and self.device_cache.slots > 0)

    def tick(self, now_ns: int) -> None:
        """Check that the GPU answers, about once a second; only the scheduler's epoch has a heartbeat word."""
        if self.device_cache is not None:
            self.device_cache.tick()

    def ended(self) -> None:
        """Nothing to mark: the mapping stays until the scheduler side retires the epoch."""


def _check_fds(fds: Sequence[int], count: int) -> None:
    if len(fds) != count:
        for fd in fds:
            socket.close(fd)
        raise SegmentError(f"descriptors are missing: descriptors={len(fds)} expected={count}")
