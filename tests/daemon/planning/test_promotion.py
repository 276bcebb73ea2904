"""Copies in device slots: each entry names a slot with its block, whatever happens, and no device slot is lost."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from random import Random
from types import ModuleType

import pytest

from kvprefetch.daemon.planning import blocks, copies, promotion
from kvprefetch.daemon.planning.promotion import CopyOrder
from kvprefetch.daemon.planning.requests import Key, Order, Publication, Request
from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.planning.support import FlagsModel, Planner, hit, returned, run, shown
from tests.support.mutants import mutants

HISTORIES = 300
HOST = 8  # slots; device slots have the numbers behind
EVENTS = {
    "hint": 5, "ask": 4, "order": 6, "fetched": 6, "claim": 2, "unclaim": 2, "finish": 1.5, "reset": 0.2, "copy": 6,
    "copied": 6, "fault": 0.2,
}  # fmt: skip
# Mutants that only cost time, or take a slot from a copy under way, which ends in vain then; and one of requests with
# several KV groups, which has a test of its own.
EQUIVALENT = {
    "True instead of moves", "False instead of not self._copies", "True instead of self._copies", "without copy.there",
    "without request.held[block] == slot",
    *(f"{value} instead of len(self._queue) > 2 * len(self._requests) + 64" for value in (True, False)),
}  # fmt: skip


class Tables(FlagsModel):
    """Slot tables as the engine sees them. `read`: what it read under its claims."""

    promotions: promotion.Promotions
    copies: copies.Copies

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[Key, list[int]] = {}
        self.read: dict[Key, list[int]] = {}
        self.looks = 0

    def publish(self, publication: Publication) -> bool:
        request, start, slots, *_ = publication
        there = {slot: copy.slot for slot in slots if (copy := self.copies.of(slot)) is not None and copy.there}
        named = list(self.promotions.published(request, start, slots) if self.promotions.on else slots)
        assert named == [there.get(slot, slot) for slot in slots], "what is on the device is named at once"
        self.entries.setdefault(request.key, [])[start:] = named
        return super().publish(publication)

    def take_back(self, key: Key) -> bool:
        return super().take_back(key) and self.entries.pop(key, []) is not None

    def move(self, key: Key, entries: Sequence[tuple[int, int]]) -> bool:
        self.looks += 1
        for block, slot in () if key in self.claimed else entries:
            self.entries[key][block] = slot
        return key not in self.claimed

    def shows(self, key: Key) -> list[int]:
        return self.entries.get(key, [])[: self.count.get(key, 0)]

    def claim(self, key: Key) -> None:
        self.claimed.add(key)
        self.read.setdefault(key, self.shows(key))

    def unclaim(self, key: Key) -> None:
        self.claimed.discard(key)
        self.read.pop(key, None)


class Rig:
    """A planner with device slots, and a device that copies on demand."""

    def __init__(self, count: int, chunk: int = 4, module: ModuleType = promotion) -> None:
        self.flags, self.count = Tables(), count
        self.planner = Planner(HOST, self.flags, chunk_blocks=4, device_slots=range(HOST, HOST + count))
        self.copies = self.planner.blocks.copies
        self.promotions = module.Promotions(self.copies, self.planner.requests, self.flags, chunk_blocks=chunk)
        self.flags.promotions, self.flags.copies, self.chunk = self.promotions, self.copies, chunk

    def there(self) -> dict[int, int]:
        """Return the device slot of each host slot whose block has a copy."""
        copies = ((slot, self.copies.of(slot)) for slot in range(HOST))
        return {slot: copy.slot for slot, copy in copies if copy is not None and copy.there}

    def promote(self) -> None:
        while (order := self.promotions.next_order()) is not None:
            self.promotions.copied(order, ok=True)

    def staged(self, number: int, *names: str) -> Key:
        key = hit(self.planner, number, *names)
        run(self.planner)
        return key

    def near(self, *keys: Key) -> list[int]:
        """Count the entries of each request that name device slots."""
        return [sum(slot >= HOST for slot in self.flags.shows(key)) for key in keys]

    def finish(self, key: Key) -> None:
        self.planner.finish(key)
        self.flags.unclaim(key)


def test_a_request_that_has_other_blocks_by_then_does_not_name_a_copy() -> None:
    """With several KV groups a request that loses a block gets a shorter prefix, whose blocks have other numbers."""
    rig = Rig(2)
    key = rig.staged(1, "a", "b")
    before = rig.flags.shows(key)
    order = rig.promotions.next_order()
    assert order is not None
    rig.planner.requests[key].held.reverse()
    rig.promotions.copied(order, ok=True)
    assert rig.flags.shows(key) == before


def test_requests_that_ended_behind_one_that_waits_for_room_are_forgotten() -> None:
    rig = Rig(2)
    first, waiting = rig.staged(1, "a", "b"), rig.staged(2, "c", "d")
    for number in range(3, 500):
        rig.promote()
        rig.finish(rig.staged(number, "e"))
    assert rig.near(first, waiting) == [2, 0]
    assert sum(type(each) is Request for each in gc.get_objects()) < 200


@pytest.mark.parametrize("waiting", [100, 1600])
def test_the_cost_of_a_publication_does_not_depend_on_the_queue(waiting: int) -> None:
    """Counted in looks at flags, with a full device."""
    rig = Rig(4)
    names = [f"a{at}" for at in range(HOST)]
    for number in range(1, waiting):
        rig.staged(number, *names)
        rig.promote()
    assert rig.flags.looks < 4 * waiting


class History(Rig):
    """Up to 120 events in any order, then the end of all requests. Each block has its bytes, of the weights so far."""

    def __init__(self, chance: Random, module: ModuleType) -> None:
        super().__init__(chance.randint(1, 8), chance.randint(1, 4), module)
        self.chance, self.number, self.weights = chance, 0, 0
        self.live: dict[Key, list[str]] = {}  # the bytes of its blocks
        self.content: dict[int, str] = {}
        self.uses = [0] * HOST  # of each host slot: a copy beside another use is torn
        self.orders: list[tuple[Order, int]] = []
        self.under_way: list[tuple[CopyOrder, list[tuple[str, int]]]] = []
        self.ever_claimed: set[Key] = set()
        self.faulty = False
        self.found = 0  # device slots that engines read

    def some_live(self) -> Key:
        return self.chance.choice(sorted(self.live))

    def begin(self, order: Order | None) -> None:
        if order is not None:
            self.orders.append((order, self.weights))
            for slot in order.slots:
                self.content[slot] = ""
                self.uses[slot] += 1

    def fetched(self) -> None:
        order, weights = self.orders.pop(self.chance.randrange(len(self.orders)))
        results = [self.chance.random() < 0.9 for _ in order.slots]
        for digest, slot, ok in zip(order.digests, order.slots, results, strict=True):
            self.content[slot] = f"{weights}{shown(digest)}" if ok else ""
        self.planner.fetched(order.number, results, 1)

    def copy(self) -> bool:
        before, free, claimed = self.there(), len(self.copies.free), self.flags.claimed
        held = {slot for key in self.live.keys() - claimed for slot in self.planner.requests[key].held}
        if (order := self.promotions.next_order()) is not None:
            assert not self.faulty, "a device that failed is left alone"
            assert len(order.slots) <= self.chunk
            assert {host for host, _ in order.slots} <= held, "a claimed request has read its table"
            assert self.there() == before or free < len(order.slots), "there was room"
            self.under_way.append((order, [(self.content[host], self.uses[host]) for host, _ in order.slots]))
            self.content.update((device, "torn") for _, device in order.slots)
        return order is not None

    def copied(self, *, ok: bool = True) -> None:
        order, before = self.under_way.pop(self.chance.randrange(len(self.under_way)))
        for (host, device), (content, uses) in zip(order.slots, before, strict=True):
            self.content[device] = content if ok and uses == self.uses[host] else "torn"
        self.promotions.copied(order, ok=ok)

    def happens(self, event: str) -> None:
        chance, planner, flags, live = self.chance, self.planner, self.flags, self.live
        match event:
            case "hint":
                self.number += 1
                chain = chance.randrange(4)
                names = [f"p{chain}-{at}" for at in range(chance.randint(1, 6))]
                if chance.random() < 0.2:
                    names[-1] = f"p{chance.randrange(4)}-{len(names) - 1}"
                live[hit(planner, self.number, *names)] = [f"{self.weights}{name}" for name in names]
            case "ask" if live:
                planner.ask(self.some_live())
            case "order":
                self.begin(planner.next_order(Lane.MEMORY))
                planner.tick()
            case "fetched" if self.orders:
                self.fetched()
            case "claim" if live and flags.shows(key := self.some_live()):
                flags.claim(key)
                self.ever_claimed.add(key)
                self.found += self.near(key)[0]
            case "unclaim" if flags.claimed:
                flags.unclaim(chance.choice(sorted(flags.claimed)))
            case "finish" if live:
                self.finish(key := self.some_live())
                del live[key]
            case "copy":
                self.copy()
            case "copied" if self.under_way:
                self.copied()
            case "fault" if self.under_way:
                self.copied(ok=False)
                self.promotions.close()
                self.faulty = True
            case "reset":
                for request in planner.reset():
                    del live[request.key]
                self.weights += 1

    def check(self) -> None:
        under_way = [device for order, _ in self.under_way for _, device in order.slots]
        each = (*self.copies.free, *self.there().values(), *under_way)
        assert sorted(each) == list(self.copies.slots), "no device slot is lost or used twice"
        for key, names in self.live.items():
            for slots in (self.flags.shows(key), self.flags.read.get(key, [])):
                assert [self.content[slot] for slot in slots] == names[: len(slots)], "each slot holds its block"

    def settle(self) -> None:
        """Let all copies end: requests that are not near find no room."""
        turns = 0
        while self.copy() or self.under_way:
            turns += 1
            assert turns < 200, "one block is copied again and again"
            self.check()
            if self.under_way:
                self.copied()
        waits = [key for key in self.live if self.near(key)[0] < len(self.flags.shows(key))]
        if not self.faulty and any(key not in self.ever_claimed for key in waits):
            pins = [self.planner.blocks.at(slot).pins for slot in self.there()]
            assert all(pins), "a copy that no request needs stays"
            assert not self.copies.free, "a slot stays empty"

    def run_out(self) -> None:
        self.settle()
        for order, _ in self.orders:
            returned(self.planner, order)
        for key in list(self.live):
            self.finish(key)
            del self.live[key]
        self.check()
        assert self.promotions.gauges()["device_copies"] == 0


def play(seeds: range, module: ModuleType = promotion) -> int:
    found = 0
    for seed in seeds:
        history = History(Random(seed), module)
        for event in history.chance.choices(list(EVENTS), list(EVENTS.values()), k=history.chance.randint(1, 120)):
            history.happens(event)
            history.check()
        history.run_out()
        found += history.found
    return found


def test_any_history_names_the_right_blocks_and_loses_no_device_slot() -> None:
    assert play(range(HISTORIES)) > HISTORIES // 2, "engines read copies"


def test_each_condition_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant does something wrong within some histories."""
    missed = set()

    def try_out(what: str, module: ModuleType) -> None:
        with contextlib.suppress(Exception):  # whatever a mutant does wrong
            play(range(HISTORIES), module)
            missed.add(what.partition(": ")[2])

    for what, module in mutants(promotion, {"published", "next_order", "_promote", "copied"}):
        try_out(what, module)
    for what, module in mutants(copies, {"named", "begin", "end", "leave"}):
        monkeypatch.setattr(blocks, "Copies", module.Copies)
        try_out(what, promotion)
    assert missed == EQUIVALENT
