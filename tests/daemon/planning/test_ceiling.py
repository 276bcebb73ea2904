"""The ceiling of waste: prefetch holds back once too many fetched blocks went unused, and comes back by itself."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.planning.ceiling import Ceiling
from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.planning.support import Planner, announced, hint, hit, ordered, planned, returned, run, whole

SLOTS = 8
SHARE = 1 / 16  # of half of the window, 64 blocks, this is 4


def aborted(planner: Planner, number: int, *names: str) -> None:
    """Prefetch these blocks for a request that its client gives up."""
    key = hit(planner, number, *names)
    run(planner)
    planner.finish(key)


def limited(planner: Planner) -> bool:
    return bool(planner.gauges()["prefetch_limited"])


def passed() -> Planner:
    """Return a planner past its ceiling, with the blocks of an aborted request in staging."""
    planner, _ = planned(SLOTS, 4, wasted_share=SHARE)
    aborted(planner, 1, *"abcde")
    assert limited(planner)
    return planner


def test_blocks_of_an_aborted_request_count_at_once_and_no_more_once_another_loads_them() -> None:
    planner = passed()
    assert planner.gauges()["slots_unused"] == 5
    key = hit(planner, 2, *"abcde")
    assert planner.gauges()["slots_unused"] == 0, "they may be loaded yet"
    planner.finish(key, range(5))
    assert planner.gauges()["slots_unused"] == 0
    assert not limited(planner)


def test_blocks_found_local_meanwhile_count_as_unused_and_loaded_ones_do_not() -> None:
    planner, _ = planned(SLOTS, 4, wasted_share=SHARE)
    key = hit(planner, 1, *"abcd")
    run(planner)
    planner.finish(key, range(3, 4))
    assert planner.gauges()["slots_unused"] == 3
    assert not limited(planner)


def test_a_block_that_is_evicted_unused_counts_once() -> None:
    planner = passed()
    key = hit(planner, 2, *"stuvwxyz")
    planner.ask(key)
    run(planner)
    planner.finish(key, range(8))
    assert planner.blocks.wasted == [5, 0]
    assert planner.gauges()["slots_unused"] == 0
    assert limited(planner), "5 of 13 blocks"


def test_past_the_ceiling_only_the_first_request_and_those_asked_for_are_fetched() -> None:
    planner = passed()
    first, second, third = (hit(planner, number, f"x{number}", f"y{number}") for number in (2, 3, 4))
    assert run(planner) == [["x2", "y2"]]
    assert not planner.wants(Lane.MEMORY), "nothing to try before something changes"
    assert not planner.starved(Lane.MEMORY), "there is room"
    planner.ask(third)
    assert run(planner) == [["x4", "y4"]]
    planner.finish(first)
    assert run(planner) == [["x3", "y3"]], "it is the first now"
    for key in (second, third):
        planner.finish(key)


def test_below_the_ceiling_all_are_fetched() -> None:
    planner, _ = planned(SLOTS, 4, wasted_share=SHARE)
    aborted(planner, 1, *"abcd")
    for number in (2, 3):
        hit(planner, number, f"x{number}", f"y{number}")
    assert [name for names in run(planner) for name in names] == ["x2", "y2", "x3", "y3"]


def test_an_order_ends_before_a_request_that_comes_too_early() -> None:
    planner, _ = planned(32, 4, wasted_share=0.0)
    aborted(planner, 1, "a")
    for number in (2, 3):
        hit(planner, number, f"x{number}")
    assert len(ordered(planner).slots) == 1


def test_a_request_without_blocks_does_not_hold_up_the_next_one() -> None:
    planner = passed()
    planner.looked_up(hint(planner, 2, "miss"), 0)
    hit(planner, 3, "x", "y")
    assert run(planner) == [["x", "y"]]


def test_a_nearer_request_that_arrives_later_is_the_first_one() -> None:
    planner = passed()
    hit(planner, 2, *"uvwxyz")
    order = ordered(planner)
    hit(planner, 3, "s", "t", priority=-1)
    assert list(ordered(planner).digests) == [b"s.......\0", b"t.......\0"]
    returned(planner, order)
    assert run(planner) == [], "the nearer one comes first, and the scheduler asked for none"


def test_it_comes_back_once_enough_was_fetched_and_used() -> None:
    planner = passed()
    rounds = 0
    while limited(planner):
        rounds += 1
        assert rounds < 20
        key = hit(planner, 10 + rounds, *(f"{rounds}-{at}" for at in range(SLOTS)))
        run(planner)
        planner.finish(key, range(SLOTS))
    assert rounds == 10, "85 blocks: five were wasted of them"


def test_a_share_of_one_is_no_ceiling() -> None:
    ceiling = Ceiling(1.0, SLOTS)
    ceiling.wasted(1000)
    assert not ceiling.passed


@pytest.mark.parametrize(("used", "over"), [(1, True), (40, True), (400, False)])
def test_what_was_wasted_long_ago_counts_less(used: int, over: bool) -> None:
    ceiling = Ceiling(0.1, 10)
    ceiling.fetched(10)
    ceiling.wasted(10)
    for _ in range(used):
        ceiling.fetched(1)
    assert ceiling.passed == over


def test_a_long_time_without_waste_does_not_allow_more_of_it() -> None:
    ceiling = Ceiling(0.1, 10)
    for _ in range(10_000):
        ceiling.fetched(1)
    ceiling.wasted(17)
    assert ceiling.passed


def test_late_blocks_of_a_call_past_its_deadline_count() -> None:
    planner, _ = planned(SLOTS, 8, wasted_share=SHARE)
    hit(planner, 1, *"abcde")
    order = ordered(planner)
    planner.overdue(order.number, 1)
    assert not limited(planner), "they did not come yet"
    returned(planner, order)
    assert limited(planner)


def test_the_next_request_is_fetched_once_the_one_before_it_is_asked_for() -> None:
    planner = passed()
    first = hit(planner, 2, "x")
    assert run(planner) == [["x"]]
    hit(planner, 3, "y")
    assert run(planner) == []
    planner.ask(first)
    assert run(planner) == [["y"]], "no tick in between"


@pytest.mark.parametrize("end", ["miss", "cancelled"])
def test_the_next_request_is_fetched_once_the_one_before_it_gets_nothing(end: str) -> None:
    planner = passed()
    first = hint(planner, 2, "miss")
    hit(planner, 3, "y")
    assert run(planner) == []
    if end == "miss":
        planner.looked_up(first, 0)
    else:
        planner.finish(first)
    assert run(planner) == [["y"]], "no tick in between"


@pytest.mark.parametrize("event", ["nothing", "finish"])
def test_a_whole_request_that_gets_nothing_does_not_hold_up_the_next_one(event: str) -> None:
    planner = passed()
    first = planner.hint((2, 1), whole("y"), 0)
    hit(planner, 3, "y")
    assert run(planner) == []
    if event == "nothing":
        planner.fetch_nothing(first)
    else:
        planner.finish(first.key)
    assert run(planner) == [["y"]], "no tick in between"


def test_requests_are_fetched_ahead_again_once_another_one_wants_the_unused_blocks() -> None:
    planner = passed()
    hit(planner, 2, "x")
    hit(planner, 3, "y")
    assert run(planner) == [["x"]]
    hit(planner, 4, *"abcde")
    assert not limited(planner)
    assert run(planner) == [["y"]], "no tick in between"


def test_late_blocks_of_an_announcement_do_not_count() -> None:
    planner, _ = planned(SLOTS, 32, wasted_share=0.0)
    announced(planner, 1, "a")
    order = planner.next_order(ahead=True)
    assert order is not None
    planner.overdue(order.number, 1)
    returned(planner, order)
    assert planner.blocks.wasted == [1, 0]
    assert not limited(planner)
