"""The scheduler side when the weights change: older KV is void, and nothing is served before all know the new ones."""

from __future__ import annotations

import logging
import re

import pytest

from kvprefetch.connector.words.metadata import KVPrefetchWorkerMeta, OfReset, RankWeights
from kvprefetch.shmring.wire.records import FlagState

from .fakes import BLOCK, Engine, block_ids


def test_a_reset_voids_everything_older() -> None:
    """Handles are given up, copies under way go back unused, requests with old KV are never saved."""
    engine = Engine(credits=range(8))
    running, waiting = engine.add("running", 3 * BLOCK), engine.add("waiting", 2 * BLOCK)
    engine.admit(running)
    meta = engine.step([(running, 2 * BLOCK)])
    engine.reset()
    assert [generation for generation, _ in engine.link.resets] == [1, 2]
    assert engine.daemon.flag("waiting").state == FlagState.CANCELLED
    engine.acknowledge(meta)
    engine.daemon.drain()
    assert [saved.dropped for saved in engine.daemon.saved] == [True]
    assert engine.step([(running, BLOCK)]).saves == []
    engine.admit(waiting)
    assert len(engine.step([(waiting, 2 * BLOCK)]).saves) == 1, "it is computed with the new weights"
    engine.preempt(running)
    engine.admit(running)
    assert len(engine.step([(running, 3 * BLOCK)]).saves) == 1


def id_after(engine: Engine, *digests: bytes, before: bytes = b"", reset: bool = True) -> str:
    if reset:
        assert engine.side.reset()
    engine.report(*digests, before=before)
    generation, weights = engine.side.resets.current
    assert engine.link.resets[-1] == (generation, weights)
    assert engine.link.confirmed_reset == engine.side.resets.generation == generation
    return weights


def test_the_weights_id_is_that_of_all_ranks_digests() -> None:
    """Equal for engines of equal weights, however many resets they had; the order of the ranks counts."""
    one, other = Engine(world_size=2), Engine(world_size=2)
    first = id_after(one, b"a", b"b")
    assert id_after(one, b"b", b"a") != first
    assert id_after(one, b"a", b"b") == first == id_after(other, b"a", b"b")
    assert re.fullmatch("[0-9a-f]{32}", first)


@pytest.mark.parametrize("how", ["one after the other", "both at once"])
def test_nothing_goes_on_before_the_last_rank_has_said_what_its_weights_are(how: str) -> None:
    """From the reset on, the keys have an id that no others have, and the daemon knows it."""
    engine = Engine(world_size=2, credits=range(8))
    assert engine.side.reset()
    (own,) = engine.link.resets
    assert re.fullmatch("[0-9a-f]{32}", own[1])
    if how == "one after the other":
        engine.report(b"a")
    request = engine.add("r", 3 * BLOCK)
    assert engine.match(request) == (0, False)
    engine.allocate(request, 0)
    assert engine.step([(request, 2 * BLOCK)]).saves == []
    engine.report(*([b"b"] if how == "one after the other" else [b"a", b"b"]), first_rank=how != "both at once")
    assert len(engine.link.resets) == 2
    assert len(engine.step([(request, BLOCK)]).saves[0].slots) == 3, "all that it computed since the reset"


def test_reports_of_an_earlier_reset_say_nothing() -> None:
    engine = Engine()
    assert engine.side.reset()
    late = KVPrefetchWorkerMeta(weights={0: RankWeights(engine.side.resets.step.number, b"old")})
    assert engine.side.reset()
    engine.side.outputs(late)
    assert len(engine.link.resets) == 2
    assert not engine.side.resets.step.agreed


def test_an_update_that_changed_no_value_that_is_compared_gives_an_id_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sample is no proof that all is equal. Also for later resets, and also where one rank's values changed back."""
    one, other = Engine(world_size=2), Engine(world_size=2)
    shared = id_after(other, b"a", b"b")
    assert id_after(other, b"a", b"b") == shared, "a reset without an update"
    assert id_after(one, b"a", b"b", before=b"x") == shared
    with caplog.at_level(logging.INFO, "vllm.kvprefetch"):
        assert one.side.reset()
        number = one.side.resets.step.number
        reports = {0: RankWeights(number, b"a", b"a"), 1: RankWeights(number, b"b")}
        one.side.outputs(KVPrefetchWorkerMeta(weights=reports))
    assert "an update left all values that are compared as they were" in caplog.text
    own = one.side.resets.current.id
    again = id_after(one, b"a", b"b")
    assert len({own, again, shared}) == 3
    assert id_after(one, b"c", b"b", before=b"a") == id_after(other, b"c", b"b")


def test_an_update_without_a_reset_ends_sharing_and_begins_a_new_id(caplog: pytest.LogCaptureFixture) -> None:
    """Late as the rank's word for it is: what was saved since goes back, and KV of before is never saved."""
    engine = Engine(credits=range(16))
    running, waiting = engine.admitted("running", 4 * BLOCK), engine.add("waiting", 2 * BLOCK)
    meta = engine.step([(running, 2 * BLOCK)])
    assert len(meta.saves) == 1
    engine.cache.count = 2
    with caplog.at_level(logging.WARNING, "vllm.kvprefetch"):
        engine.report(b"")
    assert "reset at each update" in caplog.text
    (own,) = engine.link.resets
    engine.acknowledge(meta)
    engine.daemon.drain()
    assert [saved.dropped for saved in engine.daemon.saved] == [True]
    assert engine.daemon.flag("waiting").state == FlagState.CANCELLED
    assert engine.step([(running, BLOCK)]).weights == OfReset(1, agreed=False, computes=True)
    engine.report(b"new")
    assert engine.link.resets[1][1] != own[1]
    assert engine.step([(running, BLOCK)]).saves == [], "its prefix is of the old weights"
    engine.admit(waiting)
    assert len(engine.step([(waiting, 2 * BLOCK)]).saves) == 1
    local = engine.admitted("local", 3 * BLOCK, local=BLOCK)
    assert engine.step([(local, 2 * BLOCK)]).saves == [], "vLLM kept the old weights' KV"
    engine.cache.count = 0
    for each in (running, waiting, local):
        engine.side.finished(each)
    engine.reset()
    local = engine.admitted("local again", 3 * BLOCK, local=BLOCK)
    assert len(engine.step([(local, 2 * BLOCK)]).saves) == 1


def test_weights_that_came_before_the_first_step_are_those_of_all_kv() -> None:
    """As where a trainer sends the weights to engines that were started with none: no reset is needed."""
    engine = Engine(credits=range(8), world_size=2)
    request = engine.admitted("r", 4 * BLOCK)
    meta = engine.step([(request, 2 * BLOCK)])
    engine.report(b"a")
    engine.acknowledge(meta)
    engine.daemon.drain()
    assert [saved.dropped for saved in engine.daemon.saved] == [True], "it has the keys of the start's weights"
    assert engine.step([(request, BLOCK)]).saves == []
    assert engine.link.resets == []
    engine.report(b"b", first_rank=1)
    assert [generation for generation, _ in engine.link.resets] == [1]
    assert len(engine.step([(request, BLOCK)]).saves[0].slots) == 2, "the blocks of the dropped save stay unsaved"


def test_steps_say_what_their_orders_are_of() -> None:
    """Also those with nothing to do, which all have one metadata."""
    engine = Engine()
    request = engine.admitted("r", BLOCK)
    engine.side.requests["r"].save(more=False)
    assert engine.step([]).weights == OfReset()
    for _ in range(3):
        assert engine.step([(request, 1)]).weights == OfReset(0, agreed=False, computes=True)
    assert engine.side.reset()
    assert engine.step([(request, 1)]).weights == OfReset(1, agreed=False, computes=True)
    engine.report(b"a")
    for _ in range(3):
        assert engine.step([(request, 1)]).weights == OfReset(1, agreed=True, computes=True)
    engine.side.finished(request)
    assert engine.step([]).weights == OfReset(1, agreed=True, computes=False)


@pytest.mark.parametrize("how", ["cached", "running"])
def test_a_local_prefix_that_outlived_the_reset_is_never_saved_on(how: str) -> None:
    """vLLM could not empty its own prefix cache, or a running request goes on filling it."""
    engine = Engine(credits=range(8))
    if how == "cached":
        engine.cache.count = 1
    else:
        running = engine.admitted("running", 2 * BLOCK)
        engine.step([(running, 3)])
    engine.reset()
    request = engine.admitted("r", 3 * BLOCK, local=BLOCK)
    assert engine.step([(request, 2 * BLOCK)]).saves == []
    clean = engine.admitted("clean", 3 * BLOCK)
    assert len(engine.step([(clean, 3 * BLOCK)]).saves) == 1


def test_nothing_goes_on_before_the_daemon_knows_of_the_reset() -> None:
    engine = Engine(credits=range(8))
    engine.link.confirms = False
    engine.reset()
    request = engine.add("r", 3 * BLOCK)
    assert engine.match(request) == (0, False)
    engine.allocate(request, 0)
    assert engine.step([(request, 3 * BLOCK)]).saves == []
    assert len(engine.link.resets) == 2, "each is sent once"
    for confirmed, answer in ((1, (0, False)), (2, (None, False))):
        engine.link.confirmed_reset = confirmed
        assert engine.match(engine.add(f"again {confirmed}", 3 * BLOCK)) == answer


def test_what_ends_before_the_daemon_knows_of_the_reset_is_saved_once_it_does() -> None:
    """A short request may be over before the ranks have told their digests and the daemon its answer."""
    engine = Engine(credits=range(8))
    engine.link.confirms = False
    assert engine.side.reset()
    request = engine.admitted("r", 3 * BLOCK)
    assert engine.step([(request, 3 * BLOCK)]).saves == []
    engine.report(b"new")
    engine.side.finished(request, (block_ids(request),))
    engine.cache.names = dict(zip(block_ids(request), request.names(0, 3), strict=True))
    assert engine.step([]).saves == []
    assert engine.side.has_pending_work()
    engine.link.confirmed_reset = engine.side.resets.generation
    meta = engine.step([])
    assert [len(order.block_ids) for order in meta.saves] == [3]
    engine.acknowledge(meta)
    engine.step([])
    assert not engine.side.has_pending_work()


def test_a_reset_without_a_daemon_is_sent_when_one_is_there() -> None:
    """As the last one alone; a hello has it, too."""
    engine = Engine(credits=range(8))
    epoch, engine.link.epoch = engine.link.epoch, None
    engine.reset()
    assert engine.link.resets == []
    engine.link.epoch = epoch
    engine.match(engine.add("r", 3 * BLOCK))
    assert engine.link.resets == [tuple(engine.side.resets.current)]


def test_what_was_stored_before_a_reset_is_saved_again_behind_it() -> None:
    """Its keys name other weights then."""
    engine = Engine(credits=range(16))

    def saved(name: str) -> int:
        request = engine.admitted(name, 2 * BLOCK, salt="same", skip_reading_prefix_cache=True)  # no look-up
        meta = engine.step([(request, 2 * BLOCK)])
        engine.acknowledge(meta)
        return sum(len(order.block_ids) for order in meta.saves)

    assert [saved("first"), saved("second")] == [2, 0]
    engine.reset()
    assert saved("third") == 2
