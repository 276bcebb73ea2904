"""The planner's cost: a hint's time does not grow with the queue, and a waiting request takes little memory."""

from __future__ import annotations

import time

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
