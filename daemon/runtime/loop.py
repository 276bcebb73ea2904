"""The main loop: reads rings, hands results in, starts fetches, and sleeps until a descriptor is readable."""

from __future__ import annotations

import select
import time

from ..control.epochs import Shared
from ..control.server import Control
from ..planning.planner import Lane
from ..telemetry.events import Ending
from .signals import Signals

DRAIN_LIMIT = 256  # records of one ring in a turn
EVENTS_PER_TURN = 16  # readable descriptors that are handled before the rings are read again
TICK_NS = 100_000_000
_POLL_NS = 1_000_000  # how often a busy loop asks for readable descriptors


class Loop:
    """Call `turn` again and again; a turn lasts TICK_NS at most."""

    def __init__(self, shared: Shared, control: Control, epoll: select.epoll, signals: Signals) -> None:
        self._shared, self._control, self._epochs = shared, control, control.epochs
        self._epoll, self._signals = epoll, signals
        self._worked_ns = self._polled_ns = 0
        self._next = 0  # the engine whose turn it is to start a fetch
        epoll.register(shared.pools.fd, select.EPOLLIN)

    def turn(self, now_ns: int) -> None:
        """Do the work that is there. Sleep when there is none, and was none for `spin_us`."""
        epochs = self._epochs.attached()
        work = self._shared.pools.run_finished()
        for epoch in epochs:
            work += epoch.drain(DRAIN_LIMIT)
        self._start_fetches()
        for epoch in self._epochs.corrupt():
            self._control.end(epoch, Ending.ENGINE_CORRUPT)
        if work:
            self._worked_ns = now_ns
        busy = now_ns - self._worked_ns < self._shared.config.spin_us * 1000
        if busy and now_ns - self._polled_ns < _POLL_NS:
            return
        self._polled_ns = now_ns
        epochs = self._epochs.attached()  # without those that ended now
        # Every ring announces the sleep, also behind one that is not empty.
        empty = [epoch.channel.ring.prepare_sleep() for epoch in epochs] if not busy else [False]
        # The kernel goes round: a descriptor that was returned stands behind those that were not.
        events = self._epoll.poll(TICK_NS / 1e9 if all(empty) else 0.0, EVENTS_PER_TURN)
        for epoch in epochs:
            epoch.channel.ring.wake()
        self._handle([fd for fd, _ in events], time.monotonic_ns())

    def _start_fetches(self) -> None:
        """Start fetches of each lane, one engine after the other, while the lane has room; then those that warm."""
        epochs = self._epochs.attached()
        for lane in Lane:
            idle = 0
            while idle < len(epochs):
                self._next += 1
                idle = 0 if epochs[self._next % len(epochs)].start_fetch(lane) else idle + 1
            for epoch in epochs:
                epoch.start_warming(lane)

    def _handle(self, fds: list[int], now_ns: int) -> None:
        """Clear the descriptors that only woke the loop, and let the control socket's part handle the others."""
        doorbells = {epoch.memory.doorbell.fd: epoch.memory.doorbell for epoch in self._epochs.attached()}
        others = []
        for fd in fds:
            if fd == self._shared.pools.fd:
                self._shared.pools.clear_bell()
            elif fd == self._signals.fd:
                self._signals.clear()
            elif fd in doorbells:
                doorbells[fd].clear()
            else:
                others.append(fd)
        self._control.ready(others, now_ns)
