"""When a read looks whether its bytes are there: how many looks it takes, and how late it sees the end."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.store.pace import LATEST_NS, SOONEST_NS, Pace

MIB = 1 << 20


class Node:
    """Sends `ns_per_byte`, one read after the other, as a reader sees it that looks when it should."""

    def __init__(self, ns_per_byte: float) -> None:
        self.ns_per_byte, self.pace, self.now = ns_per_byte, Pace(), 10**12

    def read(self, size: int) -> tuple[int, float]:
        """Return the looks of one read, and how late the last one saw its end, as a part of the read's time."""
        asked = self.pace.ask("node", size, self.now)
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
    assert node.now - began < 8 * 4 * MIB * node.ns_per_byte + 4 * LATEST_NS, "time lost"


def test_a_node_that_crawled_delays_no_later_read_for_long() -> None:
    node = Node(8.0)
    node.read(4 * MIB)
    node.ns_per_byte = 10_000.0  # 42 s for a chunk
    node.read(4 * MIB)
    node.ns_per_byte = 8.0
    began = node.now
    node.read(4 * MIB)
    assert node.now - began < 33_600_000 + LATEST_NS


def test_what_was_asked_before_delays_a_read_and_what_failed_says_nothing_of_the_pace() -> None:
    pace = Pace()
    first = pace.ask("node", 100 * MIB, 0)
    pace.ended(first, 10**8, came=True)
    ahead, behind = pace.ask("node", 100 * MIB, 0), pace.ask("node", 100 * MIB, 0)
    assert pace.waiting("node") == 200 * MIB
    assert behind.predicted_ns == pytest.approx(2 * ahead.predicted_ns)
    assert pace.ask("other", MIB, 0).predicted_ns == 0
    pace.ended(ahead, 1, came=False)
    assert pace.ask("node", 100 * MIB, 0).predicted_ns == pytest.approx(2 * ahead.predicted_ns)
    assert pace.waiting("nobody") == 0
