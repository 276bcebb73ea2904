"""Why a block is nowhere, and what a lane did while a request waited for it."""

from __future__ import annotations

from kvprefetch.daemon.engine.reasons import NAMESPACES, Histories, Reasons, failure
from kvprefetch.daemon.planning.requests import Failure
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.telemetry.trace import Missing, Work
from kvprefetch.daemon.work.rates import Rates
from tests.daemon.engine.epochs import block


def test_a_block_that_was_stored_is_nowhere_because_it_was_evicted_or_its_node_is_aside() -> None:
    reasons = Reasons(Rates(), Histories(), 1, ["model@"])
    reasons.stored.count([block("a"), block("b")])
    assert reasons.missing(block("b"), ()) == Missing("evicted")
    assert reasons.missing(block("b"), (), keeps=True) == Missing("lost"), "the store evicted nothing"
    assert reasons.missing(block("b"), ("n:2", "n:1"), keeps=True) == Missing("storage_node", owners="n:1 n:2")
    assert reasons.missing(block("c"), ("n:1",)) == Missing("never_stored")
    reasons.moved(["model@g:1@"])
    assert reasons.missing(block("a"), ()) == Missing("other_namespace", "model@"), "the weights changed"


def test_a_block_of_another_namespace_is_found_there() -> None:
    """Engines of one namespace share its history, also one after the other."""
    histories = Histories()
    Reasons(Rates(), histories, 1, ["model@fp:1@"]).stored.count([block("a")])
    assert Reasons(Rates(), histories, 1, ["model@fp:1@"]).missing(block("a"), ()) == Missing("evicted")
    other = Reasons(Rates(), histories, 1, ["model@fp:2@"])
    assert other.missing(block("a"), ()) == Missing("other_namespace", "model@fp:1@")
    assert other.missing(block("b"), ()) == Missing("never_stored")
    stranger = Reasons(Rates(), histories, 2, ["model@fp:2@"])
    assert stranger.missing(block("a"), ()) == Missing("never_stored"), "no user learns what another one stored"


def test_histories_are_bounded() -> None:
    histories = Histories()
    first = histories.of(1, "0")
    first.count([block("a")])
    others = [histories.of(1, str(number)) for number in range(1, NAMESPACES)]
    assert histories.holder(block("a"), 1, others[0]) == "0"
    histories.of(1, "one more")
    assert histories.holder(block("a"), 1, others[0]) == ""


def test_the_time_without_room_is_that_of_the_lane() -> None:
    reasons = Reasons(Rates(), Histories(), 1, "")
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
