"""vLLM's real schedulers and our connector under random schedules: nothing wrong is stored, loaded or kept."""

from __future__ import annotations

import pytest

from tests.scheduler.engine import Engine, Sent
from tests.scheduler.schedules import TRUTHS, explore
from tests.scheduler.shape import Shape, Site, make_request

QUEUES = {"Scheduler": 1, "AsyncScheduler, one in flight": 2, "AsyncScheduler, two in flight": 3}
COVERED = (
    "loads",
    "saves",
    "stored",
    "compared",
    "preemptions",
    "aborts",
    "failed_ranks",
    "forgets",
    "resets",
    "chunks",
    "drafts",
    "detaches",
)


@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_random_schedules(site: Site, queue: int) -> None:
    total = explore(site, 35, queue=queue)
    print(total)
    for what in COVERED:
        assert total[what] > 0, f"no example had any {what}: {total}"


def test_vllm_alone_fails_in_a_session_with_drafts(site: Site) -> None:
    """Why the schedules have no such sessions. When this passes no more, vLLM has mended it, and they can have them."""
    for out in range(2, 12):
        engine = Engine(Shape(drafts=True, blocks=40), None, TRUTHS[1, False])
        engine.requests["s"] = Sent("s", [[1, 2, 3]], out, True, 0, False)
        first = make_request("s", [1, 2, 3], out, resumable=True, arrival_time=0.0)
        engine.scheduler.add_request(first)
        engine.run(40)
        engine.feed("s", [4])
        try:
            engine.run(40)
        except AssertionError:
            return
    pytest.fail("a chunk of one token is computed after drafts were accepted past the end of the one before")


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("settled", [True, False], ids=["settled", "racing"])
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_very_many_random_schedules(site: Site, queue: int, settled: bool) -> None:
    """Other schedules at each run; racing ones do not wait for the daemon."""
    print(explore(site, 350, queue=queue, settled=settled, seeded=False))
