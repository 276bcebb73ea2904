"""The planner's events: sharing, urgency, publication, failure, cancel and reset."""

from __future__ import annotations

from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.planning.support import hint, hit, ordered, planned, returned, run


def test_an_order_may_have_fewer_blocks_than_the_lane_s_calls() -> None:
    planner, _ = planned(8, 4)
    hit(planner, 1, "a", "b", "c", "d", "e")
    sizes = [len(ordered(planner, most=most).slots) for most in (1, 9)]
    assert sizes == [1, 4]


def test_over_a_slow_link_a_request_does_not_wait_for_the_next_one_s_blocks() -> None:
    for most, blocks in ((3, 1), (None, 4)):
        planner, _ = planned(8, 4)
        hit(planner, 1, "a")
        hit(planner, 2, "b", "c", "d")
        assert len(ordered(planner, most=most).slots) == blocks


def test_a_reset_ends_all_fetches_for_hints_before_it() -> None:
    """Until the removal is over, the store may hold KV of the old weights; a later hint would find it staged."""
    planner, flags = planned(4, 1)
    claimed, undecided = hit(planner, 1, "a", "b", "c"), hint(planner, 2, "d", priority=1)
    returned(planner, ordered(planner))
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


def test_a_request_on_both_media_is_ordered_in_prefix_order_lane_by_lane() -> None:
    planner, flags = planned(8, 8)
    key = hit(planner, 1, *"abcde", local=1, disk=b"\0\1\1\0")
    assert planner.next_order(Lane.DISK) is None
    assert run(planner, lanes=[Lane.MEMORY]) == [["b"]]
    assert run(planner, lanes=[Lane.DISK]) == [["c", "d"]]
    assert run(planner, lanes=[Lane.MEMORY]) == [["e"]]
    assert flags.count[key] == 5


def test_staged_blocks_need_no_look_up_and_are_published_when_it_answers() -> None:
    """Also blocks that were staged during the look-up, and without room for the rest."""
    planner, flags = planned(2, 8)
    early = hint(planner, 1, "a", "b", "c")
    one = hit(planner, 2, "a", "b")
    run(planner)
    two = hint(planner, 3, "a", "b", "c")
    assert planner.requests[two].issued == 2, "only c has to be looked up"
    assert two not in flags.count
    for key in (early, two):
        planner.looked_up(key, 3, b"\0\0\1")
        assert flags.count[key] == 2
    three = hint(planner, 4, "a", "b")
    assert planner.requests[three].issued == 2
    planner.looked_up(three, 2)
    assert {one, three} <= flags.final


def test_the_times_of_the_first_and_the_last_byte_are_those_of_fetches_for_this_request() -> None:
    planner, _ = planned(8, 1)

    def times(number: int) -> tuple[int, int]:
        request = planner.requests[number, 1]
        return request.first_byte_ns, request.last_byte_ns

    hit(planner, 1, "a", "b", "c")
    orders = [ordered(planner) for _ in range(3)]
    for at, now_ns in ((0, 10), (2, 20), (1, 30)):
        returned(planner, orders[at], now_ns=now_ns)
    assert times(1) == (10, 30)
    hit(planner, 2, "a", "b")
    assert times(2) == (0, 0), "it was staged"
    assert planner.gauges()["blocks_pinned"] == 3
    hit(planner, 3, "x")
    returned(planner, ordered(planner), ok=False, now_ns=40)
    assert times(3) == (0, 0)
