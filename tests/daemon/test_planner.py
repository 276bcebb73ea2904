"""The planner: sharing, urgency, room, failure and cancel, without clocks or threads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.daemon.planner import Fetched, Key, Order, Planner


class FlagsModel:
    """Plays the engine's side of the flags: what was published, and which flags the engine holds."""

    def __init__(self) -> None:
        self.count: dict[Key, int] = {}
        self.final: set[Key] = set()
        self.slots: dict[Key, dict[int, int]] = {}
        self.expired: set[Key] = set()
        self.claimed: set[Key] = set()

    def publish(self, key: Key, start: int, slots: Sequence[int], count: int, final: bool) -> bool:
        if key in self.claimed:
            return False
        assert key not in self.expired
        assert key not in self.final
        assert count >= self.count.get(key, 0)
        table = self.slots.setdefault(key, {})
        table.update(dict(enumerate(slots, start)))
        self.count[key] = count
        if final:
            self.final.add(key)
        return True

    def expire(self, key: Key) -> bool:
        if key in self.claimed:
            return False
        self.expired.add(key)
        return True


def digests(*names: str) -> bytes:
    return b"".join(name.encode().ljust(8, b".") for name in names)


def hint(planner: Planner, number: int, *names: str, local: int = 0, priority: int = 0) -> Key:
    key = (number, 1)
    planner.hint(key, digests(*names), 8, len(names), local, priority)
    return key


def run(planner: Planner, *, fail: frozenset[str] = frozenset()) -> list[list[str]]:
    """Carry out every order there is; the digests of each, in order."""
    done: list[list[str]] = []
    while True:
        order, _ = planner.next_order()
        if order is None:
            return done
        names = [block.digest.decode().rstrip(".") for block in order.blocks]
        planner.fetched(order.number, [Fetched(name not in fail) for name in names], 1)
        done.append(names)


def test_a_hit_is_fetched_in_prefix_order_and_published_in_full() -> None:
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=2)
    key = hint(planner, 1, "a", "b", "c")
    planner.looked_up(key, 3)
    assert run(planner) == [["a", "b"], ["c"]]
    assert flags.count[key] == 3
    assert key in flags.final
    assert len(set(flags.slots[key].values())) == 3


def test_a_miss_is_published_at_once_without_an_order() -> None:
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=4)
    key = hint(planner, 1, "a", "b", local=1)
    planner.looked_up(key, 1)
    assert run(planner) == []
    assert flags.count[key] == 1
    assert key in flags.final


def test_a_shared_block_is_fetched_once_also_while_it_is_loading() -> None:
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=8)
    one = hint(planner, 1, "a", "b")
    planner.looked_up(one, 2)
    order, _ = planner.next_order()
    assert order is not None
    two = hint(planner, 2, "a", "b", "c")
    planner.looked_up(two, 3)
    assert run(planner) == [["c"]]
    assert flags.count.get(two, 0) == 0
    planner.fetched(order.number, [Fetched(True)] * 2, 1)
    assert flags.count == {one: 2, two: 3}
    assert [flags.slots[one][i] for i in (0, 1)] == [flags.slots[two][i] for i in (0, 1)]


def test_the_asked_one_goes_before_priority_and_priority_before_arrival() -> None:
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=1)
    first = hint(planner, 1, "first", priority=5)
    urgent = hint(planner, 2, "urgent", priority=1)
    asked = hint(planner, 3, "asked", priority=9)
    for key in (first, urgent, asked):
        planner.looked_up(key, 1)
    planner.ask(asked)
    assert run(planner) == [["asked"], ["urgent"], ["first"]]


def test_the_first_failed_block_ends_the_usable_prefix_and_frees_what_lies_behind() -> None:
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=8)
    key = hint(planner, 1, "a", "b", "c", "d")
    planner.looked_up(key, 4)
    run(planner, fail=frozenset({"c"}))
    assert flags.count[key] == 2
    assert key in flags.final
    planner.finish(key)
    gauges = planner.gauges()
    assert gauges["blocks_pinned"] == 0
    assert gauges["slots_free"] + gauges["slots_idle"] == 8


def test_consumed_blocks_stay_until_their_room_is_needed() -> None:
    flags = FlagsModel()
    planner = Planner(3, flags, chunk_blocks=8)
    one = hint(planner, 1, "a", "b")
    planner.looked_up(one, 2)
    run(planner)
    planner.finish(one)
    again = hint(planner, 2, "a", "b")
    planner.looked_up(again, 2)
    assert run(planner) == []
    assert flags.count[again] == 2
    planner.finish(again)
    other = hint(planner, 3, "x", "y", "z")
    planner.looked_up(other, 3)
    assert run(planner) == [["x", "y", "z"]]


def test_a_request_at_the_head_revokes_the_least_urgent_unclaimed_one() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=8)
    claimed, waiting = hint(planner, 1, "a"), hint(planner, 2, "b")
    for key in (claimed, waiting):
        planner.looked_up(key, 1)
    run(planner)
    flags.claimed.add(claimed)
    head = hint(planner, 3, "c")
    planner.looked_up(head, 1)
    assert run(planner) == [], "an ordinary later arrival takes nobody's room"
    planner.ask(head)
    order, revoked = planner.next_order()
    assert order is not None
    assert [request.key for request in revoked] == [waiting]


def test_a_request_larger_than_the_staging_is_served_in_part() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=8)
    key = hint(planner, 1, "a", "b", "c", "d")
    planner.looked_up(key, 4)
    assert run(planner) == [["a", "b"]]
    assert flags.count[key] == 2
    assert key in flags.final


def test_a_cancelled_load_gives_its_slot_back_when_the_call_returns() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=8)
    key = hint(planner, 1, "a", "b")
    planner.looked_up(key, 2)
    order, _ = planner.next_order()
    assert order is not None
    planner.finish(key)
    assert planner.gauges()["slots_free"] == 0
    planner.fetched(order.number, [Fetched(True), Fetched(False)], 1)
    assert planner.gauges()["slots_free"] == 1
    assert planner.gauges()["slots_idle"] == 1


def test_a_reset_forgets_every_block_and_revokes_what_is_unclaimed() -> None:
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=8)
    kept, waiting, loading = hint(planner, 1, "a"), hint(planner, 2, "b"), hint(planner, 3, "c")
    for key in (kept, waiting):
        planner.looked_up(key, 1)
    run(planner)
    planner.looked_up(loading, 1)
    order, _ = planner.next_order()
    assert order is not None
    flags.claimed.add(kept)
    assert {request.key for request in planner.reset()} == {waiting, loading}
    planner.fetched(order.number, [Fetched(True)], 1)
    again = hint(planner, 4, "a", "b", "c")
    planner.looked_up(again, 3)
    assert run(planner) == [["a", "b", "c"]]
    planner.finish(kept)
    planner.finish(again)
    gauges = planner.gauges()
    assert gauges["slots_free"] + gauges["slots_idle"] == 4
    assert gauges["blocks_pinned"] == 0


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_history_keeps_slots_pins_and_published_counts_consistent(data: st.DataObject) -> None:
    flags = FlagsModel()
    slots = data.draw(st.integers(1, 6), label="slots")
    planner = Planner(slots, flags, chunk_blocks=data.draw(st.integers(1, 4), label="chunk"))
    live: dict[Key, list[str]] = {}
    content: dict[int, str] = {}
    orders: list[Order] = []
    number = 0
    for _ in range(data.draw(st.integers(1, 60), label="steps")):
        match data.draw(st.sampled_from(["hint", "ask", "order", "fetched", "finish", "claim", "reset"])):
            case "hint":
                number += 1
                names = [f"p{data.draw(st.integers(0, 2))}-{i}" for i in range(data.draw(st.integers(1, 5)))]
                local = data.draw(st.integers(0, len(names) - 1))
                key = hint(planner, number, *names, local=local, priority=data.draw(st.integers(0, 2)))
                live[key] = names
                planner.looked_up(key, data.draw(st.integers(local, len(names))))
            case "ask" if live:
                planner.ask(data.draw(st.sampled_from(sorted(live))))
            case "order":
                order, revoked = planner.next_order()
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
        for key, names in live.items():
            # What is published is there: the slot holds the very block the flag promises.
            for block, slot in flags.slots.get(key, {}).items():
                if block < flags.count[key]:
                    assert content[slot] == names[block]
    for order in orders:
        planner.fetched(order.number, [Fetched(True)] * len(order.blocks), 1)
    for key in list(live):
        planner.finish(key)
    gauges = planner.gauges()
    assert gauges["slots_free"] + gauges["slots_idle"] == slots
    assert gauges["blocks_pinned"] == gauges["requests"] == gauges["orders"] == 0


@pytest.mark.parametrize("waiting", [10_000])
def test_a_long_queue_costs_little_per_hint(waiting: int) -> None:
    import time

    planner = Planner(512, FlagsModel(), chunk_blocks=64)
    for number in range(waiting):
        planner.looked_up(hint(planner, number, f"q{number}"), 1)
    started = time.perf_counter()
    for number in range(waiting, waiting + 100):
        planner.looked_up(hint(planner, number, *[f"b{number}-{i}" for i in range(256)]), 256)
        planner.next_order()
    assert time.perf_counter() - started < 5.0, "seconds, with slack, for a hundred hints of 256 blocks"
