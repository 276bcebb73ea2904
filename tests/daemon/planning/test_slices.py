"""What one event of the planner may cost where an engine hints blocks in a wrong order, so that each is a run."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvprefetch.daemon.planning.blocks import MAX_RUN
from kvprefetch.daemon.planning.holdings import RUNS
from tests.daemon.planning.support import FlagsModel, Planner, hint, hit, planned, run

BLOCKS = 4 * RUNS
NAMES = [f"b{number}" for number in range(BLOCKS)]


def staged(blocks: int, slots: int = 0) -> tuple[Planner, FlagsModel]:
    """Return a planner with so many staged blocks, which no request holds."""
    planner, flags = planned(slots or blocks, MAX_RUN)
    hit(planner, 0, *NAMES[:blocks])
    run(planner)
    planner.finish((0, 1))
    settle(planner)
    return planner, flags


def settle(planner: Planner) -> list[int]:
    """Return how many pins each event took or gave back until nothing is owed."""
    return steps(planner, lambda: planner.holdings.owes, planner.carry_out)


def steps(planner: Planner, more: Callable[[], bool], event: Callable[[], object]) -> list[int]:
    pins = lambda: sum(len(each.held) for each in planner.requests.values())  # noqa: E731
    changes = []
    while more():
        before = pins() + planner.gauges()["slots_free"], planner.gauges()["blocks_pinned"]
        event()
        after = pins() + planner.gauges()["slots_free"], planner.gauges()["blocks_pinned"]
        changes.append(max(abs(one - other) for one, other in zip(before, after, strict=True)))
    planner.check()
    return changes


def test_a_prompt_in_a_wrong_order_is_pinned_shown_and_given_back_in_slices() -> None:
    planner, flags = staged(BLOCKS)
    key = hit(planner, 1, *reversed(NAMES))
    assert planner.gauges()["blocks_pinned"] <= 2 * RUNS, "at its hint, and once it is looked up"
    changes = steps(planner, lambda: key not in flags.final, planner.next_order)
    assert flags.count[key] == BLOCKS
    assert max(changes) <= RUNS
    planner.finish(key)
    assert planner.gauges()["blocks_pinned"] >= BLOCKS - RUNS
    assert max(settle(planner)) <= RUNS
    assert planner.gauges()["slots_idle"] == BLOCKS


def test_a_reset_of_everything_is_done_in_slices_and_nothing_of_it_is_found_any_more() -> None:
    planner, flags = staged(BLOCKS)
    keys = [hit(planner, number, *reversed(NAMES)) for number in range(1, 6)]
    steps(planner, lambda: not flags.final.issuperset(keys), planner.next_order)
    assert planner.gauges()["blocks_pinned"] == BLOCKS
    assert [request.key for request in planner.reset()] == keys
    assert not planner.requests
    assert planner.gauges()["blocks_pinned"] >= BLOCKS - RUNS
    assert hint(planner, 9, *NAMES) in planner.requests
    assert planner.requests[9, 1].issued == 0
    changes = settle(planner)
    assert len(changes) > 2 * BLOCKS // RUNS, "each block is a run for five requests, until one alone is left"
    assert max(changes) <= RUNS
    assert planner.gauges()["slots_free"] == BLOCKS


def test_bytes_that_many_requests_wait_for_show_them_in_slices() -> None:
    planner, flags = staged(RUNS, slots=RUNS + 1)
    names = ["first", *reversed(NAMES[:RUNS])]
    keys = [hit(planner, number, *names) for number in range(1, 9)]
    order = planner.next_order()
    assert order is not None
    steps(planner, lambda: any(planner.requests[key].issued <= RUNS for key in keys), planner.next_order)
    planner.fetched(order.number, [True], 5)
    assert len(flags.final) < len(keys)
    settle(planner)
    assert {flags.count[key] for key in keys} == {RUNS + 1}
    assert {planner.requests[key].last_byte_ns for key in keys} == {5}


def test_a_prompt_that_waits_for_room_costs_a_tick_no_more_the_more_it_holds() -> None:
    """An engine that holds its last slots with another request could keep the loop busy with one hint."""

    def cost(blocks: int) -> float:
        planner, flags = staged(blocks, slots=blocks + 1)
        flags.claimed.add(hit(planner, 1, "x"))
        run(planner)
        waits = hit(planner, 2, *reversed(NAMES[:blocks]), "y")
        steps(planner, lambda: planner.requests[waits].issued < blocks, planner.next_order)
        assert waits not in flags.final
        rounds = []
        for _ in range(50):
            started = time.perf_counter()
            planner.tick()
            assert planner.next_order() is None
            rounds.append(time.perf_counter() - started)
        assert waits not in flags.final
        return sorted(rounds)[5]

    assert cost(4 * RUNS) < 5 * min(cost(RUNS // 16) for _ in range(3))
