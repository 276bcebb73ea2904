"""vLLM's real schedulers and our connector under random schedules: nothing wrong is stored, loaded or kept."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from kvprefetch.connector.request.policy import Verdict, Wait, WaitPolicy
from kvprefetch.connector.request.request_state import Claim, Pass, RequestState
from tests.scheduler.engine import Engine
from tests.scheduler.schedules import STORED_S, Add, explore, play, run, truth_of
from tests.scheduler.shape import Shape, Site
from tests.scheduler.verdict import finish

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
    "updates",
    "chunks",
    "drafts",
    "detaches",
    "early",
    "forsaken",
)


@pytest.mark.shows("random schedules, `Scheduler` and `AsyncScheduler`")
@pytest.mark.shows("streaming sessions")
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_random_schedules(site: Site, queue: int) -> None:
    total = explore(site, 20, queue=queue)
    print(total)
    for what in COVERED:
        assert total[what] > 0, f"no example had any {what}: {total}"


@pytest.mark.parametrize("queue", [2, 3])
def test_stored_kv_of_weights_that_were_updated_since_the_start_changes_no_token(site: Site, queue: int) -> None:
    """The scheduler side hears of the update with the step that would load; the step behind it is under way by then."""
    shape = Shape(queue=queue, load_mode="sync")
    first = Engine(shape, site, truth_of(shape))
    play(first, [Add(0, 36, 1, 1), run(60)])
    first.settle(STORED_S)
    finish(first)
    later = Engine(shape, site, truth_of(shape), prefix=first.prefix)
    later.update_weights()
    play(later, [Add(0, 36, 1, 8)])
    later.settle(STORED_S)
    finish(later)
    assert later.counts["failed_loads"] == 1
    assert later.counts["compared"] > 0


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_random_schedules_whose_fetches_are_stopped(site: Site, monkeypatch: pytest.MonkeyPatch, queue: int) -> None:
    """At any visit, also before the daemon orders anything; some stopped fetches bring blocks, and these are loaded."""
    seen: Counter[str] = Counter()
    verdict, claim = WaitPolicy.verdict, RequestState.claim
    chance = random.Random(0)

    def stopped(self: WaitPolicy, wait: Wait, *args: Any, **options: Any) -> Verdict:
        seen["visits of stopped fetches"] += wait.stopped
        decided = verdict(self, wait, *args, **options)
        if decided is Verdict.TIMED_OUT or not wait.counts:
            return decided
        return Verdict.WAIT if wait.stopped or chance.random() < 0.5 else Verdict.STOP

    def claimed(self: RequestState, answer: Claim, this_pass: Pass) -> None:
        seen["loads of stopped fetches"] += self.handle is not None and self.handle.stopped
        claim(self, answer, this_pass)

    monkeypatch.setattr(WaitPolicy, "verdict", stopped)
    monkeypatch.setattr(WaitPolicy, "cost_ns", lambda self, blocks, load: 1e6 * blocks)  # else a stop knows its cost
    monkeypatch.setattr(RequestState, "claim", claimed)
    print(explore(site, 100, queue=queue, patient=False, settled=False, seeded=False), seen)
    assert seen["visits of stopped fetches"] > 0
    assert seen["loads of stopped fetches"] > 0


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("settled", [True, False], ids=["settled", "racing"])
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_very_many_random_schedules(site: Site, queue: int, settled: bool) -> None:
    """Other schedules at each run; racing ones do not wait for the daemon."""
    print(explore(site, 350, queue=queue, settled=settled, seeded=False))
