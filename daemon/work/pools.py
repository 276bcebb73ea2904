"""Threads for blocking store calls, with a deadline for each call; results come back to the main loop.

A call cannot be interrupted.  One that runs for SLOW_NS keeps no place from those of other engines: another thread
takes its thread's place.  One that is past its deadline is given up: its engine goes on without it, and hears of it
when it returns at last.  How many may hang at a time is bounded, since each waits in Mooncake with a core of its own;
but whatever the others' do, an engine may have one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..planning.blocks import Lane
from .concurrency import Width

FETCH_NICE = 5
SLOW_NS = 1_000_000_000
LOOK_UPS = 8  # at a time; an engine has one in flight, so that few of them ever meet
COPY_THREADS = 8  # to device memory: an engine's wait for each other, those of engines on other GPUs need not
MAX_STUCK = 4  # calls past their deadline, of each kind; beyond, none is started for an engine that has one of them

Done = Callable[[Future[Any]], None]
Owner = object  # whose call it is: one engine's Jobs; None is the daemon itself


class _Job:
    """One call. Its future's own lock decides whether it starts or is cancelled."""

    def __init__(self, work: Callable[[], Any], done: Done, overdue: Callable[[], None] | None, owner: Owner) -> None:
        self.work, self.done, self.overdue, self.owner = work, done, overdue, owner
        self.started_ns = 0
        self.stuck = False
        self.future: Future[Any] = Future()

    def runs_longer(self, than_ns: int, now_ns: int) -> bool:
        return self.started_ns > 0 and now_ns - self.started_ns >= than_ns and not self.future.done()


class Pool:
    """Up to `size` threads, started when needed, that run calls in the order they were handed in."""

    def __init__(
        self, name: str, size: int, announce: Callable[[Callable[[], None]], None], clock_ns: Callable[[], int],
        *, nice: int = 0,
    ) -> None:  # fmt: skip
        self._name, self._size, self._announce, self._clock_ns, self._nice = name, size, announce, clock_ns, nice
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._jobs: dict[_Job, None] = {}  # handed in and not returned; the main loop's
        self._threads = 0
        self.stuck = 0

    @property
    def calls(self) -> int:
        """Handed in and not returned."""
        return len(self._jobs)

    @property
    def in_flight(self) -> int:
        """Those of them that are not past their deadline."""
        return len(self._jobs) - self.stuck

    def crowd(self, owner: Owner) -> int:
        """The same as this owner has to count them: those of others that have become slow are not in its way."""
        now = self._clock_ns()
        return sum(not job.stuck and (job.owner is owner or not job.runs_longer(SLOW_NS, now)) for job in self._jobs)

    def exhausted(self, owner: Owner) -> bool:
        """So many calls hang, one of this owner's among them, that no other is started for it."""
        return self.stuck >= MAX_STUCK and any(job.stuck and job.owner is owner for job in self._jobs)

    def oldest_ns(self) -> int | None:
        """When the oldest call that runs now began; None when none does. From any thread."""
        running = [job.started_ns for job in list(self._jobs) if job.started_ns and not job.future.done()]
        return min(running, default=None)

    def submit(
        self, work: Callable[[], Any], done: Done, overdue: Callable[[], None] | None = None, owner: Owner = None
    ) -> None:
        """Run `work` on a thread, then `done` on the main loop; before it `overdue`, once, when it takes too long."""
        job = _Job(work, done, overdue, owner)
        self._jobs[job] = None
        if overdue is not None and self.exhausted(owner):
            self._announce(partial(self._refuse, job))
            return
        self._queue.put(job)
        self._start_threads()

    def check(self, now_ns: int, timeout_ns: int) -> None:
        """On the main loop: give up the calls that run longer than `timeout_ns`, and those that may not start."""
        for job in [job for job in self._jobs if job.overdue is not None and not job.stuck]:
            if job.runs_longer(timeout_ns, now_ns):
                job.stuck = True
                self.stuck += 1
                assert job.overdue is not None
                job.overdue()
        for job in [job for job in self._jobs if job.overdue is not None and self.exhausted(job.owner)]:
            if job.future.cancel():  # not started
                self._refuse(job)
        self._start_threads()

    def _refuse(self, job: _Job) -> None:
        if job in self._jobs:
            del self._jobs[job]
            never: Future[Any] = Future()
            never.set_exception(TimeoutError(f"{self.stuck} calls hang: {self._name}"))
            job.done(never)

    def close(self) -> None:
        """No new calls; the threads end as their calls do."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _start_threads(self) -> None:
        """As many as there are calls, up to `size`; calls that hang or have become slow, and their threads, beside."""
        slow = self._slow()
        while self._threads - slow < min(self._size, len(self._jobs) - slow):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{self._threads + 1}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # none can be had now; `check` tries again
                return
            self._threads += 1

    def _slow(self) -> int:
        now = self._clock_ns()
        return sum(job.stuck or job.runs_longer(SLOW_NS, now) for job in self._jobs)

    def _run(self) -> None:
        if self._nice:
            with contextlib.suppress(OSError):  # an ordinary user cannot come back from a higher niceness
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while (job := self._queue.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            job.started_ns = self._clock_ns()
            try:
                job.future.set_result(job.work())
            except BaseException as error:  # handed to the main loop, whatever it is
                job.future.set_exception(error)
            self._announce(partial(self._returned, job))
            del job

    def _returned(self, job: _Job) -> None:
        """On the main loop."""
        del self._jobs[job]
        self.stuck -= job.stuck
        if self._threads - self._slow() > self._size:
            self._threads -= 1
            self._queue.put(None)  # one thread too many: any of them may go
        job.done(job.future)


class Pools:
    """One pool per kind of call, so that none waits behind another kind; `fd` (an eventfd) announces results.

    Fetches have a pool per lane, and in each as many calls in flight as its link gives more bytes for.
    """

    def __init__(
        self, fetch_threads: int, *, timeout_ns: int = 60_000_000_000, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.timeout_ns, self._clock_ns = timeout_ns, clock_ns
        self._finished: deque[Callable[[], None]] = deque()
        self.closed = False
        self._bell = threading.Lock()  # a thread that rings must not find the number closed, and another file's by then

        def pool(name: str, size: int, nice: int = 0) -> Pool:
            return Pool(name, size, self._announce, clock_ns, nice=nice)

        # A call that waits for a transfer spins; Mooncake's own threads, which carry the transfer, must come first.
        self._fetches = tuple(pool(f"fetch-{lane.name.lower()}", fetch_threads, FETCH_NICE) for lane in Lane)
        self.widths = tuple(Width(fetch_threads) for _ in Lane)
        look_ups, saves, attaches = pool("lookup", LOOK_UPS), pool("save", 1), pool("attach", 1)
        slabs, copies = pool("slab", 1), pool("copy", COPY_THREADS)
        self._kinds = {
            "look_up": (look_ups,), "fetch": self._fetches, "save": (saves,), "attach": (attaches,),
            "copy": (slabs, copies),
        }  # fmt: skip
        self._all = [each for pools in self._kinds.values() for each in pools]
        # How to hand in a call of each kind, as Pool.submit says; for fetches see below.
        self.look_up, self.save = look_ups.submit, saves.submit
        self.attach = attaches.submit  # for memory, not the store: it must not wait behind a store call that hangs
        self.slab = slabs.submit  # for device memory: one at a time, as they go by what is free then
        self.copy = copies.submit  # to device memory

    def fetch(
        self, lane: Lane, work: Callable[[], Any], done: Done, overdue: Callable[[], None] | None, owner: Owner
    ) -> None:
        self._fetches[lane].submit(work, done, overdue, owner)

    def fetch_room(self, lane: Lane, owner: Owner) -> bool:
        """Whether another fetch of this lane may start for this owner."""
        pool = self._fetches[lane]
        return pool.crowd(owner) < self.widths[lane].width and not pool.exhausted(owner)

    def exhausted(self, lane: Lane, owner: Owner) -> bool:
        """Whether so many fetches of this lane hang that none is started for this owner."""
        return self._fetches[lane].exhausted(owner)

    @property
    def fetches_in_flight(self) -> int:
        return sum(pool.in_flight for pool in self._fetches)

    def running(self) -> dict[str, int]:
        """When the oldest call that runs now began, of each kind (CLOCK_MONOTONIC ns). From any thread."""
        began = {kind: [since for pool in pools if (since := pool.oldest_ns())] for kind, pools in self._kinds.items()}
        return {kind: min(since) for kind, since in began.items() if since}

    @property
    def stuck(self) -> int:
        """Calls past their deadline that have not returned."""
        return sum(pool.stuck for pool in self._all)

    def run_finished(self) -> int:
        """On the main loop: run the callbacks of finished calls; how many."""
        count = 0
        while self._finished:
            self._finished.popleft()()
            count += 1
        return count

    def check(self, now_ns: int) -> None:
        """On the main loop, now and then: give up the calls past their deadline."""
        for pool in self._all:
            pool.check(now_ns, self.timeout_ns)

    def clear_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> bool:
        """Wait for the calls in flight, as long as a call may take; False when some of the store's still hang."""
        self.closed = True
        for pool in self._all:
            pool.close()
        deadline = self._clock_ns() + self.timeout_ns
        while (calls := sum(pool.calls for pool in self._all)) and self._clock_ns() < deadline:
            if not self.run_finished():
                time.sleep(0.01)
        if not calls:
            with self._bell:
                os.close(self.fd)
                self.fd = -1
        of_the_store = (pool for kind in ("look_up", "fetch", "save") for pool in self._kinds[kind])
        return not any(pool.calls for pool in of_the_store)

    def _announce(self, callback: Callable[[], None]) -> None:
        self._finished.append(callback)
        with self._bell:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)
