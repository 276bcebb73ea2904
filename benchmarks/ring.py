"""Measures one push, one poll and one wake-up of the shared memory, beside other ways to reach a process.

Each number is the median of many short rounds that alternate between the peers, with the 10th and 90th percentile
beside it; the floors (a copy of the payload into memory of the ring's size, one aligned load) are measured in the same
rounds.  Two processes, one of them spinning: run it on at least two idle cores.

    python -m benchmarks.ring [--rounds N] [--json PATH] [--no-upstream]
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import platform
import struct
import sys
import time
from pathlib import Path
from typing import Any

from kvprefetch.shmring._atomics import Words

from .ring_calls import Samples, hint_cost, now_ns, pause, poll_cost, upstream_cost
from .ring_peers import PEERS, Peer, Ring, Unavailable, UpstreamLookup

SIZES = (0, 2 << 10, 32 << 10, 256 << 10)
BATCH = 8  # fits the default limits of datagram sockets and message queues
PAUSE_NS = 50_000
ITSELF = "kvprefetch push itself"
STAMP = struct.Struct("<Q")
MODE, COUNT, LATENCY = 0, 8, 16  # words of the shared counters, each on a cache line of its own
SLEEP, SPIN, END = 1, 2, 3

CORES = os.sched_getaffinity(0)


def pin(number: int) -> None:
    """Keep the two processes on a core each: on one core together they would measure the scheduler."""
    cores = sorted(CORES)
    os.sched_setaffinity(0, {cores[number % len(cores)]})


class Link:
    """One peer with its receiving process. Shared counters hold the receiver's mode, count and last latency."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.name = peer.name
        self._counters = Words(mmap.mmap(-1, 4096))
        self._counters.store_release(MODE, SLEEP)
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._receive, daemon=True)
        self._process.start()
        self.sent = 0

    def open(self) -> None:
        self.peer.open_sender()
        self.send(bytes(64))
        self.settle()

    def _receive(self) -> None:
        peer, counters = self.peer, self._counters
        pin(1)
        peer.open_receiver()
        count = 0
        while True:
            data = peer.receive()
            if data is None:
                mode = counters.load_acquire(MODE)
                if mode == END:
                    os._exit(0)
                if mode == SLEEP:
                    peer.wait()
                continue
            seen = now_ns()
            if len(data) >= STAMP.size:
                counters.store_release(LATENCY, max(0, seen - STAMP.unpack_from(data)[0]))
            peer.done()
            count += 1
            counters.store_release(COUNT, count)

    def mode(self, mode: int) -> None:
        self._counters.store_release(MODE, mode)

    def send(self, data: bytes) -> None:
        self.peer.send(data)
        self.sent += 1

    def settle(self) -> None:
        """Wait until everything sent was seen."""
        deadline = time.monotonic() + 20
        while self._counters.load_acquire(COUNT) < self.sent:
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name}: {self.sent} sent, {self._counters.load_acquire(COUNT)} received")
            time.sleep(0)

    def latency_us(self) -> float:
        return self._counters.load_acquire(LATENCY) / 1000

    def close(self) -> None:
        self.mode(END)
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()


Rows = dict[str, dict[str, Samples]]


def push_cost(links: list[Link], rounds: int) -> tuple[Rows, Rows]:
    """Microseconds per send, receivers awake, per size and peer: in a row of BATCH, and one alone after a pause.

    `memcpy` is the floor of each.  A peer that only hands over to a thread of its own (Queue, ZMQ) looks cheap in a
    row, where that thread is awake already; one alone must wake it, and a scheduler's hints come alone.  `push itself`
    is ours, up to 100 in a row, in a ring of 1 MiB that nobody polls meanwhile: the rest of our number is cache lines
    on their way to the other core and code that went cold.
    """
    itself = Ring(1 << 20)
    itself.open_sender()
    itself.open_receiver()
    rows: Rows = {}
    alone: Rows = {}
    scratch = memoryview(mmap.mmap(-1, 1 << 23, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
    at = 0
    clock = min(-now_ns() + now_ns() for _ in range(1000)) / 1000
    for size in SIZES:
        data = os.urandom(size)
        row = rows.setdefault(label(size), {"memcpy": Samples()})
        single = alone.setdefault(label(size), {"memcpy": Samples()})
        for _ in range(rounds):
            for link in links:
                if size > link.peer.max_bytes:
                    continue
                link.mode(SPIN)
                link.send(data)
                link.settle()  # awake from here on
                send = link.peer.send
                pause(PAUSE_NS)
                start = now_ns()
                send(data)
                end = now_ns()
                link.sent += 1
                link.settle()
                single.setdefault(link.name, Samples()).append((end - start) / 1000 - clock)
                start = now_ns()
                for _ in range(BATCH):
                    send(data)
                end = now_ns()
                link.sent += BATCH
                link.settle()
                link.mode(SLEEP)
                row.setdefault(link.name, Samples()).append((end - start) / BATCH / 1000)
            if size <= 32 << 10:
                row.setdefault(ITSELF, Samples()).append(push_itself(itself, data))
            if at + BATCH * (size + 64) > len(scratch):
                at = 0
            pause(PAUSE_NS)
            start = now_ns()
            scratch[at : at + size] = data
            single["memcpy"].append((now_ns() - start) / 1000 - clock)
            start = now_ns()
            for _ in range(BATCH):
                scratch[at : at + size] = data
                at += size + 64 & -64
            row["memcpy"].append((now_ns() - start) / BATCH / 1000)
    return rows, alone


def push_itself(ring: Ring, data: bytes) -> float:
    """Microseconds per push, many in a row, so that code and lines are warm; the ring is emptied afterwards."""
    count = min(100, (1 << 19) // (len(data) + 128))
    push = ring.producer.push
    start = now_ns()
    for _ in range(count):
        push(1, data)
    end = now_ns()
    while ring.receive() is not None:
        ring.done()
    return (end - start) / count / 1000


def seen_cost(links: list[Link], rounds: int, *, asleep: bool) -> dict[str, Samples]:
    """Microseconds from before the send until the other process has the bytes (2 KiB)."""
    result: dict[str, Samples] = {}
    body = os.urandom((2 << 10) - STAMP.size)
    for _ in range(max(3, rounds // 10)):
        for link in links:
            link.mode(SLEEP if asleep else SPIN)
            link.send(body)
            link.settle()
            samples = result.setdefault(link.name, Samples())
            for _ in range(10):
                if asleep:
                    time.sleep(0.002)
                else:
                    pause(PAUSE_NS)
                link.send(STAMP.pack(now_ns()) + body)
                link.settle()
                samples.append(link.latency_us())
            link.mode(SLEEP)
    return result


def throughput(links: list[Link], seconds: float) -> dict[str, float]:
    """Records of 2 KiB per second, sent as fast as they are taken."""
    data = bytes(2 << 10)
    result = {}
    for link in links:
        link.mode(SPIN)
        before, start = link.sent, now_ns()
        while now_ns() - start < seconds * 1e9:
            for _ in range(BATCH):
                link.send(data)
        link.settle()
        result[link.name] = (link.sent - before) / (now_ns() - start) * 1e9
        link.mode(SLEEP)
    return result


def label(size: int) -> str:
    return f"{size >> 10} KiB" if size else "0 B"


def show(title: str, row: dict[str, Samples], floor: str | None = None) -> None:
    """A table of one measurement: medians, spread, and ratios to ours and to the floor."""
    print(f"\n{title}")
    ours = next((name for name in row if name == Ring.name or name.startswith("poll")), None)
    for name, samples in row.items():
        line = f"  {name:24}{samples.text():40}"
        if ours is not None and name != ours:
            line += f" {samples.median / row[ours].median:7.1f} x ours"
        elif floor is not None:
            line += f" {samples.median / row[floor].median:7.1f} x {floor}"
        print(line)


def aims(results: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, measured, aim): all are "at most"."""
    push, poll = results["push"], results["poll"]
    rows = [
        ("push of 2 KiB itself, us", push["2 KiB"][ITSELF].median, 0.6),
        ("push of 2 KiB, polled, us", push["2 KiB"][Ring.name].median, 0.6),
        ("push of 256 KiB / its memcpy", push["256 KiB"][Ring.name].median / push["256 KiB"]["memcpy"].median, 2.0),
        ("poll, us", poll["poll of a flag"].median, 0.15),
        ("poll / memoryview load", poll["poll of a flag"].median / poll["memoryview load"].median, 5.0),
        ("push to seen, awake, us", results["awake"][Ring.name].median, 5.0),
        ("push to seen, asleep, us", results["asleep"][Ring.name].median, 60.0),
    ]
    for blocks, bound in ((64, 5.0), (4096, 40.0)):
        samples = results["hint"][str(blocks)]
        rows.append((f"on_new_request, {blocks} blocks, us", samples.median, bound))
        rows.append((f"on_new_request, {blocks} blocks, p99 / median", samples.at(0.99) / samples.median, 3.0))
    alone = results["push_alone"]["2 KiB"]
    if "ZMQ PAIR ipc" in alone:
        ratio = alone[Ring.name].median / alone["ZMQ PAIR ipc"].median
        rows.insert(2, ("push of 2 KiB / ZMQ send, alone", ratio, 1 / 20))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="rounds of each measurement (default 200)")
    parser.add_argument("--json", type=Path, help="write the medians and percentiles there too")
    parser.add_argument("--no-upstream", action="store_true", help="leave out vLLM's lookup client (a slow import)")
    arguments = parser.parse_args()

    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )
    print(f"{arguments.rounds} rounds of {BATCH} sends, alternating; median (10th .. 90th percentile)")
    peers: list[Any] = []
    for kind in PEERS:
        try:
            peers.append(kind())
        except Unavailable as reason:
            print(f"not run: {kind.name}: {reason}")
    ring = peers[0]
    links = [Link(peer) for peer in peers]  # every fork before anybody starts a thread
    pin(0)
    for link in links:
        link.open()
    rows, alone = push_cost(links, arguments.rounds)
    results: dict[str, Any] = {
        "push": rows,
        "push_alone": alone,
        "awake": seen_cost(links, arguments.rounds, asleep=False),
        "asleep": seen_cost(links, arguments.rounds, asleep=True),
        "poll": poll_cost(ring, arguments.rounds),
        "hint": {str(blocks): hint_cost(blocks, 10 * arguments.rounds) for blocks in (64, 4096)},
    }
    rates = throughput(links, 0.5)
    for link in links:
        link.close()

    for size, row in results["push"].items():
        show(f"push of {size}, {BATCH} in a row, receiver awake", row, "memcpy")
        show(f"push of {size}, one alone, receiver awake", results["push_alone"][size], "memcpy")
        for peer in peers:
            if peer.name not in row:
                print(f"  {peer.name:24}not run: its messages end at {peer.max_bytes} bytes")
    show("from push to seen, 2 KiB, receiver awake", results["awake"])
    show("from push to seen, 2 KiB, receiver asleep", results["asleep"])
    show("poll, no system call", results["poll"], "memoryview load")
    show("our part of on_new_request, by blocks of the prompt", results["hint"])
    print("\nthroughput, records of 2 KiB per second")
    for name, rate in rates.items():
        print(f"  {name:24}{rate:12,.0f}")
    if not arguments.no_upstream:
        try:
            results["upstream"] = {UpstreamLookup.name: upstream_cost(arguments.rounds)}
            show("one lookup of 64 blocks, answered at once: what upstream's scheduler pays", results["upstream"])
        except Unavailable as reason:
            print(f"\nnot run: {UpstreamLookup.name}: {reason}")

    print("\naims (at most)")
    for what, measured, aim in aims(results):
        print(f"  {what:32}{measured:9.3f}   aim {aim:<8g}{'met' if measured <= aim else 'MISSED'}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(plain(results) | {"records_per_second": rates}, indent=2))
    return 0


def plain(results: Any) -> Any:
    """Samples as their median and percentiles."""
    if isinstance(results, Samples):
        return {"median_us": results.median, "p10_us": results.at(0.1), "p90_us": results.at(0.9)}
    return {name: plain(value) for name, value in results.items()}


if __name__ == "__main__":
    sys.exit(main())
