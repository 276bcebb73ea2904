"""Too few staging slots: which request gets them, by urgency and lane, and which one gives them up."""

from __future__ import annotations

from typing import Any

from kvprefetch.daemon.planning import planner as planner_module
from kvprefetch.daemon.planning.requests import TakenBack
from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.planning.support import hint, hit, ordered, planned, run


def test_a_request_at_the_head_takes_the_room_of_the_least_urgent_unclaimed_one() -> None:
    planner, flags = planned(2, 8)
    claimed, waiting = hit(planner, 1, "a"), hit(planner, 2, "b")
    run(planner)
    flags.claimed.add(claimed)
    head = hit(planner, 3, "c")
    assert run(planner) == [], "an ordinary later arrival takes no room from others"
    planner.ask(head)
    ordered(planner)
    assert flags.taken_back == [waiting]
    assert planner.requests[waiting].taken_back == 1


def test_a_more_urgent_memory_hit_takes_the_room_of_what_came_from_disk() -> None:
    """A prompt on disk may have all of staging; what a call is writing alone stays."""
    planner, flags = planned(8, 2)
    slow = hit(planner, 1, *"abcdefgh", disk=b"\1" * 8)
    run(planner, lanes=[Lane.DISK])
    assert (flags.count[slow], slow in flags.final) == (8, True)
    fast = hit(planner, 2, "x", "y")
    planner.ask(fast)
    assert run(planner, lanes=[Lane.MEMORY]) == [["x", "y"]]
    assert flags.taken_back == [slow]


def test_requests_that_wait_for_each_others_slots_are_served_in_part_one_after_the_other() -> None:
    """Two requests hold each block, so taking one request's blocks gives no room, and none has all that it wants.

    A request that was served and taken back before holds nothing that they could wait for.
    """
    planner, flags = planned(4, 2)
    prompts = ["abc", "abd", "xyz", "xyw"]
    before = hit(planner, 20, "v", priority=9)
    run(planner)
    for key in [hint(planner, number, *names) for number, names in enumerate(prompts)]:
        planner.looked_up(key, 2)
    run(planner)
    keys = [hint(planner, 10 + number, *names) for number, names in enumerate(prompts)]
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


def test_blocks_that_were_taken_back_are_fetched_again_when_there_is_room() -> None:
    """In the request's own place of the queue, and only the blocks that are absent by then."""
    planner, flags = planned(4, 4)
    far, later = hit(planner, 1, "a", "b", "c", priority=1), hit(planner, 2, "x", "y", priority=2)
    assert run(planner) == [["a", "b", "c"], ["x"]]
    near = hit(planner, 3, "n", "o", "p")
    assert run(planner) == [["n", "o", "p"]]
    assert flags.taken_back == [later, far]
    planner.check()
    assert flags.count == {near: 3, far: 1}, "no request needed its first block"
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
    """The scheduler asks for each once, which takes what the other took before; then it is over."""
    planner, flags = planned(2, 4)
    keys = [hit(planner, 1, "a", "b", priority=1), hit(planner, 2, "x", "y", priority=2)]
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


def test_blocks_found_staged_are_fetched_again_from_their_own_medium() -> None:
    """No look-up of this request covered them; the table knows their lane from the first fetch."""
    planner, flags = planned(8, 4)
    first = hit(planner, 1, "a", "b", "c", disk=b"\0\1\1")
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


def test_a_request_taken_back_during_its_look_up_waits_for_the_answer() -> None:
    planner, flags = planned(2, 4)
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


def test_room_that_came_free_without_an_event_is_left_to_the_more_urgent_lane() -> None:
    """An engine gives up a claim in its flag alone; the first lane to look must not take that room."""
    planner, flags = planned(1, 1)
    far = hit(planner, 1, "far", priority=9)
    run(planner)
    flags.claimed.add(far)
    hit(planner, 2, "near")
    assert run(planner) == []
    hit(planner, 3, "disk", priority=5, disk=b"\1")
    flags.claimed.discard(far)
    assert run(planner, lanes=[Lane.DISK]) == []
    planner.tick()
    assert run(planner) == [["near"]]


def test_what_was_staged_and_not_shown_yet_is_not_shown_once_it_is_taken_back() -> None:
    """Its slots have another request's blocks by then."""
    planner, flags = planned(1, 8)
    waiting, head = hit(planner, 1, "a"), hit(planner, 2, "b")
    order = planner.next_order()
    assert order is not None
    whole = planner_module.Planner  # whose changes nobody carries out yet
    whole.fetched(planner, order.number, [True], 1)
    whole.ask(planner, head)
    assert whole.next_order(planner) is not None
    assert flags.taken_back == [waiting]
    changes: list[Any] = list(planner.holdings.changes)
    assert [(type(each), each.request.key) for each in changes] == [(TakenBack, waiting)]
