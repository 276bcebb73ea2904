"""The planner's cost: a hint's time does not grow with the queue, nor does memory with the hints that came."""

from __future__ import annotations

import time
import tracemalloc

from kvprefetch.daemon.planning.blocks import MAX_RUN
from tests.daemon.planning.support import hint, hit, planned, run


def test_a_long_queue_makes_no_hint_dearer() -> None:
    """Work that grows with the queue would cost a hundred times as much at the far end; noise does not."""

    def cost(waiting: int) -> float:
        planner, _ = planned(64, 16)
        for number in range(waiting):
            hit(planner, number, f"q{number}")
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


def test_requests_that_share_what_they_hold_make_no_victim_dearer() -> None:
    """None of them gives room back, so none is weighed when room is looked for."""

    def cost(waiting: int) -> float:
        planner, _ = planned(3, 16)
        hit(planner, 0, "shared", "own")
        run(planner)
        for number in range(1, waiting):
            hit(planner, number, "shared", f"q{number}")
            run(planner)
        rounds = []
        for _ in range(200):
            planner.tick()
            started = time.perf_counter()
            run(planner)
            rounds.append(time.perf_counter() - started)
        return sorted(rounds)[20]

    assert cost(5000) < 15 * cost(50)


def test_blocks_that_are_hinted_in_another_order_cost_no_more_each_the_more_there_are() -> None:
    """Each cuts a run, of bounded length. An engine that lies would hold up the loop for all others."""

    def cost(blocks: int) -> float:
        planner, _ = planned(blocks, MAX_RUN)
        names = [f"b{number}" for number in range(blocks)]
        hit(planner, 0, *names)
        run(planner)
        planner.finish((0, 1))
        assert planner.gauges()["slots_idle"] == blocks
        started = time.perf_counter()
        hint(planner, 1, *names[::2], *names[1::2])
        return (time.perf_counter() - started) / blocks

    assert cost(16_000) < 5 * min(cost(1000) for _ in range(3))


def test_requests_that_ended_behind_one_that_waits_are_forgotten() -> None:
    planner, _ = planned(1, 1)
    hit(planner, 0, "a", priority=-1)
    tracemalloc.start()
    for number in range(1, 5001):
        planner.finish(hit(planner, number, f"b{number}"))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 100_000, "the queue keeps an entry of each"
