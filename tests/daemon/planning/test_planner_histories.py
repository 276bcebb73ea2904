"""The planner under random events: each published block is there, and in the end no slot is held."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest

from kvprefetch.daemon.planning import holdings
from kvprefetch.daemon.planning.requests import AnnounceTimes, Key, Order
from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.planning.support import ONE_GROUP, SHAPES, Planner, digests, planned, returned

HISTORIES = 500
EVENTS = {
    "hint": 6, "ask": 3, "stop": 1, "order": 8, "fetched": 6, "overdue": 1, "returned": 2, "renewed": 1, "finish": 4,
    "claim": 2, "unclaim": 1, "reset": 0.3, "announce": 1, "ahead": 2, "forget": 1, "give up": 0.2,
}  # fmt: skip


def some_prompt(chance: Random, each: int) -> list[str]:
    """Return digests of one of two prompts, `each` for a unit, now and then with those of any prompt in some places."""
    chain = chance.randrange(2)
    names = [f"p{chain}-{i}" for i in range(each * chance.randint(1, 7))]
    for at in chance.choices(range(len(names)), k=chance.choice([0, 0, 0, 1, 2])):
        other = f"p{chance.randrange(3)}-{chance.randrange(4)}"
        names[at] = names[at] if other in names else other  # no prompt has a block twice
    return names


class History:
    """Up to 120 events in any order, then the end of all requests, of an engine with one KV group or several."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.groups = chance.choice([*[ONE_GROUP] * len(SHAPES), *SHAPES])
        self.each = self.groups.unit_tokens // self.groups.hash_tokens
        self.slots = chance.randint(1, 12 if self.groups.partial else 40)
        self.lost: set[int] = set()  # one slot stays, so that all requests can end
        self.planner, self.flags = planned(self.slots, chance.randint(1, 4), self.lost)
        self.live: dict[Key, list[str]] = {}
        self.content: dict[int, bytes] = {}
        self.orders: list[Order] = []
        self.overdue: list[Order] = []
        self.stopped: set[Key] = set()
        self.number = 0
        self.fetched = self.loaded = 0  # blocks, each counted at its first load
        self.fresh: set[int] = set()  # slots with a block that was fetched and not loaded

    def needed(self, names: list[str], local: int, units: int) -> list[bytes]:
        """Return the names of the blocks that a prefix needs, in the slot table's order."""
        items = self.groups.items(local * self.groups.unit_tokens, units * self.groups.unit_tokens)
        return [
            digests(names[(block + 1) * self.groups.ratio(group) - 1]) + bytes([group])
            for group, blocks in enumerate(items)
            for block in blocks
        ]

    def arrives(self, key: Key, local: int, names: list[str], *options: Any) -> None:
        """Hint or announce a prompt, and answer its look-up."""
        chance, units = self.chance, len(names) // self.each
        request = self.planner.arrives(key, self.groups, digests(*names), range(local, units), *options)
        if self.groups.partial:
            disk = bytes(chance.choices([0, 1], k=units - local)) if chance.random() < 0.3 else b""
            self.planner.looked_up(key, chance.choice([units, chance.randint(local, units)]), disk)
        else:
            every = sorted({name for end in range(local, units) for name in self.needed(names, local, end + 1)})
            self.planner.stored |= {name for name in every if chance.random() < 0.95}
            self.planner.disk |= {name for name in every if chance.random() < 0.1}
            self.planner.ask_store(request)

    def load(self, key: Key) -> tuple[range, set[int]]:
        """Return some blocks that the engine loaded of a request, and the slots that it read."""
        chance, count = self.chance, self.flags.count.get(key, 0)
        request = self.planner.requests[key]
        local, table = request.prompt.local_blocks, self.table(key)
        if self.groups.partial:
            loaded = range(chance.randint(0, 7), chance.randint(0, count))
        elif count > local:
            loaded = range(chance.randint(local, count - 1), count)
        else:
            return range(0), set()
        return loaded, {table[entry] for part in request.prompt.loaded(loaded) for entry in part if entry < len(table)}

    def table(self, key: Key) -> list[int]:
        """Return the slots that a flag shows."""
        return [slot for _, slot in sorted(self.flags.slots.get(key, {}).items())]

    def some_live(self) -> Key:
        return self.chance.choice(sorted(self.live))

    def some_of(self, orders: list[Order]) -> Order:
        return orders.pop(self.chance.randrange(len(orders)))

    def begin(self, order: Order | None) -> None:
        if order is not None:
            assert self.lost.isdisjoint(order.slots), "no fetch goes to a slot that an old call still writes to"
            self.orders.append(order)
            self.content.update((slot, b"") for slot in order.slots)
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
                names = some_prompt(chance, self.each)
                local = chance.choice([0, 0, chance.randrange(len(names) // self.each)])
                planner.block_ns = chance.choice([[0.0, 0.0], [1.0, 1.0], [3.0, 50.0]])
                key = (self.number, 1)
                live[key] = names
                self.arrives(key, local, names, chance.randint(0, 2), 5 * self.number + chance.randint(-9, 9))
            case "ask" if live:
                planner.ask(self.some_live())
            case "stop" if live and self.groups.partial:  # an engine with several does not stop a fetch
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
                    self.content[slot] = digest if ok else b""
                    if ok:
                        self.fresh.add(slot)
            case "overdue" if self.orders:
                self.overdue.append(self.some_of(self.orders))
                planner.overdue(self.overdue[-1].number, 1)
            case "returned" if self.overdue:
                self.end(self.some_of(self.overdue))
            case "renewed" if live and self.groups.partial:
                planner.looked_up(self.some_live(), chance.randint(0, 7))
            case "renewed" if live:
                request = planner.requests[self.some_live()]
                planner.absent(request, chance.randint(0, max(1, request.blocks)))
            case "forget" if planner.stored:
                planner.stored -= set(chance.choices(sorted(planner.stored), k=4))
            case "give up" if not self.groups.partial:
                planner.give_up(chance.choice(list(Lane)))
            case "unclaim" if flags.claimed:
                flags.claimed.discard(chance.choice(sorted(flags.claimed)))
            case "finish" if live:
                key = self.some_live()
                loaded, slots = self.load(key)
                self.loaded += len(slots & self.fresh)
                self.fresh -= slots
                planner.finish(key, loaded)
                flags.claimed.discard(key)
                del live[key]
            case "claim" if live:
                flags.claimed.add(self.some_live())
            case "announce":
                self.number += 1
                names = some_prompt(chance, self.each)
                self.arrives((-1, self.number), 0, names, 0, 0, AnnounceTimes(0, chance.randint(1, 9)))
            case "ahead":
                self.begin(planner.next_order(chance.choice(list(Lane)), ahead=True))
            case "reset":
                for request in planner.reset():
                    del live[request.key]
                flags.refused |= live.keys()  # the planner publishes nothing more for them

    def check(self) -> None:
        self.planner.carry_out()
        while self.flags.ended:
            self.planner.finish(self.flags.ended.pop().key)
        unloaded = self.planner.check()
        assert self.planner.gauges()["slots_stuck"] == sum(len(order.slots) for order in self.overdue)
        if not (self.planner.holdings.debts or self.planner.blocks.void):
            assert self.fetched == self.loaded + sum(self.planner.blocks.wasted) + len(unloaded), "each has one fate"
            assert unloaded <= self.fresh
        flags = self.flags
        for key, names in self.live.items():
            assert self.planner.requests[key].final == (key in flags.final | flags.refused)
            local, count = self.planner.requests[key].prompt.local_blocks, flags.count.get(key, 0)
            promised = self.needed(names, local, count) if count > local else []
            assert [self.content[slot] for slot in self.table(key)] == promised, "each slot holds its block"

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
            planner.carry_out()
            ended = [key for key in live if planner.requests[key].final or key in flags.claimed]
            more = planner.holdings.owes or any(planner.ready)
            assert ended or not live or more, "a request waits and nothing will ever come"
            for key in ended[:1]:
                flags.claimed.discard(key)
                planner.finish(key)
                del live[key]
        assert not planner.requests, "nothing will ever come for these"
        for _ in range(200):
            planner.carry_out()
        assert not planner.holdings.owes
        planner.check()
        assert planner.blocks.used == 0
        gauges = planner.gauges()
        assert gauges["slots_quarantined"] == len(self.lost)
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


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_any_history_is_as_consistent_in_slices(monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    """Events do no more than so many runs' work, and the next ones come in between."""
    monkeypatch.setattr(holdings, "RUNS", runs)
    play(range(HISTORIES // 2))
