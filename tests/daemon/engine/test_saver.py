"""The saver: jobs of bounded size, loads first, pauses while the store is full, and what it tells the engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from kvprefetch.daemon.engine import saver as module
from kvprefetch.daemon.engine.saver import LOADS_FIRST_NS, PAUSE_NS, RESET_SLACK_S, TRIES, Saver
from kvprefetch.daemon.engine.stored import StoredBefore
from kvprefetch.daemon.engine.transfers import SaveResult
from kvprefetch.daemon.telemetry.counters import Counters
from kvprefetch.shmring.wire.attach import Stored
from kvprefetch.shmring.wire.codec import MAX_MESSAGE_BYTES, encode_message
from kvprefetch.shmring.wire.records import ProtocolError, Saved


class Credits:
    """Collects what is granted."""

    def __init__(self) -> None:
        self.granted: list[int] = []

    def grant(self, slots: list[int]) -> None:
        self.granted += slots


class Setup:
    """A saver of eight slots whose store jobs end when the test says so."""

    def __init__(self, *, job_blocks: int = 3, slots: int = 8) -> None:
        self.now = 1
        self.loading = False
        self.jobs: list[tuple[list[tuple[bytes, int]], Callable[[Any], None]]] = []
        self.told: list[Stored] = []
        self.credits = Credits()
        nothing: Any = None
        credits: Any = self.credits
        self.lost: set[int] = set()
        shape: Any = SimpleNamespace(staging=SimpleNamespace(lost=self.lost))
        self.saver = Saver(
            nothing, shape, credits, range(slots), self.run, structlog.get_logger(), lambda: self.now,
            job_blocks=job_blocks, loading=lambda: self.loading, counters=Counters(), stored=lambda _: None,
        )  # fmt: skip
        self.credits.granted.clear()
        self.saver.tell = self.told.append

    def run(self, job: Any, done: Callable[[Any], None], failed: Any, overdue: Any = None) -> None:
        blocks = list(job.args[2]) if job.func is module.transfers.save else []  # a removal has none
        self.jobs.append((blocks, done))

    def save(self, count: int, save_id: int = 1) -> None:
        hashes = [bytes([save_id, slot % 256]) * 16 for slot in range(count)]
        self.saver.saved(Saved(save_id, 0, False, list(range(count)), hashes))

    def end(self, *, again: bool = False, disk: bool = False) -> list[int]:
        """End the running job; the slots it had."""
        blocks, done = self.jobs.pop()
        slots = [slot for _, slot in blocks]
        if again:
            done(SaveResult(0, 0, 0, blocks))
        else:
            media = ([], slots) if disk else (slots, [])
            done(SaveResult(len(blocks), 0, 0, [], *media, digests=[digest for digest, _ in blocks]))
        return slots


def test_a_long_save_that_is_not_stored_is_told_in_messages_that_fit() -> None:
    """A message that is cut off would end the engine's connection."""
    setup = Setup(slots=20_000)
    setup.saver.switch(saving=False)
    setup.save(20_000)
    assert [slot for told in setup.told for slot in told.lost] == list(range(20_000))
    assert max(len(encode_message(told)) for told in setup.told) <= MAX_MESSAGE_BYTES
    assert setup.saver.counters.lost_saves == 20_000


def test_slots_that_a_put_may_still_read_are_never_granted_again() -> None:
    setup = Setup()
    setup.save(8)
    setup.lost.update({1, 4})
    while setup.jobs:
        setup.end()
    assert setup.credits.granted == [0, 2, 3, 5, 6, 7]
    assert setup.saver.gauges() == {"save_slots": 8, "save_slots_busy": 0, "save_slots_lost": 2, "saves_queued": 0}
    setup.saver.switch(saving=False)
    setup.saver.switch(saving=True)
    assert len(setup.credits.granted) == 6


def test_a_long_save_is_put_in_parts_and_each_part_gives_its_slots_back() -> None:
    setup = Setup()
    setup.save(8)
    assert setup.end() == [0, 1, 2]
    assert setup.credits.granted == [0, 1, 2]
    assert setup.end(disk=True) == [3, 4, 5]
    assert setup.end() == [6, 7]
    assert setup.credits.granted == list(range(8))
    assert [(told.memory, told.disk, told.lost) for told in setup.told] == [
        ([0, 1, 2], [], []),
        ([], [3, 4, 5], []),
        ([6, 7], [], []),
    ]
    counters = setup.saver.counters
    assert (counters.saved_blocks, counters.present_blocks, counters.lost_saves) == (8, 0, 0)
    assert setup.saver.gauges() == {"save_slots": 8, "save_slots_busy": 0, "save_slots_lost": 0, "saves_queued": 0}


def test_what_is_stored_a_second_time_is_counted_unless_it_was_removed() -> None:
    setup = Setup()
    counters = setup.saver.counters
    setup.save(3)
    setup.end()
    setup.save(2)
    setup.end()
    setup.save(3, save_id=2)
    setup.end()
    assert (counters.saved_blocks, counters.saved_again_blocks) == (8, 2)
    setup.saver.reset(0, 1.0, lambda _: None)
    setup.jobs.pop()[1](True)
    setup.save(3)
    setup.end()
    assert (counters.saved_blocks, counters.saved_again_blocks) == (11, 2)


def test_what_was_stored_before_is_never_counted_too_high() -> None:
    before = StoredBefore(places=64)
    digests = [bytes([i, j]) * 16 for i in range(256) for j in range(4)]
    assert before.count(digests) == 0, "they take each other's places"
    assert before.count(digests[-8:]) > 0


def test_a_save_in_parts_has_one_line_when_its_last_part_has_ended() -> None:
    with capture_logs() as log:
        setup = Setup()
        setup.save(8)
        setup.end()
        setup.end(again=True)
        setup.now += PAUSE_NS[0]
        setup.saver.next()
        setup.end()
        assert log == []
        setup.end()
        setup.save(8, save_id=2)
        setup.saver.reset(1, 1.0, lambda ok: None)
        setup.end()
    assert [(line["save_id"], line["stored_blocks"], line["failed_blocks"], line["tries"]) for line in log] == [
        (1, 8, 0, 4),
        (2, 3, 5, 1),
    ]
    counters = setup.saver.counters
    assert (counters.saved_blocks, counters.lost_saves) == (8 + 3, 5)


def test_loads_go_first_but_not_for_ever() -> None:
    setup = Setup()
    setup.loading = True
    setup.save(6)
    assert setup.jobs == []
    setup.now += LOADS_FIRST_NS - 1
    setup.saver.next()
    assert setup.jobs == []
    setup.now += 1
    setup.saver.next()
    assert len(setup.jobs) == 1
    setup.end()
    assert setup.jobs == [], "the next part lets loads go first again"
    setup.loading = False
    setup.saver.next()
    assert len(setup.jobs) == 1


def test_a_full_store_is_asked_less_and_less_often_until_it_takes_something() -> None:
    """Also across saves: giving one up does not start the pauses over."""
    setup = Setup()
    setup.save(3)
    pauses = []
    for _ in range(TRIES):
        setup.end(again=True)
        begun = setup.now
        while not setup.jobs and setup.now < begun + 10 * PAUSE_NS[1]:
            setup.now += 10_000_000
            setup.saver.next()
            if setup.credits.granted:
                break
        pauses.append(setup.now - begun)
    assert pauses[:6] == [100_000_000, 200_000_000, 400_000_000, 800_000_000, 1_600_000_000, 2_000_000_000]
    assert setup.credits.granted == [0, 1, 2], "the slots come back in the end"
    assert setup.told[-1].lost == [0, 1, 2]
    setup.save(3, save_id=2)
    assert setup.jobs == [], "and the next save waits as well"
    setup.now += PAUSE_NS[1]
    setup.saver.next()
    setup.end()
    setup.save(3, save_id=3)
    assert len(setup.jobs) == 1, "once it took something, saving is as before"


def test_what_waited_behind_a_save_that_got_nothing_in_is_given_up_with_it() -> None:
    """Else a store that is gone keeps the slots of a long queue for minutes: each job would try anew."""
    setup = Setup()
    setup.save(8)
    for _ in range(TRIES):
        setup.end(again=True)
        setup.now += PAUSE_NS[1]
        setup.saver.next()
    assert setup.jobs == []
    assert sorted(setup.credits.granted) == list(range(8))
    assert setup.saver.counters.lost_saves == 8
    assert [told.lost for told in setup.told] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_save_of_old_weights_is_told_as_lost() -> None:
    setup = Setup(job_blocks=2)
    setup.save(4)
    setup.saver.reset(1, 1.0, lambda ok: None)
    assert [told.lost for told in setup.told] == [[2, 3]], "the part in flight ends first"
    setup.end()
    setup.told.clear()
    setup.save(2, save_id=2)  # copied before the engine heard of the reset
    assert [(told.save_id, told.lost) for told in setup.told] == [(2, [0, 1])]
    assert (setup.saver.counters.saved_blocks, setup.saver.counters.lost_saves) == (2, 4)


def test_a_reset_removes_once_the_put_in_flight_has_returned_and_tells_what_came_of_it() -> None:
    """Saves go on behind it, and a removal that runs does not answer for a later reset."""
    setup = Setup()
    replies: list[tuple[int, bool]] = []

    def reset(generation: int) -> None:
        setup.saver.reset(generation, 1.0, lambda ok: replies.append((generation, ok)))

    setup.save(3)
    reset(1)
    assert len(setup.jobs) == 1, "the put"
    assert setup.saver.resetting
    setup.end()
    assert [blocks for blocks, _ in setup.jobs] == [[]], "the first removal"
    reset(2)
    setup.saver.saved(Saved(2, 2, False, [3], [b"\3" * 32]))
    setup.jobs.pop()[1](True)
    assert replies == [(1, True)]
    assert [blocks for blocks, _ in setup.jobs] == [[]], "the second one"
    setup.jobs.pop()[1](False)
    assert replies == [(1, True), (2, False)]
    assert not setup.saver.resetting
    assert setup.end() == [3], "the save of the new weights"


@pytest.mark.parametrize("removing", [False, True])
def test_of_resets_that_wait_only_the_newest_is_kept_and_it_answers_for_all(removing: bool) -> None:
    """However many an engine sends, while a put or a removal is under way: one more removal, one answer."""
    setup = Setup()
    replies: list[tuple[int, bool]] = []

    def reset(generation: int) -> None:
        setup.saver.reset(generation, 1.0, lambda ok: replies.append((generation, ok)))

    if removing:
        reset(1)
    else:
        setup.save(1)
    for generation in range(2, 1000):
        reset(generation)
    assert len(setup.jobs) == 1
    setup.jobs.pop()[1](True if removing else SaveResult(1, 0, 0, []))
    assert len(setup.jobs) == 1, "one removal"
    setup.jobs.pop()[1](True)
    assert setup.jobs == []
    assert replies == [*([(1, True)] if removing else []), (999, True)]
    assert not setup.saver.resetting


def test_a_reset_while_nothing_is_saved_removes_at_once() -> None:
    setup = Setup()
    replies: list[bool] = []
    setup.saver.reset(1, 1.0, replies.append)
    setup.jobs.pop()[1](True)
    assert replies == [True]


def test_a_reset_whose_time_is_up_is_not_confirmed_whatever_comes_of_it() -> None:
    setup = Setup()
    replies: list[bool] = []
    setup.save(1)
    setup.saver.reset(1, 1.0, replies.append)
    setup.now += int((1.0 + RESET_SLACK_S) * 1e9) - 1
    setup.saver.next()
    assert replies == []
    setup.now += 1
    setup.saver.next()
    assert replies == [False]
    setup.end()
    setup.jobs.pop()[1](True)
    assert replies == [False]
    assert not setup.saver.resetting


def test_nothing_of_a_full_store_is_tried_again_after_a_reset() -> None:
    """It would bring a key back that was removed."""
    setup = Setup()
    setup.save(2)
    setup.saver.reset(1, 1.0, lambda ok: None)
    setup.end(again=True)
    assert setup.credits.granted == [0, 1]
    assert setup.told[-1].lost == [0, 1]
    setup.jobs.pop()[1](True)
    setup.now += 10 * PAUSE_NS[1]
    setup.saver.next()
    assert setup.jobs == []


def test_slots_that_come_back_while_saving_is_off_are_granted_when_it_is_on_again() -> None:
    setup = Setup()
    setup.save(2)
    setup.saver.switch(False)
    setup.end()
    setup.saver.saved(Saved(2, 0, False, [2], [b"\2" * 32]))
    assert setup.credits.granted == []
    assert setup.jobs == []
    assert setup.told[-1].lost == [2]
    assert setup.saver.gauges()["save_slots_busy"] == 3
    setup.saver.switch(True)
    assert setup.credits.granted == [0, 1, 2]
    setup.save(3, save_id=3)
    assert setup.end() == [0, 1, 2]


def test_what_found_no_space_is_not_tried_again_once_saving_is_off() -> None:
    """The namespace may be another's by then."""
    setup = Setup()
    setup.save(2)
    setup.saver.switch(False)
    setup.end(again=True)
    setup.now += PAUSE_NS[1]
    setup.saver.next()
    assert setup.jobs == []
    assert setup.told[-1].lost == [0, 1]


@pytest.mark.parametrize("slots", [[0, 0], [0, 8], [3]])
def test_slots_that_are_not_out_are_refused_and_nothing_is_put(slots: list[int]) -> None:
    setup = Setup()
    setup.saver.saved(Saved(1, 0, False, [3], [b"\3" * 32]))
    with pytest.raises(ProtocolError, match="slots were not granted"):
        setup.saver.saved(Saved(2, 0, False, slots, [bytes([slot]) * 32 for slot in slots]))
    assert setup.end() == [3]
    assert setup.jobs == []


def test_without_kv_events_the_store_is_not_asked_for_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(module.transfers, "save", lambda *args, locate: asked.append(locate))
    for tell in (None, lambda stored: None):
        setup = Setup()
        setup.saver.tell = tell
        ran: list[Any] = []
        monkeypatch.setattr(setup.saver, "_run", lambda job, *_, ran=ran: ran.append(job()))
        setup.save(1)
        assert len(ran) == 1
    assert asked == [False, True]
