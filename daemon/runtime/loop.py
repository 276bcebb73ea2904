"""The main loop: reads rings, hands results in, starts fetches, and sleeps until there is something to do.

While an engine has requests in the queue, or had a moment ago, it looks at that ring by itself, and no push needs a
bell.  How often follows from the CPU time that a look takes here, and from the length of the queue: a hint that comes
behind many others can wait.  Quiet engines ring their doorbells.
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence

from ...shmring.ring import Consumer
from ..control.epochs import Shared
from ..control.server import Control
from ..planning.planner import Planner
from ..planning.runs import Lane
from ..telemetry.events import Ending
from .signals import Signals

DRAIN_NS = 2_000_000  # for the records of one ring in a turn: they cost what the engine makes them cost
EVENTS_PER_TURN = 16  # readable descriptors that are handled before the rings are read again
TICK_NS = 100_000_000
IDLE_TICK_NS = 500_000_000
IDLE_AFTER_NS = 5_000_000_000  # since the loop had something to do
QUIET_NS = 20_000_000  # after the last record of engines without a request
ASKING_NS = 3_000_000  # until the next turn while users wait to ask
LOOKS_SHARE = 0.02  # of a core, for all looks
LOOK_NS = range(150_000, 2_000_000)  # between two of them
QUEUE = range(4, 16)  # requests: behind so many looks are rare, up to four times as rare
_NEWEST = 0.1  # weight of the newest look in the average


class Loop:
    """Call `turn` again and again."""

    def __init__(self, shared: Shared, control: Control, epoll: select.epoll, signals: Signals) -> None:
        self._shared, self._control, self._epochs = shared, control, control.epochs
        self._epoll, self._signals = epoll, signals
        self._look_ns = 0.0  # CPU time of one look
        self._active_ns = 0  # when there was something to do last
        self.tick_ns = IDLE_TICK_NS  # the period of the work beside the loop; an idle daemon's wake-ups are its cost
        self._next = 0  # the engine whose turn it is to start a fetch
        self._saver = 0  # and a put
        epoll.register(shared.pools.fd, select.EPOLLIN)

    def turn(self, now_ns: int, until_ns: int) -> None:
        """Do the work that is there, and wait for more until the next tick."""
        pools, control = self._shared.pools, self._control
        if pools.rung:
            pools.run_finished()
        if (control.reserving or control.asking) and control.carry_on(now_ns):
            until_ns = min(until_ns, now_ns + ASKING_NS)
        if any(True in epoch.planner.ready for epoch in self._epochs.all):
            self._start_fetches()
        if pools.saves or pools.link_share.competing or any(epoch.saver.puts for epoch in self._epochs.all):
            self._start_saves(now_ns)
        for epoch in [each for each in self._epochs.all if each.broken]:
            control.handshake.end(epoch, Ending.DAEMON_FAULT)
        epochs = self._epochs.all  # without those that ended now
        busy = [epoch for epoch in epochs if epoch.planner.requests or now_ns - epoch.heard_ns < QUIET_NS]
        quiet = [epoch.channel.ring for epoch in epochs if epoch not in busy]
        # Every quiet ring announces the sleep, also behind one that is not empty.
        empty = [ring.prepare_sleep() for ring in quiet]
        owing = any(epoch.owes for epoch in epochs)
        if busy and all(empty):
            if owing:  # an engine on the same core first takes what was published for it
                select.select([self._epoll], [], [], LOOK_NS.start / 1e9)
            else:
                waits = any(epoch.planner.requests for epoch in busy)
                quiet_ns = until_ns if waits else max(epoch.heard_ns for epoch in busy) + QUIET_NS
                rings, planners = [epoch.channel.ring for epoch in busy], [epoch.planner for epoch in busy]
                self._look(rings, planners, min(until_ns, quiet_ns))
        wait_s = max(0, until_ns - time.monotonic_ns()) / 1e9
        events = self._epoll.poll(0.0 if busy or owing or not all(empty) else wait_s, EVENTS_PER_TURN)
        for ring in quiet:
            ring.wake()
        for epoch in epochs:  # at once: an engine may wait for the answer
            if epoch.owes or epoch.channel.ring.waiting:
                epoch.drain(time.monotonic_ns() + DRAIN_NS)
        # The kernel goes round: a descriptor that was returned stands behind those that were not.
        fds = [fd for fd, _ in events]
        if pools.fd in fds:  # also one that rang for a result which was taken before it rang
            pools.rung = True
            fds.remove(pools.fd)
        if (fds and self._handle(fds, time.monotonic_ns())) or busy:
            self._active_ns = now_ns
        self.tick_ns = IDLE_TICK_NS if now_ns - self._active_ns > IDLE_AFTER_NS else TICK_NS

    def _look(self, rings: Sequence[Consumer], planners: Sequence[Planner], until_ns: int) -> None:
        """Look at these rings now and then, until one has a record, a descriptor is readable, or the time is over."""
        queue = QUEUE.stop
        for planner in planners:
            # The next record may bring room for a request that wants it.
            wants_room = any(planner.starving) and not any(planner.ready)
            queue = min(queue, 0 if wants_room else len(planner.requests))
        rarer = max(queue, QUEUE.start) / QUEUE.start
        used_ns, readable = time.thread_time_ns(), False
        while not readable and not any(ring.waiting for ring in rings) and time.monotonic_ns() < until_ns:
            wait_ns = rarer * min(max(LOOK_NS.start, self._look_ns / LOOKS_SHARE), LOOK_NS.stop)
            # epoll itself rounds its timeout up to a millisecond.
            readable = bool(select.select([self._epoll], [], [], wait_ns / 1e9)[0])
            before_ns, used_ns = used_ns, time.thread_time_ns()
            self._look_ns += _NEWEST * (used_ns - before_ns - self._look_ns)

    def _start_fetches(self) -> None:
        """Start fetches of each lane, one engine after the other, while the lane has room; then those ahead.

        A request may go from the second lane back to the first: nothing else would wake the loop for it.
        """
        epochs, before = self._epochs.all, list[list[bool]]()
        while before != (ready := [epoch.planner.ready[:] for epoch in epochs]):
            before = ready
            for lane in Lane:
                idle = 0
                while idle < len(epochs):
                    self._next += 1
                    epoch = epochs[self._next % len(epochs)]
                    idle = 0 if epoch.planner.ready[lane] and epoch.start_fetch(lane) else idle + 1
                for epoch in epochs:
                    if epoch.planner.ready[lane]:
                        epoch.start_fetch(lane, ahead=True)

    def _start_saves(self, now_ns: int) -> None:
        """Start the next put, or removal, of the engines in turn, where loads leave the link to it."""
        pools, epochs = self._shared.pools, self._epochs.all
        waiting = any(epoch.saver.puts and epoch.contain(epoch.saver.waiting, False, now_ns) for epoch in epochs)
        both = (waiting or not pools.save_room()) and pools.fetches_in_flight > 0
        pools.link_share.compete(now_ns, both=both)
        for number in range(self._saver, self._saver + len(epochs)) if waiting else ():
            if epochs[number % len(epochs)].start_save():
                self._saver = (number + 1) % len(epochs)
                break

    def _handle(self, fds: list[int], now_ns: int) -> bool:
        """Clear the descriptors that only woke the loop, and let the control socket's part handle the others.

        Return whether another process wanted something.
        """
        doorbells = {epoch.memory.doorbell.fd: epoch.memory.doorbell for epoch in self._epochs.all}
        others = []
        for fd in fds:
            if fd == self._signals.fd:
                self._signals.clear()
            elif fd in doorbells:
                doorbells[fd].clear()
            else:
                others.append(fd)
        if others:
            self._control.ready(others, now_ns)
        return bool(others) or not doorbells.keys().isdisjoint(fds)
