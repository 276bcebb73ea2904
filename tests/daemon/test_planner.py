"""The planner: sharing, urgency, room, failure and cancel, without clocks or threads."""

from __future__ import annotations

from kvprefetch.daemon.planning.planner import Key, Lane, Planner
from tests.daemon.planning import FlagsModel, audit, hint, run


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
    order = planner.next_order()
    assert order is not None
    two = hint(planner, 2, "a", "b", "c")
    planner.looked_up(two, 3)
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


def test_a_request_at_the_head_takes_the_room_of_the_least_urgent_unclaimed_one() -> None:
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
    order = planner.next_order()
    assert order is not None
    assert flags.taken_back == [waiting]
    assert planner.requests[waiting].taken_back == 1


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
    again = hint(planner, 4, "a", "b", "c")
    planner.looked_up(again, 3)
    assert run(planner) == [["a", "b", "c"]]
    planner.finish(kept)
    planner.finish(again)
    gauges = planner.gauges()
    assert gauges["slots_free"] + gauges["slots_idle"] == 4
    assert gauges["blocks_pinned"] == 0


def test_a_memory_hit_never_waits_behind_disk_loads() -> None:
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=2)
    slow = hint(planner, 1, *"abcdefgh")
    planner.looked_up(slow, 8, b"\1" * 8)
    planner.ask(slow)
    orders = []
    while (order := planner.next_order(Lane.DISK)) is not None:
        orders.append(order)
    assert sum(len(order.slots) for order in orders) == 6, "blocks from disk leave room for others"
    fast = hint(planner, 2, "x", "y")
    planner.looked_up(fast, 2)
    assert run(planner, lanes=[Lane.MEMORY]) == [["x", "y"]]
    assert fast in flags.final
    for order in orders:
        planner.fetched(order.number, [True] * len(order.slots), 1)
    run(planner)
    assert flags.count[slow] == 6
    assert slow in flags.final, "served in part: all the room that disk blocks may have"


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
    first = planner.next_order()
    second = planner.next_order()
    assert first is not None
    assert second is not None
    planner.fetched(first.number, [True] * 2, 1)
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
    planner.fetched(second.number, [True] * 2, 3)
    planner.finish(later)
    gauges = planner.gauges()
    assert gauges["slots_stuck"] == gauges["blocks_pinned"] == 0
    assert gauges["slots_free"] + gauges["slots_idle"] == 4


def test_a_second_look_up_can_only_shorten() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=1)
    key = hint(planner, 1, "a", "b", "c")
    planner.looked_up(key, 3)
    order = planner.next_order()
    assert order is not None
    planner.looked_up(key, 0)
    planner.fetched(order.number, [True], 1)
    assert flags.count[key] == 1
    assert key in flags.final


def test_requests_that_wait_for_each_others_slots_are_served_in_part_one_after_the_other() -> None:
    """Every block is held by two, so taking one request's gives no room, and none has all that it wants. Who was served
    and taken back before holds nothing any more that they could wait for.
    """
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=2)
    before = hint(planner, 20, "v", priority=9)
    planner.looked_up(before, 1)
    run(planner)
    keys = [hint(planner, number, *names) for number, names in enumerate(["abc", "abd", "xyz", "xyw"])]
    for key in keys:
        planner.looked_up(key, 2)
    run(planner)
    keys = [hint(planner, 10 + number, *names) for number, names in enumerate(["abc", "abd", "xyz", "xyw"])]
    for number in range(4):
        planner.finish((number, 1))
    for key in keys:
        planner.looked_up(key, 3)
    assert flags.taken_back == [before]
    assert run(planner) == []
    assert flags.final & set(keys) == {keys[0]}, "the others wait for its slots"
    planner.finish(keys[0])
    assert run(planner) == []
    assert flags.final & set(keys) == set(keys[:2])
    planner.finish(keys[1])
    assert run(planner) == [["z"], ["w"]], "now there is room"
    assert set(keys) <= flags.final


def test_a_block_that_a_prompt_has_twice_is_fetched_once_and_published_twice() -> None:
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=8)
    key = hint(planner, 1, "a", "a", "b", "a")
    planner.looked_up(key, 4)
    again = hint(planner, 2, "b", "a", "a")
    planner.looked_up(again, 3)
    run(planner)
    assert flags.count == {key: 4, again: 3}
    assert len(set(flags.slots[key].values())) == 2
    for each in (key, again):
        planner.finish(each)
    audit(planner)
    assert planner.gauges()["slots_idle"] == 2


def test_what_one_request_alone_holds_is_one_run_until_another_prompt_parts_from_it() -> None:
    flags = FlagsModel()
    planner = Planner(16, flags, chunk_blocks=4)
    one = hint(planner, 1, *"abcdefgh")
    planner.looked_up(one, 8)
    run(planner)

    def runs(key: Key) -> list[int]:
        return [len(run) for run in planner._blocks.runs(planner.requests[key].held)]

    assert runs(one) == [8]
    same = hint(planner, 2, *"abcdefgh", local=2)
    assert runs(same) == [6]
    parts = hint(planner, 3, *"abcdefxy")
    assert runs(parts) == [2, 4]
    assert runs(one) == [2, 4, 2]
    audit(planner)
    for key in (parts, same, one):
        planner.finish(key)
    again = hint(planner, 4, *"abcdefgh")
    assert runs(again) == [8]
    audit(planner)


def test_the_last_blocks_of_what_was_used_longest_ago_make_room_first() -> None:
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=2)
    key = hint(planner, 1, "a", "b", "c", "d")
    planner.looked_up(key, 4)
    run(planner)
    planner.finish(key)
    other = hint(planner, 2, "x")
    planner.looked_up(other, 1)
    run(planner)
    assert planner.requests[hint(planner, 3, "a", "b", "c", "d")].issued == 3


def test_digests_of_different_lengths_can_be_staged_ahead() -> None:
    planner = Planner(16, FlagsModel(), chunk_blocks=16)
    wanted = [b"short", b"another.", b"a-long-one", b"one-longer"]
    lengths = []
    while wanted:
        order = planner.ahead(wanted, Lane.MEMORY, "list")
        assert order is not None
        lengths.append([len(digest) for digest in order.digests])
        planner.fetched(order.number, [True] * len(order.slots), 1)
        del wanted[: len(order.slots)]
    assert lengths == [[5], [8], [10, 10]]
    planner.reset()
    audit(planner)


def wasted_after(planner: Planner, number: int, *names: str) -> list[int]:
    """Fetch these for a request that takes as much room; the planner's count of what was given up for it."""
    planner.looked_up(hint(planner, number, *names), len(names))
    run(planner)
    return planner.wasted


def test_blocks_that_a_load_left_are_waste_once_their_room_is_reused() -> None:
    planner = Planner(4, FlagsModel(), chunk_blocks=4)
    key = hint(planner, 1, "a", "b", "c", "d", "e", local=1)
    planner.looked_up(key, 5)
    run(planner)
    planner.finish(key, loaded=range(2, 4))
    assert planner.wasted == [0, 0], "they are still there for others"
    assert wasted_after(planner, 2, "e", "x") == [0, 0], "of the others the last was loaded"
    assert wasted_after(planner, 3, "y", "z") == [1, 0]
    planner.finish((2, 1), loaded=range(1))
    planner.end()
    assert planner.wasted == [4, 0], "x, y and z as well"
    planner.end()
    assert planner.wasted == [4, 0]


def test_what_an_aborted_request_left_and_another_loaded_is_no_waste() -> None:
    planner = Planner(2, FlagsModel(), chunk_blocks=4)
    for number, loaded in ((1, range(0)), (2, range(2)), (3, range(0))):
        key = hint(planner, number, "a", "b")
        planner.looked_up(key, 2)
        run(planner)
        planner.finish(key, loaded)
    assert wasted_after(planner, 4, "c", "d") == [0, 0]


def test_what_was_staged_ahead_or_came_too_late_or_is_void_is_waste_of_its_tier() -> None:
    planner = Planner(8, FlagsModel(), chunk_blocks=16)
    ahead = planner.ahead([b"a.......", b"b......."], Lane.DISK, "list")
    assert ahead is not None
    planner.fetched(ahead.number, [True, False], 1)
    assert planner.wasted == [0, 0]
    late = hint(planner, 1, "c", "d", "e")
    planner.looked_up(late, 3)
    order = planner.next_order()
    assert order is not None
    planner.overdue(order.number, 1)
    assert planner.wasted == [0, 0]
    planner.fetched(order.number, [True, True, False], 2)
    assert planner.wasted == [2, 0]
    planner.reset()
    assert planner.wasted == [2, 1]


def test_the_times_of_the_first_and_the_last_byte_are_those_of_fetches_for_this_request() -> None:
    planner = Planner(8, FlagsModel(), chunk_blocks=1)
    key = hint(planner, 1, "a", "b", "c")
    planner.looked_up(key, 3)
    orders = [planner.next_order() for _ in range(3)]
    for at, now_ns in ((0, 10), (2, 20), (1, 30)):
        order = orders[at]
        assert order is not None
        planner.fetched(order.number, [True], now_ns)
    assert (planner.requests[key].first_byte_ns, planner.requests[key].last_byte_ns) == (10, 30)
    again = hint(planner, 2, "a", "b")
    planner.looked_up(again, 2)
    assert (planner.requests[again].first_byte_ns, planner.requests[again].last_byte_ns) == (0, 0), "it was staged"
    assert planner.gauges()["blocks_pinned"] == 3


def test_an_order_has_no_block_twice_and_none_that_is_here() -> None:
    planner = Planner(8, FlagsModel(), chunk_blocks=8)
    first = hint(planner, 1, "a", "b", "c", "b", "d")
    planner.looked_up(first, 5)
    assert run(planner) == [["a", "b", "c", "d"]]
    planner.looked_up(hint(planner, 2, "x", "y", "c", "z"), 4)
    assert run(planner) == [["x", "y", "z"]]
    audit(planner)


def test_what_an_engine_took_meanwhile_gets_nothing_more() -> None:
    """It claimed the flag: its prefix is what it is, and the rest would be pinned for nobody."""
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=1)
    key = hint(planner, 1, "a", "b", "c")
    planner.looked_up(key, 3)
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
    audit(planner)


def test_a_victim_that_had_nothing_to_give_is_looked_at_again() -> None:
    """Its blocks were still on their way, or it was claimed and let go; neither spares it for ever."""
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=2)
    victim = hint(planner, 1, "a", "b", priority=5)
    planner.looked_up(victim, 2)
    run(planner)
    flags.claimed.add(victim)
    urgent = hint(planner, 2, "x")
    planner.looked_up(urgent, 1)
    assert planner.next_order() is None
    flags.claimed.discard(victim)
    planner.tick()
    order = planner.next_order()
    assert order is not None
    assert flags.taken_back == [victim]
    audit(planner)


def test_room_of_a_lane_is_taken_from_one_who_holds_some_of_it() -> None:
    """That of a request whose blocks lie in memory would bring a fetch from disk none."""
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=4)
    for number, names, disk in ((1, "abc", b"\1\1\1"), (2, "d", b"")):
        key = hint(planner, number, *names, priority=number)
        planner.looked_up(key, len(names), disk)
    run(planner)
    urgent = hint(planner, 3, "x")
    planner.looked_up(urgent, 1, b"\1")
    order = planner.next_order(Lane.DISK)
    assert order is not None
    assert flags.taken_back == [(1, 1)], "who holds the three that blocks from disk may have"


def test_what_was_taken_back_is_fetched_again_when_there_is_room() -> None:
    """In its own place of the queue, and only what is not there any more."""
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=4)
    far, later = hint(planner, 1, "a", "b", "c", priority=1), hint(planner, 2, "x", "y", priority=2)
    planner.looked_up(far, 3)
    planner.looked_up(later, 2)
    assert run(planner) == [["a", "b", "c"], ["x"]]
    near = hint(planner, 3, "n", "o", "p")
    planner.looked_up(near, 3)
    assert run(planner) == [["n", "o", "p"]]
    assert flags.taken_back == [later, far]
    audit(planner)
    assert flags.count == {near: 3, far: 1}, "its first block was needed by nobody"
    assert not planner.requests[far].final
    planner.finish(near)
    assert run(planner) == [["b", "c"], ["x"]], "the later one behind it, as far as there is room"
    assert far in flags.final
    assert flags.count[far] == 3
    planner.finish(far)
    assert run(planner) == [["y"]]
    assert (planner.requests[later].taken_back, flags.count[later]) == (1, 2)
    audit(planner)


def test_two_requests_do_not_take_from_each_other_in_turn() -> None:
    """Each is asked for once, and takes then what the other took before; then it is over."""
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=4)
    keys = [hint(planner, 1, "a", "b", priority=1), hint(planner, 2, "x", "y", priority=2)]
    for key in keys:
        planner.looked_up(key, 2)
    assert run(planner) == [["a", "b"]]
    planner.ask(keys[1])
    assert run(planner) == [["x", "y"]]
    planner.ask(keys[0])
    assert run(planner) == [["a", "b"]]
    for _ in range(3):
        for key in keys:
            planner.ask(key)
        planner.tick()
        assert run(planner) == []
    assert flags.taken_back == keys
    assert flags.count == {keys[0]: 2}


def test_what_was_found_staged_is_fetched_again_from_where_it_lies() -> None:
    """Nobody looked these blocks up for this request; their lane is known from their first fetch."""
    flags = FlagsModel()
    planner = Planner(8, flags, chunk_blocks=4)
    first = hint(planner, 1, "a", "b", "c")
    planner.looked_up(first, 3, b"\0\1\1")
    run(planner)
    planner.finish(first)
    again = hint(planner, 2, "a", "b", "c", priority=5)
    planner.looked_up(again, 3)
    near = hint(planner, 3, *"stuvwxyz")
    planner.looked_up(near, 8)
    assert run(planner) == [["s", "t", "u", "v"], ["w", "x", "y", "z"]]
    assert flags.taken_back == [again]
    planner.finish(near)
    assert run(planner, lanes=[Lane.DISK]) == []
    assert run(planner) == [["a"], ["b", "c"]]
    assert (flags.count[again], planner.requests[again].disk_blocks) == (3, 2)


def test_what_is_taken_back_before_its_look_up_was_answered_waits_for_that() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=4)
    first = hint(planner, 1, "a", "b")
    planner.looked_up(first, 2)
    run(planner)
    planner.finish(first)
    early = hint(planner, 2, "a", "b", "c", priority=5)
    near = hint(planner, 3, "x", "y")
    planner.looked_up(near, 2)
    assert run(planner) == [["x", "y"]]
    assert flags.taken_back == [early]
    planner.finish(near)
    assert run(planner) == []
    planner.looked_up(early, 3)
    assert run(planner) == [["a", "b"]]
    assert flags.count[early] == 2
    assert early in flags.final, "as much of it as there are slots"


def test_a_claim_that_came_first_keeps_its_blocks_and_its_end_is_final() -> None:
    """Claimed while more was on its way, given up unused, taken back: then all of it is fetched."""
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=2)
    key = hint(planner, 1, *"abcd", priority=5)
    planner.looked_up(key, 4)
    order = planner.next_order()
    assert order is not None
    planner.fetched(order.number, [True, True], 1)
    flags.claimed.add(key)
    run(planner)
    assert flags.count[key] == 2
    near = hint(planner, 2, "x")
    planner.looked_up(near, 1)
    assert run(planner) == []
    flags.claimed.discard(key)
    planner.tick()
    assert run(planner) == [["x"]]
    assert flags.taken_back == [key]
    planner.finish(near)
    run(planner)
    assert flags.count[key] == 4
    assert key in flags.final
