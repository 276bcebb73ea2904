"""When a read begins, and when it looks whether its bytes are there: how many looks, and how late it sees the end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvprefetch.daemon.store.pace import LATEST_NS, SOONEST_NS, TURN_NS, Pace, Read

MIB = 1 << 20


class Node:
    """Sends `ns_per_byte`, one read after the other, as a reader sees it that looks when it should."""

    def __init__(self, ns_per_byte: float) -> None:
        self.ns_per_byte, self.pace, self.now = ns_per_byte, Pace(), 10**12

    def read(self, size: int) -> tuple[int, float]:
        """Return the looks of one read, and how late the last one saw its end, as a part of the read's time."""
        asked = self.pace.ask("node", size, self.now)
        assert self.pace.turn(asked, self.now)
        began, end, looks = self.now, self.now + int(size * self.ns_per_byte), 1
        self.now = asked.look_ns
        while self.now < end:
            self.pace.looked(asked, self.now)
            self.now, looks = asked.look_ns, looks + 1
        self.pace.ended(asked, self.now, came=True)
        return looks, (self.now - end) / (end - began)


@pytest.mark.parametrize("ns_per_byte", [0.1, 1, 8, 800])
def test_a_read_of_a_known_pace_is_seen_soon_after_its_end_with_few_looks(ns_per_byte: float) -> None:
    node, size = Node(ns_per_byte), 4 * MIB
    reads = [node.read(size) for _ in range(50)][10:]
    most = 12 + size * ns_per_byte / LATEST_NS
    assert sum(looks for looks, _ in reads) / len(reads) < most
    allowed = 0.05 + SOONEST_NS / (size * ns_per_byte)
    assert sum(late for _, late in reads) / len(reads) < allowed


@pytest.mark.parametrize("factor", [1 / 64, 1 / 4, 1 / 2, 2, 4, 64])
def test_a_node_that_becomes_faster_or_slower_is_known_again_within_a_few_reads(factor: float) -> None:
    node = Node(8.0)
    for _ in range(10):
        node.read(4 * MIB)
    node.ns_per_byte *= factor
    began = node.now
    for _ in range(8):
        looks, late = node.read(4 * MIB)
        assert looks < 250
    assert late < 0.25 or late * 4 * MIB * node.ns_per_byte < SOONEST_NS
    assert node.now - began < 8 * (4 * MIB * node.ns_per_byte + LATEST_NS), "time lost"


@pytest.mark.parametrize("part", [0.5, 0.6, 0.75, 0.9])
def test_a_read_that_is_sooner_than_predicted_is_seen_soon(part: float) -> None:
    """Within a sixteenth of the predicted time, also where the first look comes too early."""
    node = Node(8.0)
    for _ in range(10):
        node.read(4 * MIB)
    node.ns_per_byte *= part
    _, late = node.read(4 * MIB)
    assert late * part <= 1 / 16 + 0.01


@dataclass(eq=False)
class Reading:
    asked: Read
    left: float
    begins_ns: int = 0  # its bytes come from then on
    ended_ns: int = 0


class SharedWay:
    """A way of `ns_per_byte` that the reads on it share equally; a read's bytes come `latency_ns` after it begins."""

    STEP_NS = 100_000

    def __init__(self, ns_per_byte: float, latency_ns: int = 1_000_000) -> None:
        self.ns_per_byte, self.latency_ns, self.now, self.pace = ns_per_byte, latency_ns, 10**12, Pace()
        self.reads: list[Reading] = []

    def ask(self, size: int) -> Reading:
        read = Reading(self.pace.ask("node", size, self.now), size)
        self.reads.append(read)
        return read

    def step(self) -> None:
        for read in list(self.reads):
            asked = read.asked
            if self.now < asked.look_ns:
                continue
            if not asked.begun:
                if self.pace.turn(asked, self.now):
                    read.begins_ns = self.now + self.latency_ns
            elif read.left > 0:
                self.pace.looked(asked, self.now)
            else:
                self.pace.ended(asked, self.now, came=True)
                read.ended_ns = self.now
                self.reads.remove(read)
        moving = [read for read in self.reads if read.left > 0 and 0 < read.begins_ns <= self.now]
        for read in moving:
            read.left -= self.STEP_NS / self.ns_per_byte / len(moving)
        self.now += self.STEP_NS

    def ends_ms(self, *sizes: int) -> list[float]:
        """Ask for reads of these sizes at once; return when each was seen to end."""
        began, reads = self.now, [self.ask(size) for size in sizes]
        while self.reads:
            self.step()
        return [(read.ended_ns - began) / 1e6 for read in reads]

    def gapless(self, size: int, count: int, at_a_time: int) -> float:
        """Return ns for each byte where so many reads are always asked."""
        began, left = self.now, count
        while left or self.reads:
            while left and len(self.reads) < at_a_time:
                self.ask(size)
                left -= 1
            self.step()
        return (self.now - began) / (size * count)


def known(ns_per_byte: float, latency_ns: int = 1_000_000) -> SharedWay:
    way = SharedWay(ns_per_byte, latency_ns)
    for _ in range(8):
        way.ends_ms(4 * MIB)
    return way


@pytest.mark.parametrize("ns_per_byte", [8, 80])
def test_the_first_of_two_reads_ends_as_if_it_were_alone_and_the_second_no_later_than_both(ns_per_byte: float) -> None:
    way = known(ns_per_byte)
    [alone], (first, second) = way.ends_ms(4 * MIB), way.ends_ms(4 * MIB, 4 * MIB)
    assert first < 1.03 * alone + 3
    assert second < 2.05 * alone + 1


@pytest.mark.parametrize(("ns_per_byte", "size"), [(8, 4 * MIB), (80, 4 * MIB), (8, MIB), (0.5, 4 * MIB)])
def test_reads_that_take_turns_keep_the_way_full(ns_per_byte: float, size: int) -> None:
    assert known(ns_per_byte).gapless(size, 40, 2) < 1.02 * ns_per_byte + 300_000 / size


def test_a_read_that_waits_begins_when_those_before_it_are_late_or_gone() -> None:
    """So it waits neither for a node that hangs nor for a read that nobody ended."""
    pace = Pace()
    first = pace.ask("node", 4 * MIB, 0)
    assert pace.turn(first, 0)
    pace.ended(first, 32 * MIB, came=True)
    own_ns = pace.ask("node", 4 * MIB, 0).due_ns  # never begins
    second = pace.ask("node", 4 * MIB, 0)
    assert not pace.turn(second, 0)
    assert 0 < second.look_ns < own_ns
    assert not pace.turn(second, int(own_ns - 1.1 * TURN_NS))
    assert pace.turn(pace.ask("other", MIB, 0), 0), "nodes do not wait for each other"
    assert pace.turn(second, int(own_ns - 0.9 * TURN_NS))


def test_what_was_asked_before_delays_a_read_and_what_failed_says_nothing_of_the_pace() -> None:
    pace = Pace()
    first = pace.ask("node", 100 * MIB, 0)
    assert pace.turn(first, 0)
    pace.ended(first, 10**8, came=True)
    ahead, behind = pace.ask("node", 100 * MIB, 0), pace.ask("node", 100 * MIB, 0)
    assert pace.waiting("node") == 200 * MIB
    assert behind.due_ns == pytest.approx(2 * ahead.due_ns)
    assert pace.ask("other", MIB, 0).due_ns == 0
    assert pace.turn(ahead, 0)
    pace.ended(ahead, 1, came=False)
    pace.ended(behind, 1, came=False)
    assert pace.ask("node", 100 * MIB, 0).due_ns == pytest.approx(ahead.due_ns)
    assert pace.waiting("nobody") == 0


def test_after_a_stall_small_reads_are_soon_seen_again() -> None:
    """It is no more than half a second of reads that the pace remembers."""
    node = Node(1.0)
    node.read(4 * MIB)
    node.ns_per_byte = 5_000.0  # 21 s
    node.read(4 * MIB)
    node.ns_per_byte, began = 1.0, node.now
    for _ in range(256):
        node.read(MIB // 4)
    assert node.now - began < 3 * 10**9, "0.07 s without the stall"


def test_a_read_that_is_late_hurries_nobody() -> None:
    """The others take their turns, as if it were not there."""
    way = known(8)
    late = way.pace.ask("node", 4 * MIB, way.now)
    assert way.pace.turn(late, way.now)
    way.now += 10**9
    first, second, third = (way.ask(4 * MIB) for _ in range(3))
    began = way.now
    while not third.ended_ns:
        way.step()
    assert (first.ended_ns - began) / 1e6 < 45, "33.6 ms alone"
    assert (second.ended_ns - began) / 1e6 < 80
