"""Measures one push, one poll and one wake-up of the shared memory, with a copy and a load of memory as the floors.

Two processes, one of them spinning: run it on at least two idle cores.  Each number is the median of many short rounds,
with the 10th and 90th percentile.

    python -m benchmarks.ring [--rounds N] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import select
import struct
import sys
import time
from pathlib import Path

from kvprefetch.shmring._atomics import Words
from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.flags import FlagTable
from kvprefetch.shmring.layout import Layout
from kvprefetch.shmring.ring import Consumer, Producer
from kvprefetch.shmring.segment import Segment

SIZES = (2 << 10, 32 << 10, 256 << 10)
BATCH = 8
PAUSE_NS = 50_000
WAIT_S = 0.2
STAMP = struct.Struct("<Q")
MODE, COUNT, LATENCY = 0, 8, 16  # words of the shared counters, each on a cache line of its own
SLEEP, SPIN, END = 1, 2, 3
LAYOUT = Layout(
    ring_bytes=1 << 23, flag_count=64, page_count=64, table_entries=64, credit_entries=64, slot_count=64, epoch=1
)

now_ns = time.perf_counter_ns


class Samples(list[float]):
    """Microseconds per operation."""

    def at(self, share: float) -> float:
        return sorted(self)[min(len(self) - 1, int(len(self) * share))]

    def text(self) -> str:
        return f"{self.at(0.5):9.3f} us  ({self.at(0.1):.3f} .. {self.at(0.9):.3f})"


def pause(for_ns: int) -> None:
    """Pass the time awake: a core that slept is slow for a while after."""
    until = now_ns() + for_ns
    while now_ns() < until:
        pass


def pin(number: int) -> None:
    """Keep the two processes on a core each: on one core together they would measure the scheduler."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


class Link:
    """A ring with its receiving process. Shared counters hold the receiver's mode, count and last latency."""

    def __init__(self) -> None:
        self.segment, self._bell = Segment.create(LAYOUT.total_bytes), Doorbell.create()
        LAYOUT.write(self.segment.buffer)
        self._counters = Words(mmap.mmap(-1, 4096))
        self.mode(SLEEP)
        self._process = multiprocessing.get_context("fork").Process(target=self._receive, daemon=True)
        self._process.start()
        pin(0)
        self.sent = 0
        self._push = Producer(self.segment.buffer, Words(self.segment.buffer), LAYOUT, self._bell.ring).push
        self.send(bytes(64))
        self.settle()

    def _receive(self) -> None:
        pin(1)
        consumer = Consumer(self.segment.buffer, Words(self.segment.buffer), LAYOUT)
        counters, epoll, count = self._counters, select.epoll(), 0
        epoll.register(self._bell.fd, select.EPOLLIN)
        while (mode := counters.load_acquire(MODE)) != END:
            if (record := consumer.peek()) is None:
                if mode == SLEEP and consumer.prepare_sleep():
                    if epoll.poll(WAIT_S):
                        self._bell.clear()
                    consumer.wake()
                continue
            counters.store_release(LATENCY, max(0, now_ns() - STAMP.unpack_from(record.payload)[0]))
            consumer.advance()
            count += 1
            counters.store_release(COUNT, count)
        os._exit(0)

    def mode(self, mode: int) -> None:
        self._counters.store_release(MODE, mode)

    def send(self, data: bytes) -> None:
        while not self._push(1, data):
            time.sleep(0)
        self.sent += 1

    def settle(self) -> None:
        """Wait until everything sent was seen."""
        deadline = time.monotonic() + 20
        while self._counters.load_acquire(COUNT) < self.sent:
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.sent} sent, {self._counters.load_acquire(COUNT)} received")
            time.sleep(0)

    def latency_us(self) -> float:
        return self._counters.load_acquire(LATENCY) / 1000

    def close(self) -> None:
        self.mode(END)
        self._process.join(2)


def push_cost(link: Link, rounds: int) -> dict[str, Samples]:
    """Microseconds per push, BATCH in a row and the receiver awake, and per copy of the same bytes, by size."""
    scratch = memoryview(mmap.mmap(-1, 1 << 23, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
    result: dict[str, Samples] = {}
    for size in SIZES:
        data, at = os.urandom(size), 0
        pushes = result.setdefault(f"push of {size >> 10} KiB", Samples())
        copies = result.setdefault(f"memcpy of {size >> 10} KiB", Samples())
        link.mode(SPIN)
        for _ in range(rounds):
            pause(PAUSE_NS)
            start = now_ns()
            for _ in range(BATCH):
                link.send(data)
            pushes.append((now_ns() - start) / BATCH / 1000)
            link.settle()
            at = 0 if at + BATCH * (size + 64) > len(scratch) else at
            start = now_ns()
            for _ in range(BATCH):
                scratch[at : at + size] = data
                at += size + 64 & -64
            copies.append((now_ns() - start) / BATCH / 1000)
        link.mode(SLEEP)
    return result


def seen_cost(link: Link, rounds: int, *, asleep: bool) -> Samples:
    """Microseconds from before the push until the other process has the bytes (2 KiB)."""
    body, samples = os.urandom((2 << 10) - STAMP.size), Samples()
    link.mode(SLEEP if asleep else SPIN)
    for _ in range(rounds):
        if asleep:
            time.sleep(0.002)
        else:
            pause(PAUSE_NS)
        link.send(STAMP.pack(now_ns()) + body)
        link.settle()
        samples.append(link.latency_us())
    link.mode(SLEEP)
    return samples


def poll_cost(link: Link, rounds: int) -> dict[str, Samples]:
    """Microseconds per poll of a flag, and per aligned load of a memoryview."""
    buffer = link.segment.buffer
    load, plain, index = FlagTable(buffer, Words(buffer), LAYOUT).load, buffer.cast("Q"), LAYOUT.flags_offset // 8
    result, count = {"poll of a flag": Samples(), "memoryview load": Samples()}, 2000
    for _ in range(rounds):
        start = now_ns()
        for _ in range(count):
            load(3)
        result["poll of a flag"].append((now_ns() - start) / count / 1000)
        start = now_ns()
        for _ in range(count):
            plain[index]
        result["memoryview load"].append((now_ns() - start) / count / 1000)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="rounds of each measurement (default 200)")
    parser.add_argument("--json", type=Path, help="write the medians and percentiles there too")
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, median (10th .. 90th percentile)")
    link = Link()
    found = push_cost(link, options.rounds)
    found["push to seen, awake"] = seen_cost(link, options.rounds, asleep=False)
    found["push to seen, asleep"] = seen_cost(link, options.rounds, asleep=True)
    found |= poll_cost(link, options.rounds)
    link.close()
    for name, samples in found.items():
        print(f"  {name:24}{samples.text()}")
    if options.json is not None:
        figures = {
            name: {"median_us": each.at(0.5), "p10_us": each.at(0.1), "p90_us": each.at(0.9)}
            for name, each in found.items()
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
