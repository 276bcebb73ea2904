"""The planner under any history of events: nothing is published that is not there, and nothing is held in the end."""

from __future__ import annotations

from random import Random

import pytest

from kvprefetch.daemon.planning.planner import Key, Lane, Order, Planner
from tests.daemon.planning.support import FlagsModel, digests, hint

HISTORIES = 500
EVENTS = {
    "hint": 6, "ask": 3, "order": 8, "fetched": 6, "overdue": 1, "returned": 2, "renewed": 1, "finish": 4, "claim": 2,
    "unclaim": 1, "reset": 0.3, "warm": 1,
}  # fmt: skip


def some_prompt(chance: Random) -> list[str]:
    """Blocks of one of two prompts, now and then with a block of some prompt, also one of its own, in some place."""
    chain = chance.randrange(2)
    names = [f"p{chain}-{i}" for i in range(chance.randint(1, 7))]
    for at in chance.choices(range(len(names)), k=chance.choice([0, 0, 0, 1, 2])):
        names[at] = f"p{chance.randrange(3)}-{chance.randrange(4)}"
    return names


def lose(chance: Random, lost: set[int], order: Order, results: list[bool], slots: int) -> None:
    """Now and then what failed is still under way."""
    for slot, ok in zip(order.slots, results, strict=True):
        if not ok and chance.random() < 0.3 and len(lost) < slots - 1:
            lost.add(slot)


def history(chance: Random) -> None:
    """Up to 120 events as they may come, and after them everybody's end."""
    flags = FlagsModel()
    slots = chance.randint(1, 12)
    lost: set[int] = set()  # one slot stays, so that everybody's end can come
    planner = Planner(slots, flags, chunk_blocks=chance.randint(1, 4), lost=lost)
    live: dict[Key, list[str]] = {}
    content: dict[int, str] = {}
    orders: list[Order] = []
    overdue: list[Order] = []
    number = 0
    taken_back = flags.taken_back
    fetched = loaded = 0  # blocks, each counted at its first load
    fresh: set[int] = set()  # slots with a block that was fetched and not loaded
    for event in chance.choices(list(EVENTS), list(EVENTS.values()), k=chance.randint(1, 120)):
        match event:
            case "hint":
                number += 1
                names = some_prompt(chance)
                local = chance.choice([0, 0, chance.randrange(len(names))])
                key = hint(planner, number, *names, local=local, priority=chance.randint(0, 2))
                live[key] = names
                tiers = bytes(chance.choices([0, 1], k=len(names) - local)) if chance.random() < 0.3 else b""
                planner.looked_up(key, chance.choice([len(names), chance.randint(local, len(names))]), tiers)
            case "ask" if live:
                planner.ask(chance.choice(sorted(live)))
            case "order":
                taken_back.clear()
                order = planner.next_order(chance.choice(list(Lane)))
                planner.tick()
                assert len(set(taken_back)) == len(taken_back), "nobody gets room that it loses to the same order"
                if order is not None:
                    assert lost.isdisjoint(order.slots), "nothing is fetched into a slot that is still written to"
                    orders.append(order)
                    content.update((slot, "") for slot in order.slots)
                    fresh -= set(order.slots)
            case "fetched" if orders:
                order = orders.pop(chance.randrange(len(orders)))
                results = [chance.random() < 0.85 for _ in order.slots]
                lose(chance, lost, order, results, slots)
                for digest, slot, ok in zip(order.digests, order.slots, results, strict=True):
                    content[slot] = digest.decode().rstrip(".") if ok else ""
                    if ok:
                        fresh.add(slot)
                        fetched += 1
                planner.fetched(order.number, results, 1)
            case "overdue" if orders:
                overdue.append(orders.pop(chance.randrange(len(orders))))
                planner.overdue(overdue[-1].number, 1)
            case "returned" if overdue:
                order = overdue.pop(chance.randrange(len(overdue)))
                results = [chance.random() < 0.85 for _ in order.slots]
                lose(chance, lost, order, results, slots)
                fetched += sum(results)
                planner.fetched(order.number, results, 1)
            case "renewed" if live:
                key = chance.choice(sorted(live))
                planner.looked_up(key, chance.randint(0, 7))
            case "unclaim" if flags.claimed:
                flags.claimed.discard(chance.choice(sorted(flags.claimed)))
            case "finish" if live:
                key = chance.choice(sorted(live))
                taken = range(chance.randint(0, 7), chance.randint(0, flags.count.get(key, 0)))
                slots_taken = {slot for block, slot in flags.slots.get(key, {}).items() if block in taken}
                loaded += len(slots_taken & fresh)
                fresh -= slots_taken
                planner.finish(key, taken)
                flags.claimed.discard(key)
                del live[key]
            case "claim" if live:
                flags.claimed.add(chance.choice(sorted(live)))
            case "warm":
                names = [name for name in some_prompt(chance) if not planner.blocks.touch(digests(name), "list")]
                lane = chance.choice(list(Lane))
                order = planner.warm([digests(name) for name in dict.fromkeys(names)], lane, "list")
                if order is not None:
                    assert lost.isdisjoint(order.slots)
                    orders.append(order)
                    content.update((slot, "") for slot in order.slots)
                    fresh -= set(order.slots)
            case "reset":
                for request in planner.reset():
                    del live[request.key]
                flags.refused |= live.keys()  # whatever comes for them, nothing is published
        unloaded = planner.check()
        gauges = planner.gauges()
        assert gauges["slots_stuck"] == sum(len(order.slots) for order in overdue)
        assert fetched == loaded + sum(planner.blocks.wasted) + len(unloaded), "each has one fate"
        assert unloaded <= fresh
        for key, names in live.items():
            assert planner.requests[key].final == (key in flags.final | flags.refused)
            # What is published is there: the slot holds the very block the flag promises.
            for block, slot in flags.slots.get(key, {}).items():
                if block < flags.count[key]:
                    assert content[slot] == names[block]
    # Whatever is left comes to its end: every request is answered in full, and then nothing is held.
    for order in orders + overdue:
        planner.fetched(order.number, [True] * len(order.slots), 1)
    taken_back.clear()
    for _ in range(200):
        for lane in Lane:
            order = planner.next_order(lane)
            if order is not None:
                planner.fetched(order.number, [True] * len(order.slots), 1)
        if not live:
            break
        ended = [key for key in live if planner.requests[key].final or key in flags.claimed]
        assert ended or planner.has_work, "someone waits and nothing will ever come"
        for key in ended[:1]:
            flags.claimed.discard(key)
            planner.finish(key)
            del live[key]
    assert not live
    assert planner.blocks.used == [0, 0]
    assert not planner.blocks.sole
    gauges = planner.gauges()
    assert gauges["slots_lost"] == len(lost)
    assert gauges["slots_free"] + gauges["slots_idle"] == slots - len(lost)
    assert gauges["blocks_pinned"] == gauges["requests"] == gauges["orders"] == 0


@pytest.mark.parametrize("first", range(0, HISTORIES, 50))
def test_any_history_keeps_slots_pins_and_published_counts_consistent(first: int) -> None:
    for seed in range(first, first + 50):
        history(Random(seed))
