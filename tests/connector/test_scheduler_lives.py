"""The scheduler side when the daemon dies, hangs, comes back or writes what cannot be."""

from __future__ import annotations

import os

import pytest

from kvprefetch.connector.attach.epoch import SchedulerEpoch
from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.liveness import HUNG_AFTER_NS, PeerState
from kvprefetch.shmring.wire.attach import Attached
from kvprefetch.shmring.wire.records import FlagState
from tests.support.clock import Clock

from .fakes import BLOCK, Engine, FakeDaemon

NOTHING, PENDING = (0, False), (None, False)


@pytest.mark.parametrize("how", ["gone", "closing", "hung", "detached"])
def test_a_dead_or_hung_daemon_makes_nobody_wait(how: str) -> None:
    """What was staged lies in mapped memory and is taken, until the epoch is gone."""
    engine = Engine()
    request, staged = engine.add("r", 3 * BLOCK), engine.add("staged", 3 * BLOCK)
    engine.daemon.stage("staged", 2)
    assert engine.match(request) == PENDING
    if how == "gone":
        engine.link.epoch.ended()  # type: ignore[union-attr]
    elif how == "closing":
        engine.daemon.liveness.set_state(PeerState.CLOSING)
    elif how == "hung":
        engine.clock.advance_ms(HUNG_AFTER_NS / 1e6 + 1)
    else:
        engine.link.epoch = None
    assert engine.match(request) == NOTHING
    engine.allocate(request, 0)
    assert engine.match(staged) == (NOTHING if how == "detached" else (2 * BLOCK, False))
    engine.add("later", 3 * BLOCK)
    engine.daemon.drain()
    assert [hint.request_id for hint in engine.daemon.hints] == ["r", "staged"]
    assert not engine.side.has_pending_work()


def test_an_answer_is_honoured_when_the_daemon_dies_before_the_allocation() -> None:
    """The bytes lie in memory the workers have mapped; its epoch is kept alive until the load is acknowledged."""
    engine = Engine()
    request = engine.add("r", 3 * BLOCK)
    engine.daemon.flags.set_disk(engine.daemon.hint("r").flag, 2)
    engine.daemon.stage("r", 2)
    assert engine.match(request) == (2 * BLOCK, False)
    engine.link.epoch = None
    engine.allocate(request, 2 * BLOCK)
    assert engine.side.disk_tokens(request) == 2 * BLOCK
    meta = engine.step([(request, BLOCK)])
    assert engine.side.disk_tokens(request) is None, "what an ended epoch says is not looked at any more"
    assert (len(meta.loads), meta.live_epochs) == (1, (1,))
    assert engine.step().live_epochs == (1,)
    engine.acknowledge(meta)
    assert engine.step().live_epochs == ()


def test_epochs_that_the_next_hello_does_not_name_are_never_named_again() -> None:
    """The link's thread asks after it dropped its epoch; idle, the scheduler side still stands on the one before."""
    engine = Engine()
    request = engine.add("r", 3 * BLOCK, staged=2)
    engine.take(request, 2 * BLOCK)
    meta = engine.step([(request, BLOCK)])
    engine.link.epoch = FakeDaemon(engine.clock, epoch=2).epoch()
    engine.step()
    engine.link.epoch = None
    assert set(engine.side.live_epochs()) == {1, 2}, "a load of the first, and what is adopted"
    engine.acknowledge(meta)
    engine.link.epoch = FakeDaemon(engine.clock, epoch=3).epoch()
    assert engine.side.live_epochs() == (2,), "the scheduler side was not called since"
    engine.step()
    assert engine.side.live_epochs() == (3,)


def test_an_epoch_that_ends_while_it_is_adopted_is_not_used() -> None:
    """Between the look at the link and the adoption its thread may drop the epoch and say hello without it."""
    engine = Engine()
    ending = FakeDaemon(engine.clock, epoch=2).epoch()
    adopt = engine.side.adopt

    def ends_meanwhile(epoch: SchedulerEpoch | None) -> None:
        if epoch is ending:
            engine.link.epoch = None
        adopt(epoch)

    engine.side.adopt = ends_meanwhile  # type: ignore[method-assign]
    engine.link.epoch = ending
    engine.add("r", 3 * BLOCK)
    assert engine.side.live_epochs() == ()


@pytest.mark.parametrize("what", ["slot", "generation", "state", "count", "head"])
def test_corruption_detaches_and_never_raises(what: str) -> None:
    engine = Engine(slots=8, flags=64, ring=4096)
    request = engine.add("r", 3 * BLOCK)
    hint = engine.daemon.hint("r")
    if what == "slot":
        engine.daemon.stage("r", 2, slots=[1, 8])
    elif what == "generation":
        engine.daemon.words.store_release(engine.daemon.layout.flags_offset // 8 + hint.flag * 8, 12345)
    elif what == "state":
        engine.daemon.move(hint.flag, FlagState.FREE, 0)
    elif what == "count":
        engine.daemon.move(hint.flag, FlagState.READY, 3)
    else:
        engine.daemon.words.store_release(Line.HEAD, 1 << 40)
        for i in range(40):
            engine.add(f"more{i}", 3 * BLOCK)
    assert engine.match(request) == NOTHING
    assert len(engine.link.detached) == 1
    engine.allocate(request, 0)
    engine.step([(request, 3 * BLOCK)])
    engine.side.finished(request)
    assert engine.side.counters["detached"] == 1


def test_the_end_of_a_load_of_a_corrupt_epoch_leaves_the_next_one_alone() -> None:
    engine = Engine()
    request, other = engine.add("r", 3 * BLOCK), engine.add("other", 3 * BLOCK)
    engine.daemon.stage("r", 2)
    engine.take(request, 2 * BLOCK)
    meta = engine.step([(request, BLOCK)])
    for name in ("r", "other"):
        engine.daemon.words.store_release(engine.daemon.layout.flags_offset // 8 + engine.daemon.hint(name).flag * 8, 7)
    assert engine.match(other) == NOTHING
    engine.link.epoch = FakeDaemon(engine.clock, epoch=2).epoch()
    assert engine.match(other) == PENDING
    engine.acknowledge(meta)
    assert len(engine.link.detached) == 1
    assert engine.match(other) == PENDING


def test_memory_of_another_epoch_than_the_daemon_said_is_not_used() -> None:
    """Loads would name slots of the one, and workers have mapped the other."""
    daemon = FakeDaemon(Clock())
    layout = daemon.layout
    said = Attached(epoch=layout.epoch, segment_bytes=layout.total_bytes, slot_count=layout.slot_count, slot_bytes=0)
    for wrong in ({"epoch": layout.epoch + 1}, {"slot_count": layout.slot_count + 1}):
        with pytest.raises(SegmentCorrupt, match="segment is of another epoch: epoch, slot_count, device_slots="):
            SchedulerEpoch.map(said.model_copy(update=wrong), [os.dup(daemon.segment.fd), Doorbell.create().fd])
