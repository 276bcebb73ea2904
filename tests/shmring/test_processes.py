"""Two processes on one segment: full speed, sleep and wake-up, death at any moment, and no system call too many."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.ring import Consumer

from .conftest import Control, small_layout
from .peer import payload, verify

LARGEST = 600
StartPeer = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def control() -> Iterator[Control]:
    shared = Control(small_layout(ring_bytes=1 << 16), shared=True)
    yield shared
    shared.close()


@pytest.fixture
def bell() -> Iterator[Doorbell]:
    doorbell = Doorbell.create()
    yield doorbell
    doorbell.close()


def start(
    peer: StartPeer, control: Control, bell: Doorbell, role: str, count: int, **options: Any
) -> subprocess.Popen[str]:
    """A peer on this segment, once it is ready; `options`: largest, seed, prefix."""
    largest, seed = options.get("largest", LARGEST), options.get("seed", 1)
    numbers = (control.segment.fd, control.segment.size_bytes, bell.fd, count, largest, seed)
    fds = (control.segment.fd, bell.fd)
    process = peer(role, *numbers, fds=fds, prefix=options.get("prefix", ()))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def rest(process: subprocess.Popen[str]) -> str:
    """A peer's output until its end. Not communicate(): text that came with "ready" is in the buffer already."""
    assert process.stdout is not None
    with process.stdout as said:
        text = said.read()
    process.wait()
    return text


def left_behind() -> tuple[list[str], int, int]:
    """Our names in /dev/shm, our descriptors, and our mappings of segments."""
    maps = Path("/proc/self/maps").read_text()
    names = sorted(
        name for name in os.listdir("/dev/shm") if "kvprefetch" in name and not name.startswith("kvprefetchd-")
    )
    return names, len(os.listdir("/proc/self/fd")), maps.count("memfd:kvprefetch")


@pytest.mark.parametrize("count", [100_000, pytest.param(10_000_000, marks=pytest.mark.stress)])
def test_two_processes_at_full_speed_lose_and_mix_nothing(
    peer: StartPeer, control: Control, bell: Doorbell, count: int
) -> None:
    """A consumer that sleeps on its bell fails on its own when a wake-up is lost."""
    consumer = start(peer, control, bell, "consume", count)
    producer = start(peer, control, bell, "produce", count)
    assert rest(producer) == f"{count}\n"
    assert rest(consumer) == f"{count}\n"


@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=pytest.mark.stress)])
def test_whoever_is_killed_the_other_goes_on_or_reports_and_nothing_is_left(peer: StartPeer, rounds: int) -> None:
    before = left_behind()
    dice = random.Random(rounds)
    for number in range(rounds):
        control, bell = Control(small_layout(ring_bytes=1 << 13), shared=True), Doorbell.create()
        try:
            survive = producer_dies if number % 2 else consumer_dies
            survive(peer, control, bell, dice.random() * 0.01)
        finally:
            control.close()
            bell.close()
    assert left_behind() == before


def producer_dies(peer: StartPeer, control: Control, bell: Doorbell, after_s: float) -> None:
    consumer = control.consumer()
    dead = killed_after(start(peer, control, bell, "produce", -1), after_s)
    sequence = 0
    while True:
        last = dead()  # before the look: a record may come between
        if (record := consumer.peek()) is not None:
            verify(record.payload, sequence, LARGEST)
            consumer.advance()
            sequence += 1
        elif last:
            break
    assert consumer.prepare_sleep(), "whole records up to the last one that was published, then nothing"


def consumer_dies(peer: StartPeer, control: Control, bell: Doorbell, after_s: float) -> None:
    producer = control.producer()
    dead = killed_after(start(peer, control, bell, "consume", -1), after_s)
    sequence = 0
    while True:
        last = dead()
        if producer.push(1, payload(sequence, LARGEST)):
            sequence += 1
        elif last:
            break
    # A new consumer finds every record whose space the dead one had not given back.
    heir = control.consumer()
    left = []
    while (record := heir.peek()) is not None:
        left.append(int.from_bytes(record.payload[:8], "little"))
        heir.advance()
    assert left == list(range(sequence - len(left), sequence))


def killed_after(process: subprocess.Popen[str], after_s: float) -> Callable[[], bool]:
    """Return a function that kills the process once it is time, and says whether it is dead."""
    kill_at = time.monotonic() + after_s

    def dead() -> bool:
        if process.returncode is None and time.monotonic() >= kill_at:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        return process.returncode is not None

    return dead


@pytest.mark.parametrize("rounds", [3, pytest.param(100, marks=pytest.mark.stress)])
def test_a_consumer_survives_a_process_that_writes_over_the_whole_segment(
    peer: StartPeer, bell: Doorbell, rounds: int
) -> None:
    """Each round ends with a report of corruption, in bounded work, while the other process keeps writing."""
    for seed in range(rounds):
        control = Control(small_layout(), shared=True)
        consumer = control.consumer()
        process = start(peer, control, bell, "vandal", 0, seed=seed)
        with pytest.raises(SegmentCorrupt):
            consume_for_ever(consumer, control.layout.ring_bytes // 2)
        process.kill()
        process.communicate()
        control.close()


def consume_for_ever(consumer: Consumer, largest: int) -> None:
    while True:
        if (record := consumer.peek()) is not None:
            assert len(bytes(record.payload)) <= largest
            consumer.advance()


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def between_marks(trace: str) -> list[str]:
    """The system calls between the two getppid() marks of a peer."""
    calls = re.findall(r"^(?:\[pid +\d+\] |\d+ +)?(\w+)\(", trace, re.MULTILINE)
    first = calls.index("getppid")
    return calls[first + 1 : calls.index("getppid", first + 1)]


@needs_strace
@pytest.mark.parametrize(
    ("role", "asleep", "expected"),
    [("pushes", False, []), ("pushes", True, ["write"] * 50), ("polls", False, [])],
    ids=["none per push to one awake", "one per push that must wake", "none per poll"],
)
def test_the_hot_paths_make_exactly_the_promised_system_calls(
    peer: StartPeer, control: Control, bell: Doorbell, tmp_path: Path, role: str, asleep: bool, expected: list[str]
) -> None:
    if asleep:
        assert control.consumer().prepare_sleep()
    trace = tmp_path / "trace"
    prefix = ("strace", "-f", "-o", str(trace))
    try:
        process = start(peer, control, bell, role, 50, largest=100, prefix=prefix)
    except AssertionError:
        pytest.skip("this sandbox does not let strace trace a process")
    assert rest(process) == "50\n"
    assert between_marks(trace.read_text()) == expected
