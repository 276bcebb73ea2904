"""vLLM's real schedulers and our connector under random schedules: nothing wrong is stored, loaded, told or kept."""

from __future__ import annotations

import pytest

from tests.scheduler.schedules import explore
from tests.scheduler.shape import Site

QUEUES = {"Scheduler": 1, "AsyncScheduler, one in flight": 2, "AsyncScheduler, two in flight": 3}
COVERED = (
    "loads", "saves", "stored", "compared", "preemptions", "aborts", "failed_ranks", "forgets",
    "resets", "chunks", "drafts", "detaches",
)  # fmt: skip


@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_random_schedules(site: Site, queue: int) -> None:
    total = explore(site, 35, queue=queue)
    print(total)
    for what in COVERED:
        assert total[what] > 0, f"no example had any {what}: {total}"


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("settled", [True, False], ids=["settled", "racing"])
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_very_many_random_schedules(site: Site, queue: int, settled: bool) -> None:
    """Other schedules at each run; racing ones do not wait for the daemon."""
    print(explore(site, 350, queue=queue, settled=settled, seeded=False))
