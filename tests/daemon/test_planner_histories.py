"""The planner under any history of events: nothing is published that is not there, and nothing is held in the end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.daemon.planner import Fetched, Key, Lane, Order, Planner
from tests.daemon.planning import FlagsModel, hint

MORE = ["order", "order", "fetched", "overdue", "returned", "renewed", "unclaim"]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_history_keeps_slots_pins_and_published_counts_consistent(data: st.DataObject) -> None:
    flags = FlagsModel()
    slots = data.draw(st.integers(1, 6), label="slots")
    planner = Planner(slots, flags, chunk_blocks=data.draw(st.integers(1, 4), label="chunk"))
    live: dict[Key, list[str]] = {}
    content: dict[int, str] = {}
    orders: list[Order] = []
    overdue: list[Order] = []
    number = 0
    for _ in range(data.draw(st.integers(1, 60), label="steps")):
        match data.draw(st.sampled_from(["hint", "ask", "order", "fetched", "finish", "claim", "reset", *MORE])):
            case "hint":
                number += 1
                names = [f"p{data.draw(st.integers(0, 2))}-{i}" for i in range(data.draw(st.integers(1, 5)))]
                local = data.draw(st.integers(0, len(names) - 1))
                key = hint(planner, number, *names, local=local, priority=data.draw(st.integers(0, 2)))
                live[key] = names
                tiers = bytes(data.draw(st.integers(0, 1)) for _ in names[local:])
                planner.looked_up(key, data.draw(st.integers(local, len(names))), tiers)
            case "ask" if live:
                planner.ask(data.draw(st.sampled_from(sorted(live))))
            case "order":
                order, revoked = planner.next_order(data.draw(st.sampled_from(Lane)))
                planner.tick()
                for request in revoked:
                    del live[request.key]
                if order is not None:
                    orders.append(order)
                    for block in order.blocks:
                        content[block.slot] = ""
            case "fetched" if orders:
                order = orders.pop(data.draw(st.integers(0, len(orders) - 1)))
                results = [Fetched(data.draw(st.booleans())) for _ in order.blocks]
                for block, result in zip(order.blocks, results, strict=True):
                    content[block.slot] = block.digest.decode().rstrip(".") if result.ok else ""
                planner.fetched(order.number, results, 1)
            case "overdue" if orders:
                overdue.append(orders.pop(data.draw(st.integers(0, len(orders) - 1))))
                planner.overdue(overdue[-1].number, 1)
            case "returned" if overdue:
                order = overdue.pop(data.draw(st.integers(0, len(overdue) - 1)))
                planner.fetched(order.number, [Fetched(data.draw(st.booleans())) for _ in order.blocks], 1)
            case "renewed" if live:
                key = data.draw(st.sampled_from(sorted(live)))
                planner.looked_up(key, data.draw(st.integers(0, 5)))
            case "unclaim" if flags.claimed:
                flags.claimed.discard(data.draw(st.sampled_from(sorted(flags.claimed))))
            case "finish" if live:
                key = data.draw(st.sampled_from(sorted(live)))
                planner.finish(key)
                flags.claimed.discard(key)
                del live[key]
            case "claim" if live:
                flags.claimed.add(data.draw(st.sampled_from(sorted(live))))
            case "reset":
                for request in planner.reset():
                    del live[request.key]
        gauges = planner.gauges()
        assert gauges["slots_stuck"] == sum(len(order.blocks) for order in overdue)
        assert planner._blocks.disk_used <= slots
        for key, names in live.items():
            # What is published is there: the slot holds the very block the flag promises.
            for block, slot in flags.slots.get(key, {}).items():
                if block < flags.count[key]:
                    assert content[slot] == names[block]
    # Whatever is left comes to its end: every request is answered in full, and then nothing is held.
    for order in orders + overdue:
        planner.fetched(order.number, [Fetched(True)] * len(order.blocks), 1)
    for _ in range(200):
        for lane in Lane:
            order, revoked = planner.next_order(lane)
            for request in revoked:
                del live[request.key]
            if order is not None:
                planner.fetched(order.number, [Fetched(True)] * len(order.blocks), 1)
        if not live:
            break
        ended = [key for key in live if planner.requests[key].final]
        assert ended or planner.has_work, "someone waits and nothing will ever come"
        for key in ended[:1]:
            flags.claimed.discard(key)
            planner.finish(key)
            del live[key]
    assert not live
    assert planner._blocks.disk_used == 0
    assert not planner._blocks.sole
    gauges = planner.gauges()
    assert gauges["slots_free"] + gauges["slots_idle"] == slots
    assert gauges["blocks_pinned"] == gauges["requests"] == gauges["orders"] == 0
