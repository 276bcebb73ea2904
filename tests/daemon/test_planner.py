"""The planner: sharing, urgency, room, failure and cancel, without clocks or threads."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.daemon.planner import Fetched, Key, Lane, Order, Planner


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


def run(
    planner: Planner, *, fail: frozenset[str] = frozenset(), lanes: Sequence[Lane] = tuple(Lane)
) -> list[list[str]]:
    """Carry out every order there is; the digests of each, in order."""
    done: list[list[str]] = []
    for lane in lanes:
        while (order := planner.next_order(lane)[0]) is not None:
            names = [block.digest.decode().rstrip(".") for block in order.blocks]
            planner.fetched(order.number, [Fetched(name not in fail) for name in names], 1)
            done.append(names)
    return done


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


def test_a_long_queue_makes_no_hint_dearer() -> None:
    """Work that grows with the queue would cost a hundred times as much at the far end; noise does not."""

    def cost(waiting: int) -> float:
        planner = Planner(64, FlagsModel(), chunk_blocks=16)
        for number in range(waiting):
            planner.looked_up(hint(planner, number, f"q{number}"), 1)
            run(planner)
        rounds = []
        for number in range(waiting, waiting + 200):
            started = time.perf_counter()
            key = hint(planner, number, f"a{number}", f"b{number}", priority=number % 3 - 1)
            planner.looked_up(key, 2)
            planner.ask(key)
            run(planner)
            planner.finish(key)
            rounds.append(time.perf_counter() - started)
        return sorted(rounds)[20]

    assert cost(10_000) < 15 * cost(100)


def test_a_waiting_request_takes_little_memory_beside_its_hashes() -> None:
    names = [f"shared-{i}" for i in range(256)]
    hashes = digests(*names)
    flags = FlagsModel()
    planner = Planner(256, flags, chunk_blocks=256)
    flags.publish = lambda *_: True  # type: ignore[method-assign]  # the model's own memory is not the planner's
    planner.hint((0, 1), hashes, 8, 256, 0, 0)
    planner.looked_up((0, 1), 256)
    run(planner)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(1, 1001):
        planner.hint((number, 1), hashes, 8, 256, 0, 0)
        planner.looked_up((number, 1), 256)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used / 1000 < 2048


def test_a_memory_hit_never_waits_behind_disk_loads() -> None:
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=2)
    slow = hint(planner, 1, *"abcdefgh")
    planner.looked_up(slow, 8, b"\1" * 8)
    planner.ask(slow)
    orders = []
    while (order := planner.next_order(Lane.DISK)[0]) is not None:
        orders.append(order)
    assert sum(len(order.blocks) for order in orders) == 6, "blocks from disk leave room for others"
    fast = hint(planner, 2, "x", "y")
    planner.looked_up(fast, 2)
    assert run(planner, lanes=[Lane.MEMORY]) == [["x", "y"]]
    assert fast in flags.final
    for order in orders:
        planner.fetched(order.number, [Fetched(True)] * len(order.blocks), 1)
    run(planner)
    assert flags.count[slow] == 6
    assert slow in flags.final, "served in part: all the room that disk blocks may have"


def test_a_request_in_both_tiers_is_ordered_in_prefix_order_lane_by_lane() -> None:
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=8)
    key = hint(planner, 1, "a", "b", "c", "d", "e", local=1)
    planner.looked_up(key, 5, b"\0\1\1\0")
    assert planner.next_order(Lane.DISK)[0] is None
    assert run(planner, lanes=[Lane.MEMORY]) == [["b"]]
    assert run(planner, lanes=[Lane.DISK]) == [["c", "d"]]
    assert run(planner, lanes=[Lane.MEMORY]) == [["e"]]
    assert flags.count[key] == 5


def test_what_is_staged_is_published_when_the_look_up_answers_and_needs_no_look_up_when_it_is_all() -> None:
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=8)
    one = hint(planner, 1, "a", "b")
    planner.looked_up(one, 2)
    run(planner)
    two = hint(planner, 2, "a", "b", "c")
    assert planner.requests[two].issued == 2, "only c has to be looked up"
    planner.looked_up(two, 3, b"\0\0\1")
    assert flags.count[two] == 2
    three = hint(planner, 3, "a", "b")
    assert planner.requests[three].issued == 2
    planner.looked_up(three, 2)
    assert three in flags.final


def test_an_overdue_order_ends_its_requests_at_their_prefix_and_gives_its_slots_back_when_it_returns() -> None:
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=2)
    hung, other = hint(planner, 1, "a", "b", "c", "d"), hint(planner, 2, "a", "b", "c", "x")
    for key in (hung, other):
        planner.looked_up(key, 4)
    first, _ = planner.next_order()
    second, _ = planner.next_order()
    assert first is not None
    assert second is not None
    planner.fetched(first.number, [Fetched(True)] * 2, 1)
    planner.overdue(second.number, 2)
    assert run(planner) == []
    assert flags.count == {hung: 2, other: 2}
    assert flags.final == {hung, other}
    later = hint(planner, 3, "c", "y", "z")
    planner.looked_up(later, 3)
    assert run(planner) == [], "both prefixes are wanted and two slots are stuck"
    assert planner.gauges()["slots_stuck"] == 2
    planner.finish(hung)
    planner.finish(other)
    assert run(planner) == [["c", "y"]], "fetched anew, to other slots, as far as there is room"
    assert later in flags.final
    planner.fetched(second.number, [Fetched(True)] * 2, 3)
    planner.finish(later)
    gauges = planner.gauges()
    assert gauges["slots_stuck"] == gauges["blocks_pinned"] == 0
    assert gauges["slots_free"] + gauges["slots_idle"] == 4


def test_a_second_look_up_can_only_shorten() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=1)
    key = hint(planner, 1, "a", "b", "c")
    planner.looked_up(key, 3)
    order, _ = planner.next_order()
    assert order is not None
    planner.looked_up(key, 0)
    planner.fetched(order.number, [Fetched(True)], 1)
    assert flags.count[key] == 1
    assert key in flags.final
