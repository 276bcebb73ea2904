"""Why a fetch failed, and what a lane did while a request waited for it."""

from __future__ import annotations

from kvprefetch.daemon.engine.reasons import Reasons, failure
from kvprefetch.daemon.planning.requests import Failure
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.telemetry.trace import Work
from kvprefetch.daemon.work.rates import Rates


def test_the_time_without_room_is_that_of_the_lane() -> None:
    reasons = Reasons(Rates())
    reasons.note_room(Lane.DISK, 100, starved=True)
    reasons.note_room(Lane.MEMORY, 110, starved=False)
    assert reasons.work(Lane.DISK, 130) == Work(Lane.DISK, starved_ns=30)
    assert reasons.work(Lane.MEMORY, 130) == Work(Lane.MEMORY)
    reasons.note_room(Lane.DISK, 140, starved=True)
    reasons.note_room(Lane.DISK, 150, starved=False)
    assert reasons.work(Lane.DISK, 999).starved_ns == 50


def test_a_failed_fetch_names_nodes_only_if_one_did_not_deliver() -> None:
    assert failure([ErrorClass.OK, ErrorClass.TRANSFER], ("n:1",)) == Failure("transfer", "n:1")
    assert failure([ErrorClass.MISS, ErrorClass.TRANSFER], ("n:1",)) == Failure("miss")
