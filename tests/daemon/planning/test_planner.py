"""The planner: sharing, urgency, publication, failure and cancel, without clocks or threads."""

from __future__ import annotations

from kvprefetch.daemon.planning.planner import Lane, Planner
from tests.daemon.planning.support import FlagsModel, hint, hit, run


def test_a_hit_is_fetched_in_prefix_order_and_published_in_full() -> None:
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=2)
    key = hit(planner, 1, "a", "b", "c")
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
    one = hit(planner, 1, "a", "b")
    order = planner.next_order()
    assert order is not None
    two = hit(planner, 2, "a", "b", "c")
    assert run(planner) == [["c"]]
    assert flags.count.get(two, 0) == 0
    planner.fetched(order.number, [True] * 2, 1)
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
    key = hit(planner, 1, "a", "b", "c", "d")
    run(planner, fail=frozenset({"c"}))
    assert flags.count[key] == 2
    assert key in flags.final
    planner.finish(key)
    gauges = planner.gauges()
    assert gauges["blocks_pinned"] == 0
    assert gauges["slots_free"] + gauges["slots_idle"] == 8


def test_a_cancelled_load_gives_its_slot_back_when_the_call_returns() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=8)
    key = hit(planner, 1, "a", "b")
    order = planner.next_order()
    assert order is not None
    planner.finish(key)
    assert planner.gauges()["slots_free"] == 0
    planner.fetched(order.number, [True, False], 1)
    assert planner.gauges()["slots_free"] == 1
    assert planner.gauges()["slots_idle"] == 1


def test_a_reset_forgets_every_block_and_ends_what_is_unclaimed() -> None:
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=8)
    kept, waiting, loading = hint(planner, 1, "a"), hint(planner, 2, "b"), hint(planner, 3, "c")
    for key in (kept, waiting):
        planner.looked_up(key, 1)
    run(planner)
    planner.looked_up(loading, 1)
    order = planner.next_order()
    assert order is not None
    flags.claimed.add(kept)
    assert {request.key for request in planner.reset()} == {waiting, loading}
    planner.fetched(order.number, [True], 1)
    again = hit(planner, 4, "a", "b", "c")
    assert run(planner) == [["a", "b", "c"]]
    planner.finish(kept)
    planner.finish(again)
    gauges = planner.gauges()
    assert gauges["slots_free"] + gauges["slots_idle"] == 4
    assert gauges["blocks_pinned"] == 0


def test_after_a_reset_nothing_is_fetched_under_the_hints_of_before() -> None:
    """The store may hold old weights' values until their removal is over: staged now, later hints would find them."""
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=1)
    claimed, undecided = hit(planner, 1, "a", "b", "c"), hint(planner, 2, "d", priority=1)
    order = planner.next_order()
    assert order is not None
    planner.fetched(order.number, [True], 1)
    flags.claimed |= {claimed, undecided}  # the first one while more of it is to come
    assert planner.reset() == []
    planner.looked_up(undecided, 1)
    planner.looked_up(claimed, 3)
    planner.ask(claimed)
    assert run(planner) == []
    assert planner.gauges()["leases"] == 0
    flags.claimed.clear()
    near = hit(planner, 3, *"wxyz", priority=-1)
    planner.ask(near)
    assert run(planner) == [["w"], ["x"], ["y"], ["z"]]
    assert flags.taken_back == [claimed]
    assert (flags.count[claimed], claimed in flags.final) == (0, True), "it waits for nothing"
    planner.finish(near)
    assert run(planner) == []
    planner.check()


def test_a_request_in_both_tiers_is_ordered_in_prefix_order_lane_by_lane() -> None:
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=8)
    key = hint(planner, 1, "a", "b", "c", "d", "e", local=1)
    planner.looked_up(key, 5, b"\0\1\1\0")
    assert planner.next_order(Lane.DISK) is None
    assert run(planner, lanes=[Lane.MEMORY]) == [["b"]]
    assert run(planner, lanes=[Lane.DISK]) == [["c", "d"]]
    assert run(planner, lanes=[Lane.MEMORY]) == [["e"]]
    assert flags.count[key] == 5


def test_what_is_staged_is_published_when_the_look_up_answers_and_needs_no_look_up_when_it_is_all() -> None:
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=8)
    hit(planner, 1, "a", "b")
    run(planner)
    two = hint(planner, 2, "a", "b", "c")
    assert planner.requests[two].issued == 2, "only c has to be looked up"
    planner.looked_up(two, 3, b"\0\0\1")
    assert flags.count[two] == 2
    three = hint(planner, 3, "a", "b")
    assert planner.requests[three].issued == 2
    planner.looked_up(three, 2)
    assert three in flags.final


def test_what_was_staged_during_the_look_up_is_published_when_it_answers() -> None:
    """At once, though there is no room for anything to fetch."""
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=8)
    one, two = hint(planner, 1, "a", "b"), hint(planner, 2, "a", "b", "c")
    planner.looked_up(one, 2)
    run(planner)
    planner.looked_up(two, 3)
    assert flags.count[two] == 2


def test_an_overdue_order_ends_its_requests_at_their_prefix_and_gives_its_slots_back_when_it_returns() -> None:
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=2)
    hung, other = hint(planner, 1, "a", "b", "c", "d"), hint(planner, 2, "a", "b", "c", "x")
    for key in (hung, other):
        planner.looked_up(key, 4)
    first = planner.next_order()
    second = planner.next_order()
    assert first is not None
    assert second is not None
    planner.fetched(first.number, [True] * 2, 1)
    planner.overdue(second.number, 2)
    assert run(planner) == []
    assert flags.count == {hung: 2, other: 2}
    assert flags.final == {hung, other}
    later = hit(planner, 3, "c", "y", "z")
    assert run(planner) == [], "both prefixes are wanted and two slots are stuck"
    assert planner.gauges()["slots_stuck"] == 2
    planner.finish(hung)
    planner.finish(other)
    assert run(planner) == [["c", "y"]], "fetched anew, to other slots, as far as there is room"
    assert later in flags.final
    planner.fetched(second.number, [True] * 2, 3)
    planner.finish(later)
    gauges = planner.gauges()
    assert gauges["slots_stuck"] == gauges["blocks_pinned"] == 0
    assert gauges["slots_free"] + gauges["slots_idle"] == 4


def test_a_slot_that_is_lost_never_comes_back_and_the_others_do() -> None:
    """Of a call that was past its deadline, and of one that failed in time."""
    lost: set[int] = set()
    planner = Planner(4, FlagsModel(), chunk_blocks=2, lost=lost)
    keys = [hit(planner, 1, "a", "b"), hit(planner, 2, "c", "d")]
    orders = [order for _ in keys if (order := planner.next_order()) is not None]
    lost.update({orders[0].slots[0], orders[1].slots[1]})
    planner.overdue(orders[0].number, 1)
    for order in orders:
        planner.fetched(order.number, [False, False], 2)
    for key in keys:
        planner.finish(key)
    assert (planner.gauges()["slots_lost"], planner.gauges()["slots_free"]) == (2, 2)
    hit(planner, 3, "e", "f", "g")
    again = planner.next_order()
    assert again is not None
    assert sorted(again.slots) == sorted(set(range(4)) - lost)
    assert planner.next_order() is None


def test_a_second_look_up_can_only_shorten() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=1)
    key = hit(planner, 1, "a", "b", "c")
    order = planner.next_order()
    assert order is not None
    planner.looked_up(key, 0)
    planner.fetched(order.number, [True], 1)
    assert flags.count[key] == 1
    assert key in flags.final


def test_the_times_of_the_first_and_the_last_byte_are_those_of_fetches_for_this_request() -> None:
    planner = Planner(8, FlagsModel(), chunk_blocks=1)
    key = hit(planner, 1, "a", "b", "c")
    orders = [planner.next_order() for _ in range(3)]
    for at, now_ns in ((0, 10), (2, 20), (1, 30)):
        order = orders[at]
        assert order is not None
        planner.fetched(order.number, [True], now_ns)
    assert (planner.requests[key].first_byte_ns, planner.requests[key].last_byte_ns) == (10, 30)
    again = hit(planner, 2, "a", "b")
    assert (planner.requests[again].first_byte_ns, planner.requests[again].last_byte_ns) == (0, 0), "it was staged"
    assert planner.gauges()["blocks_pinned"] == 3
    failed = hit(planner, 3, "x")
    order = planner.next_order()
    assert order is not None
    planner.fetched(order.number, [False], 40)
    assert (planner.requests[failed].first_byte_ns, planner.requests[failed].last_byte_ns) == (0, 0)


def test_what_an_engine_took_meanwhile_gets_nothing_more() -> None:
    """It claimed the flag: its prefix is what it is, and the rest would be pinned for nobody."""
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=1)
    key = hit(planner, 1, "a", "b", "c")
    order = planner.next_order()
    assert order is not None
    assert planner.gauges()["leases"] == 2
    flags.claimed.add(key)
    planner.fetched(order.number, [True], 1)
    planner.looked_up(key, 3)
    assert planner.next_order() is None
    assert planner.gauges()["leases"] == 0
    planner.looked_up((9, 9), 3)  # one that has ended
    planner.finish(key)
    planner.check()
