"""A fetch that the engine stops: nothing more is ordered for its request, and what is under way is still published."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.planning.support import announced, hint, hit, ordered, planned, returned, run


def test_what_is_under_way_is_published_and_the_rest_is_not_ordered() -> None:
    planner, flags = planned(8, 2)
    key = hit(planner, 1, *"abcdef")
    first, second = ordered(planner), ordered(planner)
    planner.stop(key)
    assert planner.next_order() is None
    assert planner.gauges()["leases"] == 0
    returned(planner, second)
    assert key not in flags.final
    returned(planner, first)
    assert (flags.count[key], key in flags.final) == (4, True)
    planner.stop(key)
    planner.stop((9, 9))  # one that has ended


def test_a_stop_before_the_look_up_answers_holds_afterwards() -> None:
    """Of what the store has, it takes what is there without an order."""
    planner, flags = planned(8, 2)
    hit(planner, 1, *"ab")
    run(planner)
    key = hint(planner, 2, *"abcd")
    planner.stop(key)
    assert key not in flags.final
    planner.looked_up(key, 4)
    assert planner.next_order() is None
    assert (flags.count[key], key in flags.final) == (2, True)


def test_blocks_that_another_request_wants_come_for_both() -> None:
    """The one that goes on gets all; the stopped one what was under way then, whoever ordered it."""
    planner, flags = planned(8, 2)
    one, other = hit(planner, 1, *"abcd"), hit(planner, 2, *"abcd")
    order = ordered(planner)
    planner.stop(one)
    returned(planner, order)
    assert (flags.count[one], one in flags.final) == (2, True)
    assert run(planner) == [["c", "d"]]
    assert (flags.count[other], other in flags.final) == (4, True)
    both = hit(planner, 3, *"wx"), hit(planner, 4, *"wxyz")
    order = ordered(planner)
    planner.stop(both[1])
    assert planner.next_order() is None
    returned(planner, order)
    assert [flags.count[key] for key in both] == [2, 2]


def test_an_order_that_is_dropped_ends_the_prefix_before_it_and_its_slots_come_back_with_its_call() -> None:
    planner, flags = planned(8, 2)
    key = hit(planner, 1, *"abcdef")
    first, second, third = (ordered(planner) for _ in range(3))
    assert planner.stop(key) == [third.number, second.number, first.number], "the last one first"
    planner.drop(third.number)
    planner.drop(second.number)
    assert key not in flags.final
    returned(planner, first)
    assert (flags.count[key], key in flags.final) == (2, True)
    hit(planner, 2, *"cd")
    again = ordered(planner)
    assert set(again.slots).isdisjoint([*second.slots, *third.slots]), "their call may write to them"
    assert planner.gauges()["slots_free"] == 0
    returned(planner, second, ok=False)
    returned(planner, third, ok=False)
    planner.check()
    assert planner.gauges()["slots_free"] == 4
    assert planner.stop(key) == [], "it was stopped before"


def test_with_all_of_its_orders_dropped_it_is_final_at_once() -> None:
    planner, flags = planned(8, 2)
    key = hit(planner, 1, *"abcd", local=1)
    orders = ordered(planner), ordered(planner)
    for number in planner.stop(key):
        planner.drop(number)
    assert (flags.count[key], key in flags.final) == (1, True)
    planner.finish(key)
    for order in orders:
        returned(planner, order, ok=False)
    planner.check()
    assert planner.gauges()["slots_free"] == 8


def test_an_order_that_brings_blocks_for_others_is_not_to_be_dropped_nor_are_those_before_it() -> None:
    planner, _ = planned(20, 4)
    one, other = hit(planner, 1, *"abcde"), hit(planner, 2, *"wxyz")
    assert [len(ordered(planner).slots) for _ in range(3)] == [4, 4, 1]
    assert planner.stop(one) == []
    assert len(planner.stop(other)) == 1, "its last one"
    planner, _ = planned(20, 2)
    hit(planner, 1, *"abcd")
    branch = hit(planner, 2, *"abxy")
    orders = [ordered(planner) for _ in range(3)]
    assert planner.stop(branch) == [orders[2].number]
    planner, _ = planned(20, 4)
    announced(planner, 2, "a")
    assert planner.next_order(ahead=True) is not None
    assert planner.stop(hit(planner, 1, "a")) == []


@pytest.mark.parametrize("lane", list(Lane))
def test_a_lane_that_its_head_held_up_goes_on_with_the_next_one(lane: Lane) -> None:
    """Its head found no room; the next one finds its blocks staged."""
    planner, flags = planned(4, 4)
    held = hit(planner, 1, *"abcd")
    run(planner)
    flags.claimed.add(held)
    head = hit(planner, 2, *"wx", disk=bytes([lane]) * 2)
    planner.ask(head)
    behind = hit(planner, 3, *"abx", disk=bytes([0, 0, lane]))
    assert planner.next_order(lane) is None
    planner.stop(head)
    assert head in flags.final
    assert planner.ready[lane] or behind in flags.final
