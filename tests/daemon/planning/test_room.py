"""Who gets the staging slots when there are too few: urgency, lanes, and what is taken from whom."""

from __future__ import annotations

from kvprefetch.daemon.planning.planner import Lane, Planner
from tests.daemon.planning.support import FlagsModel, hint, hit, run


def test_consumed_blocks_stay_until_their_room_is_needed() -> None:
    flags = FlagsModel()
    planner = Planner(3, flags, chunk_blocks=8)
    one = hit(planner, 1, "a", "b")
    run(planner)
    planner.finish(one)
    again = hit(planner, 2, "a", "b")
    assert run(planner) == []
    assert flags.count[again] == 2
    planner.finish(again)
    hit(planner, 3, "x", "y", "z")
    assert run(planner) == [["x", "y", "z"]]


def test_a_request_at_the_head_takes_the_room_of_the_least_urgent_unclaimed_one() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=8)
    claimed, waiting = hint(planner, 1, "a"), hint(planner, 2, "b")
    for key in (claimed, waiting):
        planner.looked_up(key, 1)
    run(planner)
    flags.claimed.add(claimed)
    head = hit(planner, 3, "c")
    assert run(planner) == [], "an ordinary later arrival takes nobody's room"
    planner.ask(head)
    order = planner.next_order()
    assert order is not None
    assert flags.taken_back == [waiting]
    assert planner.requests[waiting].taken_back == 1


def test_a_request_larger_than_the_staging_is_served_in_part() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=8)
    key = hit(planner, 1, "a", "b", "c", "d")
    assert run(planner) == [["a", "b"]]
    assert flags.count[key] == 2
    assert key in flags.final


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
    fast = hit(planner, 2, "x", "y")
    assert run(planner, lanes=[Lane.MEMORY]) == [["x", "y"]]
    assert fast in flags.final
    for order in orders:
        planner.fetched(order.number, [True] * len(order.slots), 1)
    run(planner)
    assert flags.count[slow] == 6
    assert slow in flags.final, "served in part: all the room that disk blocks may have"


def test_requests_that_wait_for_each_others_slots_are_served_in_part_one_after_the_other() -> None:
    """Every block is held by two, so taking one request's gives no room, and none has all that it wants. Who was served
    and taken back before holds nothing any more that they could wait for.
    """
    flags = FlagsModel()
    planner = Planner(4, flags, chunk_blocks=2)
    before = hit(planner, 20, "v", priority=9)
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


def test_a_victim_that_had_nothing_to_give_is_looked_at_again() -> None:
    """Its blocks were still on their way, or it was claimed and let go; neither spares it for ever."""
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=2)
    victim = hit(planner, 1, "a", "b", priority=5)
    run(planner)
    flags.claimed.add(victim)
    hit(planner, 2, "x")
    assert planner.next_order() is None
    flags.claimed.discard(victim)
    planner.tick()
    order = planner.next_order()
    assert order is not None
    assert flags.taken_back == [victim]
    planner.check()


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
    near = hit(planner, 3, "n", "o", "p")
    assert run(planner) == [["n", "o", "p"]]
    assert flags.taken_back == [later, far]
    planner.check()
    assert flags.count == {near: 3, far: 1}, "its first block was needed by nobody"
    assert not planner.requests[far].final
    planner.finish(near)
    assert run(planner) == [["b", "c"], ["x"]], "the later one behind it, as far as there is room"
    assert far in flags.final
    assert flags.count[far] == 3
    planner.finish(far)
    assert run(planner) == [["y"]]
    assert (planner.requests[later].taken_back, flags.count[later]) == (1, 2)
    planner.check()


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
    again = hit(planner, 2, "a", "b", "c", priority=5)
    near = hit(planner, 3, *"stuvwxyz")
    assert run(planner) == [["s", "t", "u", "v"], ["w", "x", "y", "z"]]
    assert flags.taken_back == [again]
    planner.finish(near)
    assert run(planner, lanes=[Lane.DISK]) == []
    assert run(planner) == [["a"], ["b", "c"]]
    assert (flags.count[again], planner.requests[again].disk_blocks) == (3, 2)


def test_what_is_taken_back_before_its_look_up_was_answered_waits_for_that() -> None:
    flags = FlagsModel()
    planner = Planner(2, flags, chunk_blocks=4)
    first = hit(planner, 1, "a", "b")
    run(planner)
    planner.finish(first)
    early = hint(planner, 2, "a", "b", "c", priority=5)
    near = hit(planner, 3, "x", "y")
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
    key = hit(planner, 1, *"abcd", priority=5)
    order = planner.next_order()
    assert order is not None
    planner.fetched(order.number, [True, True], 1)
    flags.claimed.add(key)
    run(planner)
    assert flags.count[key] == 2
    near = hit(planner, 2, "x")
    assert run(planner) == []
    flags.claimed.discard(key)
    planner.tick()
    assert run(planner) == [["x"]]
    assert flags.taken_back == [key]
    planner.finish(near)
    run(planner)
    assert flags.count[key] == 4
    assert key in flags.final


def test_what_came_free_unseen_is_left_to_the_more_urgent_request_of_the_other_lane() -> None:
    """An engine gives a claim up in its flag alone; whoever is next must not take the room by looking first."""
    flags = FlagsModel()
    planner = Planner(1, flags, chunk_blocks=1)
    far = hit(planner, 1, "far", priority=9)
    run(planner)
    flags.claimed.add(far)
    hit(planner, 2, "near")
    assert run(planner) == []
    planner.looked_up(hint(planner, 3, "disk", priority=5), 1, b"\1")
    flags.claimed.discard(far)
    assert run(planner, lanes=[Lane.DISK]) == []
    planner.tick()
    assert run(planner) == [["near"]]
