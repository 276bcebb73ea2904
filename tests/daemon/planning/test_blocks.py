"""Staging slots: runs, duplicate blocks, the order in which blocks make room, and waste."""

from __future__ import annotations

from kvprefetch.daemon.planning.requests import Key
from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.planning.support import announced, block, hint, hit, ordered, planned, run


def test_an_order_has_no_block_that_is_here() -> None:
    planner, _ = planned(8, 8)
    hit(planner, 1, "a", "b", "c", "d")
    assert run(planner) == [["a", "b", "c", "d"]]
    hit(planner, 2, "x", "y", "c", "z")
    assert run(planner) == [["x", "y", "z"]]
    planner.check()


def test_blocks_of_one_request_are_one_run_until_another_prompt_parts_from_it() -> None:
    planner, _ = planned(16, 4)
    one = hit(planner, 1, *"abcdefgh")
    run(planner)

    def runs(key: Key) -> list[int]:
        return [len(run.slots) for run in planner.blocks.runs(planner.requests[key].held)]

    assert runs(one) == [8]
    same = hint(planner, 2, *"abcdefgh", local=2)
    assert runs(same) == [6]
    parts = hint(planner, 3, *"abcdefxy")
    assert runs(parts) == [2, 4]
    assert runs(one) == [2, 4, 2]
    planner.check()
    for key in (parts, same, one):
        planner.finish(key)
    assert runs(hint(planner, 4, *"abcdefgh")) == [8]
    planner.check()


def test_the_last_blocks_of_the_least_recently_used_run_make_room_first() -> None:
    planner, _ = planned(4, 2)
    key = hit(planner, 1, *"abcd")
    run(planner)
    planner.finish(key)
    hit(planner, 2, "x")
    run(planner)
    assert planner.requests[hint(planner, 3, *"abcd")].issued == 3


def test_blocks_that_are_announced_make_room_last_and_the_prompt_that_came_last_goes_first() -> None:
    planner, _ = planned(6, 8)
    planner.block_ns = [1e9, 1e9]  # a long fetch is behind later ones, and no later for that
    for number, names in enumerate(("ab", "cd"), 1):
        key = announced(planner, number, *names, until_ns=5 * 10**9)
        order = planner.next_order(ahead=True)
        assert order is not None
        planner.fetched(order.number, [True, True], 1)
        planner.finish(key)
    used = hit(planner, 2, "x", "y")
    run(planner)
    planner.finish(used, range(2))
    hit(planner, 4, "u", "v", "w")
    assert run(planner) == [["u", "v", "w"]]
    left = [name for name in "abcdxy" if planner.blocks.holds(block(name))]
    assert left == ["a", "b", "c"], "x and y were used later, and nobody expects them"
    planner.check()


# --- waste ------------------------------------------------------------------------------------------------------------


def test_blocks_that_were_announced_or_came_too_late_or_are_void_are_waste_of_their_medium() -> None:
    planner, _ = planned(8, 16)
    announced(planner, 1, "a", "b", disk=b"\1\1")
    order = planner.next_order(Lane.DISK, ahead=True)
    assert order is not None
    planner.fetched(order.number, [True, False], 1)
    hit(planner, 1, "c", "d", "e")
    order = ordered(planner)
    planner.overdue(order.number, 1)
    assert planner.blocks.wasted == [0, 0]
    planner.fetched(order.number, [True, True, False], 2)
    assert planner.blocks.wasted == [2, 0]
    planner.reset()
    assert planner.blocks.wasted == [2, 1]
