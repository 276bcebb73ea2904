"""What a hint costs the planner does not grow with the queue, and a waiting request is small."""

from __future__ import annotations

import time
import tracemalloc

from kvprefetch.daemon.planning.planner import Planner
from tests.daemon.planning.support import FlagsModel, digests, hint, run


def test_a_long_queue_makes_no_hint_dearer() -> None:
    """Work that grows with the queue would cost a hundred times as much at the far end; noise does not."""

    def cost(waiting: int) -> float:
        planner = Planner(64, FlagsModel(), chunk_blocks=16)
        for number in range(waiting):
            planner.looked_up(hint(planner, number, f"q{number}"), 1)
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


def test_a_waiting_request_takes_little_memory_beside_its_hashes() -> None:
    names = [f"shared-{i}" for i in range(256)]
    hashes = digests(*names)
    flags = FlagsModel()
    planner = Planner(256, flags, chunk_blocks=256)
    flags.publish = lambda *_: True  # type: ignore[method-assign]  # the model's own memory is not the planner's
    planner.hint((0, 1), hashes, 8, 256, 0, 0)
    planner.looked_up((0, 1), 256)
    run(planner)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(1, 1001):
        planner.hint((number, 1), hashes, 8, 256, 0, 0)
        planner.looked_up((number, 1), 256)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used / 1000 < 2048
