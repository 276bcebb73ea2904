"""The planner's cost: a hint's time does not grow with the queue, and a waiting request takes little memory."""

from __future__ import annotations

import time
import tracemalloc

from tests.daemon.planning.support import digests, hint, hit, planned, run


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


def test_a_waiting_request_takes_little_memory_beside_its_names() -> None:
    hashes = digests(*[f"s-{i}" for i in range(256)])
    planner, flags = planned(256, 256)
    flags.publish = lambda _: True  # type: ignore[method-assign,assignment]  # the model's own memory is not the planner's

    def wait(number: int) -> None:
        planner.hinted((number, 1), hashes)
        planner.looked_up((number, 1), 256)

    wait(0)
    run(planner)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(1, 1001):
        wait(number)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used / 1000 - (9 + 1) * 256 < 2560, "a name for each block, and a byte for what is known of it"
