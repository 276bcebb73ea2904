"""Reads that sleep, one guard at a time, and in random histories in which each guard is needed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from kvprefetch.daemon.store import client, replicas, sleeping_reads
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.store.replicas import Place
from kvprefetch.daemon.store.sleeping_reads import SleepingReads
from kvprefetch.daemon.store.storage_nodes import Get
from tests.daemon.store.sleeping import LEASE_NS, SIZE, Model, Sleeper, Transfer, made, opened

Patch = pytest.MonkeyPatch
OK, MISS, TRANSFER, AGAIN = ErrorClass.OK, ErrorClass.MISS, ErrorClass.TRANSFER, ErrorClass.LOOKUP_AGAIN


def test_values_of_several_nodes_come_without_a_get_of_mooncake_s(monkeypatch: Patch) -> None:
    model = made("a", "b")
    store = opened(model, monkeypatch, Sleeper(model))
    for number in range(4):
        model.put(f"k{number}", bytes([number + 1]) * SIZE, ("ab"[number % 2], number * 2 * SIZE))
    assert store.get_into([f"k{n}" for n in range(4)], [n * SIZE for n in range(4)], [SIZE] * 4) == [OK] * 4
    assert model.slots[: 4 * SIZE] == b"".join(bytes([n + 1]) * SIZE for n in range(4))
    assert not model.blocking
    assert store.get_into(["k0", "gone"], [0, SIZE], [SIZE] * 2) == [OK, MISS], "Mooncake says what is not there"
    assert model.blocking == [["gone"]]


@pytest.mark.parametrize(("asked", "result"), [(0.45, OK), (0.55, AGAIN)])
def test_the_lease_counts_from_before_the_question(monkeypatch: Patch, asked: float, result: ErrorClass) -> None:
    """The master may have granted it at any time while the question was under way. At its end nothing counts."""
    model = made("a")
    ask = model.batch_get_replica_desc

    def slowly(keys: list[str]) -> dict[str, list[Any]]:
        model.clock.ns += int(asked * LEASE_NS) if not model.begun else 0
        return ask(keys)

    def crawl() -> None:
        model.clock.ns += int(0.4 * LEASE_NS)

    store = opened(model, monkeypatch, Sleeper(model, crawl))
    monkeypatch.setattr(model, "batch_get_replica_desc", slowly)
    model.put("k", b"k" * SIZE, ("a", 0))
    assert store.get_into(["k"], [0], [SIZE]) == [result]


def test_a_read_that_is_given_up_begins_nothing_more(monkeypatch: Patch) -> None:
    model, get = made("a"), Get()
    store = opened(model, monkeypatch, Sleeper(model))
    for number in range(3):
        model.put(f"k{number}", b"k" * SIZE, ("a", number * 2 * SIZE))
    model.on_begin = lambda: setattr(get, "late", True)
    assert store.get_into(["k0", "k1", "k2"], [0, SIZE, 2 * SIZE], [SIZE] * 3, get) == [OK, TRANSFER, TRANSFER]
    assert model.begun == 1


def test_a_node_that_is_new_or_failed_is_probed_first_and_otherwise_read_by_mooncake(monkeypatch: Patch) -> None:
    """The engine's first question to a node that hangs would hold up the transfers of all others."""
    model = made("a")
    sleeper = Sleeper(model)
    store = opened(model, monkeypatch, sleeper)
    model.put("k", b"k" * SIZE, ("a", 0))
    model.nodes["a"].state = "stopped"
    assert store.get_into(["k"], [0], [SIZE]) == [TRANSFER]
    assert model.blocking == [["k"]]
    model.nodes["a"].state = "alive"
    model.clock.advance_ms(1100)
    assert store.get_into(["k"], [0], [SIZE]) == [OK]
    sleeper.steps = [lambda: setattr(model.nodes["a"], "state", "dead")]
    assert store.get_into(["k"], [0], [SIZE]) == [TRANSFER]
    model.clock.advance_ms(1100)
    assert store.get_into(["k"], [0], [SIZE]) == [TRANSFER]
    assert len(model.blocking) == 2


def test_of_several_replicas_one_of_a_node_with_less_to_send_is_read(monkeypatch: Patch) -> None:
    model = made("a", "b")
    read: list[str] = []
    model.on_write = lambda transfer: read.append(transfer.node)
    store = opened(model, monkeypatch, Sleeper(model))
    keys = [f"k{number}" for number in range(4)]
    for number, key in enumerate(keys):
        model.put(key, b"k" * SIZE, ("a", number * 2 * SIZE), ("b", number * 2 * SIZE))
    assert store.get_into(keys, [n * SIZE for n in range(4)], [SIZE] * 4) == [OK] * 4
    assert sorted(read) == ["a", "a", "b", "b"]
    model.nodes["b"].state = "stopped"
    model.put("new", b"n" * SIZE, ("b", 8 * SIZE), ("a", 8 * SIZE))
    other = made("a", "b")
    other.nodes["b"].state, other.values = "stopped", model.values
    read.clear()
    other.on_write = model.on_write
    store = opened(other, monkeypatch, Sleeper(other))
    assert store.get_into(["new"], [0], [SIZE]) == [OK]
    assert read == ["a"], "the only one that answers a probe"


def test_values_that_follow_one_another_on_both_sides_come_in_one_transfer(monkeypatch: Patch) -> None:
    """Neither a gap on one side, nor another node, nor another size, nor more bytes than a piece may have."""
    model = made("a", "b")
    sizes: list[int] = []
    model.on_begin = lambda: sizes.append(model.transfers[model.begun].size)
    store = opened(model, monkeypatch, Sleeper(model))
    for number, (node, at) in enumerate([("a", 0), ("a", 1), ("a", 2), ("a", 4), ("b", 5), ("b", 6), ("b", 7)]):
        model.put(f"k{number}", bytes([number + 1]) * SIZE, (node, at * SIZE))
    slots = [0, 1, 2, 3, 4, 5, 7]
    keys, to = [f"k{number}" for number in range(7)], [slot * SIZE for slot in slots]

    def read() -> list[int]:
        sizes.clear()
        assert store.get_into(keys, to, [SIZE] * 7) == [OK] * 7
        assert [model.slots[at] for at in to] == [1, 2, 3, 4, 5, 6, 7]
        return sizes

    assert read() == [3 * SIZE, SIZE, 2 * SIZE, SIZE]
    monkeypatch.setattr(sleeping_reads, "PIECE_BYTES", 2 * SIZE)
    assert read() == [2 * SIZE, SIZE, SIZE, 2 * SIZE, SIZE]
    model.put("k1", b"?" * (SIZE - 1), ("a", SIZE))
    assert store.get_into(keys, to, [SIZE] * 7)[:3] == [OK, ErrorClass.FOREIGN, OK]


def test_where_a_transfer_of_several_values_failed_they_come_one_by_one(monkeypatch: Patch) -> None:
    """Their memory may be two areas for Mooncake, and then no transfer reaches across: one failure is enough."""
    model = made("a")
    model.nodes["a"].border = 2 * SIZE
    store = opened(model, monkeypatch, Sleeper(model))
    keys, to = [f"k{number}" for number in range(4)], [number * SIZE for number in range(4)]
    for number, key in enumerate(keys):
        model.put(key, bytes([number + 1]) * SIZE, ("a", number * SIZE))
    assert store.get_into(keys, to, [SIZE] * 4) == [TRANSFER] * 4
    model.clock.advance_ms(1100)
    assert store.get_into(keys[:1], to[:1], [SIZE]) == [OK], "the node is not put aside any more"
    assert store.get_into(keys, to, [SIZE] * 4) == [OK] * 4
    assert model.begun == 1 + 1 + 4


class History:
    """Reads, one within the sleep of another, while values are evicted, removed and put, and nodes stop, die, crawl.

    Checks: bytes that count are the value's; nothing is written to a slot that no read holds; every read ends.
    """

    def __init__(self, seed: int, patch: Patch) -> None:
        self.chance, self.depth, self.slept = Random(seed), 0, 0
        self.model = made("a", "b")
        self.keys = [f"k{number}" for number in range(6)]
        self.spare = [(node, at * SIZE) for node in self.model.nodes for at in range(4)]
        self.held: set[int] = set()
        self.removed: dict[str, tuple[str, int]] = {}
        self.counted = self.joined = 0
        self.model.on_write = self.check_slot
        self.store = opened(self.model, patch, self.sleep)

    def check_slot(self, transfer: Transfer) -> None:
        self.joined += transfer.size > SIZE
        slots = range(transfer.destination, transfer.destination + transfer.size, SIZE)
        assert self.held.issuperset(slots), "a slot was written that no read holds"

    def value(self, key: str) -> bytes:
        return key.encode() * (SIZE // 2)

    def run(self) -> int:
        for _ in range(60):
            self.event()
            self.read()
        assert not self.model.transfers, "a transfer that no read holds"
        return self.counted

    def read(self) -> None:
        free = [at for at in range(0, len(self.model.slots), SIZE) if at not in self.held]
        keys = self.chance.sample(self.keys, self.chance.randint(1, 4))
        mine, get, self.depth = self.chance.sample(free, len(keys)), Get(), self.depth + 1
        if self.chance.random() < 0.7:  # as they often lie
            at, places = self.chance.randrange(len(free) - len(keys)), self.model.values
            keys.sort(key=lambda key: [(place.node, place.address) for place in places.get(key, ())])
            mine = free[at : at + len(keys)]
        self.held.update(mine)
        for at in mine:
            self.model.slots[at : at + SIZE] = b"-" * SIZE
        self.get = get
        results = self.store.get_into(keys, mine, [SIZE] * len(keys), get)
        for key, at, result in zip(keys, mine, results, strict=True):
            if result is OK:
                self.counted += 1
                assert self.model.slots[at : at + SIZE] == self.value(key), "wrong bytes"
        self.held.difference_update(mine)
        self.depth -= 1

    def sleep(self, seconds: float) -> None:
        self.slept += 1
        self.model.clock.ns += int(seconds * 1e9)
        if self.slept % 200 == 0:  # what hung ends, one way or another
            for node in self.model.nodes.values():
                node.state = self.chance.choice(["alive", "dead"])
        self.event()
        for transfer in list(self.model.transfers.values()):
            if self.chance.random() < 0.5:
                self.model.go_on(transfer, self.chance.randint(1, SIZE))
        if self.depth < 3 and self.chance.random() < 0.05:
            self.read()

    def event(self) -> None:
        self.chance.choice([self.put] * 3 + [self.node] * 2 + [self.evict, self.churn, self.remove, self.time])()

    def put(self) -> None:
        key = self.chance.choice(self.keys)
        if key in self.model.values or not self.spare:
            return
        self.chance.shuffle(self.spare)
        # After a forced removal the value does not come back to a place where another stood meanwhile: of that, nothing
        # but the lease could tell, which such a removal heeds not (docs/adr/0162).
        place = next((each for each in self.spare if each != self.removed.get(key)), None)
        if place is not None:
            self.spare.remove(place)
            size = SIZE if self.chance.random() < 0.9 else SIZE - self.chance.choice([1, 3])
            self.model.put(key, (self.value(key) * 2)[:size] if size == SIZE else b"?" * size, place)

    def gone(self, key: str) -> None:
        [place] = self.model.values.pop(key)
        self.spare.append((place.node, place.address))

    def evict(self) -> None:
        """Only what has no lease."""
        for key in [*self.model.values]:
            if self.model.leases.get(key, 0) < self.model.clock.ns and self.chance.random() < 0.5:
                self.removed.pop(key, None)
                self.gone(key)

    def churn(self) -> None:
        """A value without a lease goes, another stands in its place for a while, and the first comes back to it."""
        for key in [*self.model.values]:
            [place] = self.model.values[key]
            if self.model.leases.get(key, 0) < self.model.clock.ns and place.size == SIZE:
                self.removed.pop(key, None)
                self.model.nodes[place.node].memory[place.address : place.address + SIZE] = b"#" * SIZE
                for transfer in list(self.model.transfers.values()):
                    self.model.go_on(transfer, self.chance.randint(1, SIZE))
                self.model.put(key, self.value(key), (place.node, place.address))

    def remove(self) -> None:
        if self.model.values and self.chance.random() < 0.3:
            key = self.chance.choice([*self.model.values])
            [place] = self.model.values[key]
            self.removed[key] = (place.node, place.address)
            self.gone(key)

    def node(self) -> None:
        node = self.chance.choice([*self.model.nodes.values()])
        node.state = self.chance.choices(["alive", "stopped", "dead"], [6, 2, 1])[0]

    def time(self) -> None:
        self.model.clock.ns += self.chance.choice([10**6, 10**7, 10**8, LEASE_NS])
        if self.chance.random() < 0.2:
            self.get.late = True

    get = Get()


def run_all(patch: Patch) -> tuple[int, int]:
    """Run all histories; return how many values counted, and how many writes were of several values' transfers."""
    histories = [History(seed, patch) for seed in range(150)]
    return sum(each.run() for each in histories), sum(each.joined for each in histories)


def test_random_histories_bring_no_wrong_byte_and_write_no_slot_that_is_free(monkeypatch: Patch) -> None:
    counted, joined = run_all(monkeypatch)
    assert counted > 1000, "reads that count"
    assert joined > 300


def no_lease(patch: Patch) -> None:
    patch.setattr(SleepingReads, "leased_until_ns", lambda _: 1 << 62)


def no_size(patch: Patch) -> None:
    patch.setattr(replicas, "Place", lambda node, address, size: Place(node, address, SIZE))


def no_move(patch: Patch) -> None:
    patch.setattr(client, "void_what_moved", lambda *_: None)


def not_ended(patch: Patch) -> None:
    patch.setitem(sleeping_reads.ENDED, 0, TRANSFER)


def failed_is_ok(patch: Patch) -> None:
    patch.setitem(sleeping_reads.ENDED, -1, OK)


def no_probe(patch: Patch) -> None:
    patch.setattr(Model, "send_probe", lambda *_: 0)


@pytest.mark.parametrize("plant", [no_lease, no_size, no_move, not_ended, failed_is_ok, no_probe])
def test_without_a_guard_the_histories_fail(monkeypatch: Patch, plant: Callable[[Patch], None]) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"wrong bytes|no read holds|it waits"):
        run_all(monkeypatch)
