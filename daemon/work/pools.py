"""Threads for blocking calls, with a deadline for each call; results come back to the main loop.

Nothing interrupts a call.  Once it runs for SLOW_NS, another thread takes its thread's place, so that it keeps no place
from other engines' calls.  Past its deadline its engine goes on without it, and hears of it when it returns at last.
Each call that hangs may keep a core busy in Mooncake, so MAX_STUCK bounds them; but every engine may have one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from ..planning.runs import Lane
from .call_size import CallSize
from .calls import FETCHES, Call, CallKind, EngineCalls
from .link_share import LinkShare
from .rates import Meter, Rates

FETCH_NICE = 5
SLOW_NS = 1_000_000_000
LOOK_UPS = 8  # at a time; an engine has one in flight, so that few of them ever meet
ATTACH_THREADS = 4  # engines whose memory is reserved or freed at a time, beside those that take long
COPY_THREADS = 8  # to device memory: an engine's wait for each other, those of engines on other GPUs need not
# Fetches in flight where the lane is no `quick` one: each further one delays an urgent one.  Reads from memory do not
# spin, and between two of them alone a link would idle.
FEW = {Lane.MEMORY: 2, Lane.DISK: 1}
MAX_STUCK = 4  # calls past their deadline, of each kind; beyond, none is started for an engine that has one of them

_REPORTED = {
    "look_up": (CallKind.LOOK_UP,),
    "fetch": FETCHES,
    "save": (CallKind.SAVE,),
    "attach": (CallKind.ATTACH,),
    "copy": (CallKind.SLAB, CallKind.COPY),
}
_OF_THE_STORE = (CallKind.LOOK_UP, *FETCHES, CallKind.SAVE)


class Pool:
    """Up to `size` threads for calls of one kind, started when needed; calls begin in the order they were handed in."""

    def __init__(
        self,
        kind: CallKind,
        size: int,
        announce: Callable[[Callable[[], None]], None],
        clock_ns: Callable[[], int],
        meter: Meter | None = None,
    ) -> None:
        self._kind, self._size, self._announce, self._clock_ns, self._meter = kind, size, announce, clock_ns, meter
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self.calls: dict[Call, None] = {}  # handed in and not returned; the main loop's
        self._threads = 0
        self.stuck = 0

    @property
    def in_flight(self) -> int:
        """Those of them that are not past their deadline."""
        return len(self.calls) - self.stuck

    def crowd(self, engine: EngineCalls | None) -> int:
        """Count the calls in this engine's way: not those past their deadline, nor slow ones of others."""
        now = self._clock_ns()
        return sum(
            not call.stuck and (call.engine is engine or not call.runs_longer(SLOW_NS, now)) for call in self.calls
        )

    def exhausted(self, engine: EngineCalls | None) -> bool:
        """Whether so many calls hang, one of this engine's among them, that no other is started for it."""
        return self.stuck >= MAX_STUCK and any(call.stuck and call.engine is engine for call in self.calls)

    def oldest_ns(self) -> int | None:
        """Return when the oldest call that runs now began; None when none does. Any thread may call."""
        running = [call.started_ns for call in list(self.calls) if call.started_ns and not call.done]
        return min(running, default=None)

    def submit(self, call: Call) -> None:
        self.calls[call] = None
        if self._meter is not None:
            self._meter.began(self._clock_ns())
        if call.engine is not None:
            call.engine.running += 1
        if self.stuck and call.on_overdue is not None and self.exhausted(call.engine):
            self._announce(partial(self._refuse, call))
            return
        self._queue.put(call)
        if self._threads < len(self.calls):
            self._start_threads()

    def tick(self, now_ns: int, timeout_ns: int) -> None:
        """Give up the calls that run longer than `timeout_ns`, and those that may not start."""
        timed = [call for call in self.calls if call.on_overdue is not None]
        for call in timed:
            if not call.stuck and call.runs_longer(timeout_ns, now_ns):
                call.stuck = True
                self.stuck += 1
                if self._meter is not None:
                    self._meter.ended(now_ns)
                call.give_up()
        for call in timed if self.stuck else ():
            if self.exhausted(call.engine) and call.taken.acquire(blocking=False):  # not started
                self._refuse(call)
        self._start_threads()

    def _refuse(self, call: Call) -> None:
        if call in self.calls:
            del self.calls[call]
            if self._meter is not None:
                self._meter.ended(self._clock_ns())
            call.finish(TimeoutError(f"{self.stuck} calls hang: {self._kind.value}"))

    def close(self) -> None:
        """No new calls; the threads end as their calls do."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _start_threads(self) -> None:
        """Have as many threads as calls, up to `size`; calls that hang or are slow, and their threads, do not count."""
        slow = self._slow()
        while self._threads - slow < min(self._size, len(self.calls) - slow):
            name = f"{self._kind.value}-{self._threads + 1}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # none can be had now; `tick` tries again
                return
            self._threads += 1

    def _slow(self) -> int:
        now = self._clock_ns()
        return sum(call.stuck or call.runs_longer(SLOW_NS, now) for call in self.calls)

    def _work(self) -> None:
        if self._kind in FETCHES:
            # A get of Mooncake's spins while it waits; Mooncake's own threads, which carry the transfer, come first.
            with contextlib.suppress(OSError):  # an ordinary user cannot come back from a higher niceness
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), FETCH_NICE)
        while (call := self._queue.get()) is not None:
            if not call.taken.acquire(blocking=False):
                continue
            call.started_ns = self._clock_ns()
            try:
                call.result = call.run()
            except BaseException as error:  # handed to the main loop, whatever it is
                call.result = error
            call.done = True
            self._announce(partial(self._returned, call))
            del call

    def _returned(self, call: Call) -> None:
        """On the main loop."""
        del self.calls[call]
        self.stuck -= call.stuck
        if not call.stuck and self._meter is not None:
            self._meter.ended(self._clock_ns())
        if self._threads > self._size and self._threads - self._slow() > self._size:
            self._threads -= 1
            self._queue.put(None)  # one thread too many: any of them may go
        call.finish(call.result)


class Pools:
    """The dispatcher of calls: one pool for each kind. `fd` (an eventfd) announces results.

    `sizes`: how fast the fetches of each lane are, and how large.  `link_share`: when a put may start beside them.
    `rates`: how fast both were.
    """

    def __init__(
        self, fetch_threads: int, *, timeout_ns: int = 60_000_000_000, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.timeout_ns, self._clock_ns = timeout_ns, clock_ns
        self._finished: deque[Callable[[], None]] = deque()
        self.closed = False
        self.rung = False  # there are results for `run_finished`
        self._bell = threading.Lock()  # a thread that rings must not find the number closed, and another file's by then
        sizes = {**dict.fromkeys(FETCHES, fetch_threads), CallKind.LOOK_UP: LOOK_UPS, CallKind.COPY: COPY_THREADS}
        sizes[CallKind.ATTACH] = ATTACH_THREADS
        self.rates = Rates()
        meters = {**dict(zip(FETCHES, self.rates.fetches, strict=True)), CallKind.SAVE: self.rates.saves}
        self._pools = {
            kind: Pool(kind, sizes.get(kind, 1), self._announce, clock_ns, meters.get(kind)) for kind in CallKind
        }
        self.saves = self._pools[CallKind.SAVE].calls  # that run now, and removals
        self._fetch_threads = fetch_threads
        self.sizes = tuple(CallSize() for _ in Lane)
        self.link_share = LinkShare()

    def start(self, call: Call) -> None:
        self._pools[call.kind].submit(call)

    def fetch_room(self, lane: Lane, engine: EngineCalls) -> bool:
        """Whether another fetch of this lane may start for this engine."""
        pool, threads = self._pools[FETCHES[lane]], self._fetch_threads
        most = threads if self.sizes[lane].quick else min(threads, FEW[lane])
        return pool.crowd(engine) < most and not pool.exhausted(engine)

    def exhausted(self, lane: Lane, engine: EngineCalls) -> bool:
        """Whether so many fetches of this lane hang that none is started for this engine."""
        return self._pools[FETCHES[lane]].exhausted(engine)

    def save_room(self, engine: EngineCalls | None = None) -> bool:
        """Whether no put or removal runs but slow ones of other callers."""
        pool = self._pools[CallKind.SAVE]
        return not (pool.calls and pool.crowd(engine))

    @property
    def fetches_in_flight(self) -> int:
        return sum(self._pools[kind].in_flight for kind in FETCHES)

    def running(self) -> dict[str, int]:
        """When the oldest call that runs now began, of each kind (CLOCK_MONOTONIC ns). Any thread may call."""
        began = {
            name: [since for kind in kinds if self._pools[kind].calls and (since := self._pools[kind].oldest_ns())]
            for name, kinds in _REPORTED.items()
        }
        return {name: min(since) for name, since in began.items() if since}

    @property
    def stuck(self) -> int:
        """Calls past their deadline that have not returned."""
        return sum(pool.stuck for pool in self._pools.values())

    def run_finished(self) -> int:
        """On the main loop: hand in the results of finished calls; return how many. Their bell need wake nobody."""
        count = 0
        if self.rung:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.fd)
            self.rung = False  # not sooner: the read would clear the bell of a result that came in between
        while self._finished:
            self._finished.popleft()()
            count += 1
        return count

    def tick(self, now_ns: int) -> None:
        """On the main loop, a few times a second: give up the calls past their deadline."""
        for pool in self._pools.values():
            if pool.calls:
                pool.tick(now_ns, self.timeout_ns)

    def close(self) -> bool:
        """Wait for the calls in flight, as long as a call may take; False when some of the store's still hang."""
        self.closed = True
        for pool in self._pools.values():
            pool.close()
        deadline = self._clock_ns() + self.timeout_ns
        while (calls := sum(len(pool.calls) for pool in self._pools.values())) and self._clock_ns() < deadline:
            if not self.run_finished():
                time.sleep(0.01)
        if not calls:
            with self._bell:
                os.close(self.fd)
                self.fd = -1
        return not any(self._pools[kind].calls for kind in _OF_THE_STORE)

    def _announce(self, callback: Callable[[], None]) -> None:
        self._finished.append(callback)
        if self.rung:  # the loop takes all that is there, after it cleared the bell
            return
        with self._bell:
            if self.fd >= 0:
                self.rung = True
                os.eventfd_write(self.fd, 1)
