"""Threads with deadlines: a call that hangs is given up, replaced, and heard of when it returns."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import structlog

from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.work.call_size import CALL_NS, QUICK_BYTES
from kvprefetch.daemon.work.calls import FETCHES, Call, CallKind, EngineCalls
from kvprefetch.daemon.work.pools import MAX_STUCK, SLOW_NS, Pools
from tests.support.ordinary import AS_NOBODY
from tests.support.waiting import eventually

TIMEOUT_NS = 200_000_000
ENGINE, OTHER, THIRD = (EngineCalls(structlog.get_logger()) for _ in range(3))


class Calls:
    """Calls that hang until `release`, and what became of each."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.release, self.running = threading.Event(), threading.Semaphore(0)
        self.results: dict[str, Any] = {}
        self.overdue: list[str] = []
        self.ran: list[str] = []

    def start(self, name: str, kind: CallKind, engine: EngineCalls = ENGINE, *, hang: bool = False) -> None:
        work = self._hang if hang else partial(self._run, name)
        overdue = partial(self.overdue.append, name)
        self.pools.start(Call(kind, work, partial(self.results.__setitem__, name), overdue, engine))

    def run(self, name: str, kind: CallKind, engine: EngineCalls = ENGINE) -> Any:
        """Start a call and wait for its result."""
        self.start(name, kind, engine)
        return self.result(name)

    def result(self, name: str) -> Any:
        self.until(lambda: name in self.results)
        return self.results[name]

    def _run(self, name: str) -> bool:
        self.ran.append(name)
        return True

    def _hang(self) -> bool:
        self.running.release()
        return self.release.wait(30)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, (self.results, self.overdue)
            self.pools.run_finished()
            self.pools.tick(time.monotonic_ns())
            time.sleep(0.005)


@pytest.fixture
def calls() -> Iterator[Calls]:
    pools = Pools(2, timeout_ns=TIMEOUT_NS)
    calls = Calls(pools)
    yield calls
    calls.release.set()
    calls.until(lambda: pools.stuck == 0)
    assert pools.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pools.fd)


def test_a_call_that_hangs_is_given_up_once_and_the_next_one_runs_meanwhile(calls: Calls) -> None:
    """And so it is again the next time; no thread is left over."""
    for number in range(3):
        calls.release.clear()
        calls.overdue.clear()
        calls.start(f"hung-{number}", CallKind.SAVE, hang=True)
        assert calls.run(f"next-{number}", CallKind.SAVE) is True
        assert calls.overdue == [f"hung-{number}"]
        assert calls.pools.stuck == 1
        calls.release.set()
        calls.result(f"hung-{number}")
        assert calls.pools.stuck == 0
        assert calls.overdue == [f"hung-{number}"]
        assert calls.run(f"after-{number}", CallKind.SAVE) is True
    calls.until(lambda: sum(thread.name.startswith("save-") for thread in threading.enumerate()) <= 1)


def test_as_many_fetches_run_at_a_time_as_there_are_threads_where_the_link_is_quick() -> None:
    """Else few, since each delays an urgent one."""
    pools = Pools(4)
    calls = Calls(pools)
    for lane, few in ((Lane.MEMORY, 2), (Lane.DISK, 1)):
        for number in range(few):
            assert pools.fetch_room(lane, ENGINE)
            calls.start(f"{lane}{number}", FETCHES[lane], hang=True)
        assert not pools.fetch_room(lane, ENGINE)
        pools.sizes[lane].fetched(QUICK_BYTES, CALL_NS, (QUICK_BYTES, CALL_NS))
        for number in range(few, 4):
            assert pools.fetch_room(lane, ENGINE)
            calls.start(f"{lane}{number}", FETCHES[lane], hang=True)
        assert not pools.fetch_room(lane, ENGINE)
    calls.release.set()
    assert pools.close()


def test_results_are_announced_at_the_descriptor_until_they_are_fetched(calls: Calls) -> None:
    """The main loop sleeps in an epoll over it."""
    calls.start("one", CallKind.LOOK_UP)
    assert select.select([calls.pools.fd], [], [], 30)[0]
    assert calls.pools.rung
    calls.result("one")
    assert not select.select([calls.pools.fd], [], [], 0)[0]
    assert not calls.pools.rung
    calls.pools.rung = True  # as a loop says that finds the descriptor readable
    assert calls.pools.run_finished() == 0, "nothing is there, and that is no error"


def test_a_result_that_was_taken_wakes_nobody(calls: Calls) -> None:
    """It comes while the loop works, and the loop takes it before it sleeps: a turn more would find nothing."""
    calls.start("one", CallKind.LOOK_UP)
    assert select.select([calls.pools.fd], [], [], 30)[0]
    calls.result("one")
    assert not select.select([calls.pools.fd], [], [], 0)[0]
    calls.start("two", CallKind.LOOK_UP)
    assert select.select([calls.pools.fd], [], [], 30)[0]


def test_a_result_that_comes_while_the_bell_is_cleared_silences_no_later_one(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread leaves a bell alone that rings already, and the loop clears it meanwhile."""
    read = os.eventfd_read

    def come_in_between(fd: int) -> int:
        calls.start("between", CallKind.SAVE)
        eventually(lambda: "between" in calls.ran, what="the call")
        time.sleep(0.05)  # until it is announced
        return read(fd)

    calls.start("first", CallKind.LOOK_UP)
    assert select.select([calls.pools.fd], [], [], 30)[0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_read", come_in_between)
        calls.pools.run_finished()
    calls.result("between")
    calls.start("later", CallKind.LOOK_UP)
    assert select.select([calls.pools.fd], [], [], 30)[0]


def test_what_waits_for_a_thread_is_given_up_when_as_many_hang_as_may(calls: Calls) -> None:
    """Without having run: what it would write to may be gone by the time there is a thread again."""
    for number in range(MAX_STUCK):
        calls.start(f"hung-{number}", CallKind.SAVE, hang=True)
    assert isinstance(calls.run("late", CallKind.SAVE), TimeoutError)
    assert calls.pools.stuck == MAX_STUCK
    calls.release.set()
    calls.until(lambda: calls.pools.stuck == 0)
    assert calls.run("after", CallKind.SAVE) is True
    assert "late" not in calls.ran


def test_a_lane_that_hangs_leaves_the_other_alone_and_has_room_again_when_its_calls_return(calls: Calls) -> None:
    hang_all(calls, Lane.DISK)
    assert not calls.pools.fetch_room(Lane.DISK, ENGINE)
    assert calls.pools.fetch_room(Lane.MEMORY, ENGINE)
    assert calls.run("fast", CallKind.FETCH_MEMORY) is True
    assert isinstance(calls.run("no-thread", CallKind.FETCH_DISK), TimeoutError)
    calls.release.set()
    calls.until(lambda: calls.pools.fetch_room(Lane.DISK, ENGINE))
    assert calls.run("again", CallKind.FETCH_DISK) is True


def test_calls_of_one_engine_that_hang_leave_room_for_the_others_until_one_of_theirs_does(calls: Calls) -> None:
    hang_all(calls, Lane.MEMORY)
    for number in range(3):
        assert calls.pools.fetch_room(Lane.MEMORY, OTHER)
        assert calls.run(f"other-{number}", CallKind.FETCH_MEMORY, OTHER) is True
    calls.start("other-hung", CallKind.FETCH_MEMORY, OTHER, hang=True)
    calls.until(lambda: "other-hung" in calls.overdue)
    assert calls.pools.exhausted(Lane.MEMORY, OTHER)
    assert calls.pools.stuck == MAX_STUCK + 1
    assert not calls.pools.exhausted(Lane.MEMORY, THIRD)
    assert calls.run("third", CallKind.FETCH_MEMORY, THIRD) is True


@pytest.mark.parametrize("kind", [CallKind.FETCH_MEMORY, CallKind.SAVE])
def test_a_call_that_takes_long_keeps_no_place_from_another_engine_s(kind: CallKind) -> None:
    """Long before its deadline; its own engine's next one waits."""
    pools = Pools(1, timeout_ns=60_000_000_000)
    calls = Calls(pools)
    calls.start("hung", kind, hang=True)
    if kind is CallKind.FETCH_MEMORY:
        calls.until(lambda: pools.fetch_room(Lane.MEMORY, OTHER))
        assert not pools.fetch_room(Lane.MEMORY, ENGINE)
    assert calls.run("other", kind, OTHER) is True
    assert calls.overdue == []
    calls.release.set()
    calls.result("hung")
    assert pools.close()


def test_a_look_up_that_does_not_return_yet_is_not_in_the_way_of_another_engine_s() -> None:
    """Not for a moment: on a clock that stands still no call becomes slow."""
    began = time.monotonic_ns()
    pools = Pools(1, clock_ns=lambda: began)
    calls = Calls(pools)
    calls.start("hung", CallKind.LOOK_UP, hang=True)
    assert calls.run("other", CallKind.LOOK_UP, OTHER) is True
    assert "hung" not in calls.results
    calls.release.set()
    calls.result("hung")
    assert pools.close()


def hang_all(calls: Calls, lane: Lane) -> None:
    """As many fetches of one engine as may hang."""
    for number in range(MAX_STUCK):
        assert calls.pools.fetch_room(lane, ENGINE)
        calls.start(f"hung-{number}", FETCHES[lane], hang=True)
        calls.until(lambda number=number: f"hung-{number}" in calls.overdue)  # type: ignore[misc]
    assert calls.pools.exhausted(lane, ENGINE)


def test_closing_does_not_wait_for_a_call_that_hangs() -> None:
    pools = Pools(1, timeout_ns=TIMEOUT_NS)
    calls = Calls(pools)
    calls.start("hung", CallKind.LOOK_UP, hang=True)
    started = time.monotonic()
    assert not pools.close()
    assert time.monotonic() - started < 10
    calls.release.set()


def test_what_other_engines_fetch_counts_until_it_is_slow_and_the_oldest_call_is_known() -> None:
    """The clock stands still but for the test: a call is slow when it says so."""
    now = [5]
    pools = Pools(1, timeout_ns=60_000_000_000, clock_ns=lambda: now[0])
    calls = Calls(pools)
    assert pools.running() == {}
    for number, lane in enumerate(Lane):
        now[0] = 10 * (number + 1)
        calls.start(lane.name, FETCHES[lane], OTHER, hang=True)
        assert calls.running.acquire(timeout=30)
    assert not pools.fetch_room(Lane.MEMORY, ENGINE), "a lane's limit is for all engines together"
    now[0] += SLOW_NS
    assert pools.fetch_room(Lane.MEMORY, ENGINE)
    assert not pools.fetch_room(Lane.MEMORY, OTHER)
    assert pools.running() == {"fetch": 10}
    calls.release.set()
    assert pools.close(), "waits for what is in flight"
    assert set(calls.results) == {"MEMORY", "DISK"}


def test_a_thread_that_announces_after_the_end_rings_no_other_bell() -> None:
    """Its result may have been taken before it rings; the descriptor's number is another file's by then."""
    pools = Pools(1)
    number = pools.fd
    assert pools.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)
    os.dup2(other, number)
    calls = Calls(pools)
    calls.start("late", CallKind.SAVE)
    eventually(lambda: pools.run_finished() and calls.results)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(other)
    for fd in {other, number}:
        os.close(fd)


def test_an_ordinary_user_s_daemon_fetches_also_at_a_higher_niceness() -> None:
    code = (
        "import select\n"
        "from kvprefetch.daemon.work.calls import Call, CallKind\n"
        "from kvprefetch.daemon.work.pools import Pools\n"
        "pools = Pools(1)\n"
        "pools.start(Call(CallKind.FETCH_MEMORY, lambda: 7, print))\n"
        "assert select.select([pools.fd], [], [], 20)[0]\n"
        "pools.run_finished()"
    )
    argv = ["nice", "-n", "19", *AS_NOBODY, sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("7\n", "", 0)
