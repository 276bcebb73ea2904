"""The planner under random events: each published block is there, and in the end no slot is held."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from kvprefetch.daemon.planning.requests import Key, Order
from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.planning.support import Planner, digests, hint, planned, returned, shown

HISTORIES = 500
EVENTS = {
    "hint": 6, "ask": 3, "stop": 1, "order": 8, "fetched": 6, "overdue": 1, "returned": 2, "renewed": 1, "finish": 4,
    "claim": 2, "unclaim": 1, "reset": 0.3, "announce": 1, "ahead": 2,
}  # fmt: skip


def some_prompt(chance: Random) -> list[str]:
    """Return blocks of one of two prompts, now and then with blocks of any prompt in some places."""
    chain = chance.randrange(2)
    names = [f"p{chain}-{i}" for i in range(chance.randint(1, 7))]
    for at in chance.choices(range(len(names)), k=chance.choice([0, 0, 0, 1, 2])):
        names[at] = f"p{chance.randrange(3)}-{chance.randrange(4)}"
    return names


class History:
    """Up to 120 events in any order, then the end of all requests."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.slots = chance.randint(1, 12)
        self.lost: set[int] = set()  # one slot stays, so that all requests can end
        self.planner, self.flags = planned(self.slots, chance.randint(1, 4), self.lost)
        self.live: dict[Key, list[str]] = {}
        self.content: dict[int, str] = {}
        self.orders: list[Order] = []
        self.overdue: list[Order] = []
        self.stopped: set[Key] = set()
        self.number = 0
        self.fetched = self.loaded = 0  # blocks, each counted at its first load
        self.fresh: set[int] = set()  # slots with a block that was fetched and not loaded

    def some_live(self) -> Key:
        return self.chance.choice(sorted(self.live))

    def some_of(self, orders: list[Order]) -> Order:
        return orders.pop(self.chance.randrange(len(orders)))

    def begin(self, order: Order | None) -> None:
        if order is not None:
            assert self.lost.isdisjoint(order.slots), "no fetch goes to a slot that an old call still writes to"
            self.orders.append(order)
            self.content.update((slot, "") for slot in order.slots)
            self.fresh -= set(order.slots)

    def end(self, order: Order) -> list[bool]:
        """Let a store call end; now and then a failed block is still under way."""
        results = [self.chance.random() < 0.85 for _ in order.slots]
        for slot, ok in zip(order.slots, results, strict=True):
            if not ok and self.chance.random() < 0.3 and len(self.lost) < self.slots - 1:
                self.lost.add(slot)
        self.fetched += sum(results)
        self.planner.fetched(order.number, results, 1)
        return results

    def happens(self, event: str) -> None:
        chance, planner, flags, live = self.chance, self.planner, self.flags, self.live
        match event:
            case "hint":
                self.number += 1
                names = some_prompt(chance)
                local = chance.choice([0, 0, chance.randrange(len(names))])
                planner.block_ns = chance.choice([[0.0, 0.0], [1.0, 1.0], [3.0, 50.0]])
                at_ns = 5 * self.number + chance.randint(-9, 9)
                key = hint(planner, self.number, *names, local=local, priority=chance.randint(0, 2), at_ns=at_ns)
                live[key] = names
                disk = bytes(chance.choices([0, 1], k=len(names) - local)) if chance.random() < 0.3 else b""
                planner.looked_up(key, chance.choice([len(names), chance.randint(local, len(names))]), disk)
            case "ask" if live:
                planner.ask(self.some_live())
            case "stop" if live:
                key = self.some_live()
                for number in planner.stop(key)[: chance.randint(0, 3)]:
                    planner.drop(number)  # now and then its call has begun after all
                assert not planner.requests[key].wants_work
                self.stopped.add(key)
            case "order":
                flags.taken_back.clear()
                held = {key: planner.requests[key].issued for key in self.stopped & live.keys()}
                self.begin(planner.next_order(chance.choice(list(Lane))))
                assert all(planner.requests[key].issued <= count for key, count in held.items()), "nothing more"
                planner.tick()
                assert len(set(flags.taken_back)) == len(flags.taken_back), "an order takes from each request once"
            case "fetched" if self.orders:
                order = self.some_of(self.orders)
                for digest, slot, ok in zip(order.digests, order.slots, self.end(order), strict=True):
                    self.content[slot] = shown(digest) if ok else ""
                    if ok:
                        self.fresh.add(slot)
            case "overdue" if self.orders:
                self.overdue.append(self.some_of(self.orders))
                planner.overdue(self.overdue[-1].number, 1)
            case "returned" if self.overdue:
                self.end(self.some_of(self.overdue))
            case "renewed" if live:
                planner.looked_up(self.some_live(), chance.randint(0, 7))
            case "unclaim" if flags.claimed:
                flags.claimed.discard(chance.choice(sorted(flags.claimed)))
            case "finish" if live:
                key = self.some_live()
                loaded = range(chance.randint(0, 7), chance.randint(0, flags.count.get(key, 0)))
                slots = {slot for block, slot in flags.slots.get(key, {}).items() if block in loaded}
                self.loaded += len(slots & self.fresh)
                self.fresh -= slots
                planner.finish(key, loaded)
                flags.claimed.discard(key)
                del live[key]
            case "claim" if live:
                flags.claimed.add(self.some_live())
            case "announce":
                self.number += 1
                names = some_prompt(chance)
                disk = bytes(chance.choices([0, 1], k=len(names))) if chance.random() < 0.3 else b""
                key = planner.hinted((-1, self.number), digests(*names), until_ns=chance.randint(1, 9)).key
                planner.looked_up(key, chance.randint(0, len(names)), disk)
            case "ahead":
                self.begin(planner.next_order(chance.choice(list(Lane)), ahead=True))
            case "reset":
                for request in planner.reset():
                    del live[request.key]
                flags.refused |= live.keys()  # the planner publishes nothing more for them

    def check(self) -> None:
        while self.flags.ended:
            self.planner.finish(self.flags.ended.pop().key)
        unloaded = self.planner.check()
        assert self.planner.gauges()["slots_stuck"] == sum(len(order.slots) for order in self.overdue)
        assert self.fetched == self.loaded + sum(self.planner.blocks.wasted) + len(unloaded), "each has one fate"
        assert unloaded <= self.fresh
        flags = self.flags
        for key, names in self.live.items():
            assert self.planner.requests[key].final == (key in flags.final | flags.refused)
            for at, slot in flags.slots.get(key, {}).items():
                if at < flags.count[key]:
                    assert self.content[slot] == names[at], "the slot holds the block that the flag promises"

    def run_out(self) -> None:
        """End all orders and requests: each request gets its answer, and then no slot is held."""
        planner, flags, live = self.planner, self.flags, self.live
        for order in self.orders + self.overdue:
            returned(planner, order)
        for _ in range(200):
            for lane, ahead in product(Lane, (False, True)):
                if (order := planner.next_order(lane, ahead=ahead)) is not None:
                    returned(planner, order)
            while flags.ended:
                planner.finish(flags.ended.pop().key)
            if not planner.requests:
                break
            ended = [key for key in live if planner.requests[key].final or key in flags.claimed]
            assert ended or not live or any(map(planner.wants, Lane)), "a request waits and nothing will ever come"
            for key in ended[:1]:
                flags.claimed.discard(key)
                planner.finish(key)
                del live[key]
        assert not planner.requests, "nothing will ever come for these"
        planner.check()
        assert planner.blocks.used == [0, 0]
        gauges = planner.gauges()
        assert gauges["slots_lost"] == len(self.lost)
        assert gauges["slots_free"] + gauges["slots_idle"] == self.slots - len(self.lost)
        assert gauges["blocks_pinned"] == gauges["requests"] == gauges["orders"] == 0


def play(seeds: range) -> None:
    for seed in seeds:
        history = History(Random(seed))
        for event in history.chance.choices(list(EVENTS), list(EVENTS.values()), k=history.chance.randint(1, 120)):
            history.happens(event)
            history.check()
        history.run_out()


def test_a_stop_that_publishes_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted defect: a stopped request with nothing under way is never final."""

    def silent(self: Planner, key: Key) -> list[int]:
        request = self.requests[key]
        if not request.final:
            request.limit = request.issued
        return []

    monkeypatch.setattr(Planner, "stop", silent)
    with pytest.raises(AssertionError, match=r"nothing more|nothing will ever come"):
        play(range(50))


@pytest.mark.parametrize("first", range(0, HISTORIES, 50))
def test_any_history_keeps_slots_pins_and_published_counts_consistent(first: int) -> None:
    play(range(first, first + 50))
