"""One engine's epoch on its own: what its records do, corrupt memory, memory that the store refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvprefetch.daemon.engine.channel import ADOPTED_WITHIN_NS
from kvprefetch.daemon.planning.planner import Planner
from kvprefetch.daemon.planning.requests import TakenBack
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.errors import StoreError
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.kv.prompts import Prompt
from kvprefetch.shmring.flags import FlagTable, pack
from kvprefetch.shmring.wire.records import FlagState, Outcome
from tests.daemon.engine.epochs import SECOND_NS, Engine, block, give_back, later_weights, make_epoch
from tests.support.catalogue import EVENTS
from tests.support.engine_side import ONE_GROUP, EngineSide, Key


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(make_epoch())
    yield engine
    engine.leave()


def test_the_line_of_an_engine_that_left_has_each_counter_and_gauge(engine: Engine) -> None:
    assert engine.epoch.numbers().keys() == EVENTS["engine.detached"].fields.keys()


def test_what_is_taken_back_is_pending_in_the_same_use_of_its_flag(engine: Engine) -> None:
    epoch = engine.epoch
    engine.stage((0, 1), *"abcdefgh")
    engine.stage((1, 1), *"stuvwxyz")
    assert epoch.channel.table.flag(0) == (1, FlagState.READY, 8)
    assert epoch.channel.table.flag(1) == (1, FlagState.HINTED, 4), "there are twelve slots"
    engine.ask((1, 1))
    assert epoch.planner.next_order() is not None
    assert epoch.channel.table.flag(0) == (1, FlagState.HINTED, 0)
    assert list(epoch.planner.holdings.changes) == [TakenBack(epoch.planner.requests[0, 1])]
    epoch.planner.holdings.changes.clear()
    engine.put((0, 1), FlagState.CLAIMED)
    assert not epoch.channel.take_back((0, 1)), "never under a claim"
    assert not epoch.channel.take_back((0, 2)), "nor in another use"


def test_a_block_from_disk_that_is_fetched_again_and_again_counts_once_for_the_engine(engine: Engine) -> None:
    """A long prompt that is taken back often would come to more than the word holds, and end the daemon."""
    epoch = engine.epoch
    for others in range(1, 4):  # each is more urgent than the first, takes its room, and ends
        if others == 1:
            engine.stage((0, 1), *"abcdefgh", on_disk=True)
        assert epoch.channel.table.disk(0) == 8
        engine.stage((1, others), *"stuvwxyz", asked=True)
        assert epoch.channel.table.flag(0).state == FlagState.HINTED
        engine.loaded((1, others), range(8))
        engine.fetch()
    assert epoch.channel.table.flag(0) == (1, FlagState.READY, 8)
    assert epoch.planner.requests[0, 1].disk_blocks > 8, "for the trace every byte counts"
    assert epoch.channel.table.disk(0) == 8


def test_asking_again_and_again_for_a_request_is_heard_once(engine: Engine) -> None:
    """The queue of look-ups has an entry for each time: an engine that does wrong would fill the daemon's memory."""
    epoch = engine.epoch
    for flag in range(2):  # the first one's question is under way, the second waits
        engine.hint([bytes([flag]) * 32], key=(flag, 1))
    for _ in range(100):
        engine.ask((1, 1))
    assert len(epoch.parts.look_ups.queue) == 2


def test_a_flag_given_up_before_its_record_came_is_remembered_no_longer_than_its_request(engine: Engine) -> None:
    epoch = engine.epoch
    engine.stage((0, 1), "a")
    engine.put((0, 1), FlagState.RELEASED, 1)
    epoch.tick(1)
    engine.done((0, 1), loaded=1)
    epoch.tick(1)
    assert epoch.channel.orphans() == set()


def test_a_record_that_comes_a_look_behind_its_flag_says_how_the_request_ended(engine: Engine) -> None:
    """The engine gives the flag up first, and pushes the record then."""
    epoch = engine.epoch
    engine.stage((0, 1), "a")
    engine.put((0, 1), FlagState.RELEASED, 1)
    assert epoch.channel.orphans() == set(), "at the first look"
    assert (0, 1) in epoch.planner.requests
    engine.done((0, 1), loaded=1)
    assert epoch.counters["requests"] == 1
    assert [line["outcome"] for _, line in epoch.parts.recent] == ["loaded"]


def test_the_slots_of_a_request_move_in_its_own_use_of_the_flag_alone(engine: Engine) -> None:
    channel = engine.epoch.channel
    engine.stage((0, 1), "a")
    assert channel.move((0, 1), [(0, 5)])
    engine.put((0, 2), FlagState.READY, 1)
    assert not channel.move((0, 1), [(0, 6)])
    assert list(channel.table.read_slots(0, 0, 1)) == [5]
    engine.put((0, 1), FlagState.READY, 1)


def test_a_flag_used_again_too_early_leaves_its_request_the_slot_table() -> None:
    """Else what arrives for the first request would be written behind the end of the second one's table."""
    epoch = make_epoch(max_blocks=300)
    engine = Engine(epoch)
    engine.hint([b"%032d" % i for i in range(300)], key=(0, 1), pages=[0, 1])
    engine.hint([bytes(32)], key=(0, 2), pages=[5])
    assert epoch.counters["bad_records"] == 1
    assert epoch.channel.table.lent(0) == (0, 1)
    engine.looked_up((0, 1))
    engine.fetch()
    engine.leave()


@pytest.mark.parametrize("pages", [[0, 2], [2, 2], [2, 2048], [2, (1 << 32) - 1]])
def test_a_request_gets_no_page_of_another_nor_one_twice_nor_one_beyond_the_last(pages: list[int]) -> None:
    """Else the blocks of its requests, and the daemon's memory for them, would have no bound."""
    epoch = make_epoch(max_blocks=300)
    engine = Engine(epoch)
    assert epoch.memory.layout.page_count == 2048

    def push(key: Key, pages: list[int]) -> int:
        engine.hint([b"%032d" % i for i in range(300)], key=key, pages=pages)
        return len(epoch.planner.requests)

    assert push((0, 1), [0, 1]) == 1
    assert push((1, 1), pages) == 1
    assert epoch.counters["bad_records"] == 1
    engine.loaded((0, 1), range(0))
    assert push((1, 2), [1, 0]) == 1
    epoch.reset(later_weights())
    assert push((2, 1), [0, 1]) == 1, "an expired request has no pages"
    assert epoch.counters["bad_records"] == 1
    engine.leave()


def test_records_are_handled_until_a_time_and_one_in_any_case() -> None:
    """Each costs what the engine makes it cost, so that a number of them bounds nothing."""
    now = [0]

    class Clocked(Planner):
        def hint(self, *args: Any, **options: Any) -> Any:
            now[0] += 10
            return super().hint(*args, **options)

    epoch = make_epoch(clock_ns=lambda: now[0])
    epoch.planner.__class__ = Clocked
    engine = EngineSide()
    engine.open(epoch.memory.control.buffer)
    for number in range(8):
        engine.hint([b"x" * 32], key=(number, 1))
    assert epoch.drain(35) == 4
    assert epoch.drain(35) == 1
    assert epoch.drain(1000) == 3
    engine.release()
    epoch.end(Ending.ENGINE_GONE)
    give_back(epoch)


class Restless(FlagTable):
    """A flag that another writer always changes in between."""

    def exchange(self, *_: Any) -> bool:
        return False


@pytest.mark.parametrize("reset", [False, True])
def test_a_flag_that_does_not_stand_still_ends_the_epoch_and_raises_nothing(reset: bool) -> None:
    """Nor in a reset, which comes over the control socket: that knows nothing of flags."""
    epoch = make_epoch()
    prompt = Prompt(ONE_GROUP, b"x" * 32, range(1), room=0, staged=lambda _: False)
    request = epoch.planner.hint((0, 1), prompt, 0)
    assert epoch.channel.table.exchange(0, epoch.channel.table.load(0), pack(1, FlagState.HINTED, 0))
    epoch.channel.table.__class__ = Restless
    epoch.tick(1)
    assert epoch.corrupt is None, "nothing to do yet"
    if reset:
        epoch.reset(later_weights())
    else:
        epoch.planner.holdings.show_nothing(request)
        epoch.switch("on")
    assert epoch.corrupt is not None
    assert "does not stand still" in epoch.corrupt
    assert epoch.drain(1) == 0
    assert not epoch.start_fetch(Lane.MEMORY)
    epoch.end(Ending.ENGINE_GONE)
    give_back(epoch)


def test_a_store_that_does_not_let_go_of_the_memory_keeps_no_epoch_open() -> None:
    """The engine may leave while the store is away: that must not end the loop. The memory is kept until it lets go."""

    class Stubborn:
        away = True

        def register(self, *_: Any) -> None: ...

        def unregister(self, *_: Any) -> None:
            if self.away:
                raise StoreError("unregistering failed with code -1")

    store: Any = Stubborn()
    epoch = make_epoch(store)
    epoch.memory.staging.register(store)
    epoch.end(Ending.ENGINE_GONE)
    epoch.close()
    assert not epoch.memory.close()
    assert epoch.memory.staging.held == "unregistering failed with code -1"
    store.away = False
    assert epoch.memory.close()


def test_a_done_of_a_flag_that_is_still_claimed_changes_nothing() -> None:
    """The engine may read its slots until it gives the flag up."""
    epoch = make_epoch()
    engine = Engine(epoch)
    key = (0, 1)
    engine.stage(key, "a", "b")
    engine.put(key, FlagState.CLAIMED, 2)
    engine.done(key, loaded=2)
    assert key in epoch.planner.requests
    assert epoch.gauges()["blocks_pinned"] == 2
    engine.loaded(key, range(2))
    assert epoch.gauges()["blocks_pinned"] == 0
    engine.leave()


def test_bad_values_of_older_weights_are_no_misses() -> None:
    epoch = make_epoch(clock_ns=lambda: 5)
    engine = Engine(epoch)
    epoch.parts.bad_values.add(block("a"), 4, asked_ns=3)
    epoch.reset(later_weights())
    assert epoch.parts.bad_values.known([block("a")], 6) == []
    engine.leave()


def test_an_early_hint_ends_by_the_daemons_own_deadline_unless_the_scheduler_has_its_request(engine: Engine) -> None:
    """vLLM may reject a request, or never come to it; the engine may never say so."""
    epoch = engine.epoch
    for flag in range(4):
        engine.hint([bytes([flag]) * 32], key=(flag, 1), early=flag > 0)
        engine.looked_up((flag, 1))
    engine.fetch()
    since_ns = time.monotonic_ns()
    engine.adopted(2, since_ns)
    engine.put((3, 1), FlagState.CLAIMED, 1)
    epoch.tick(since_ns + ADOPTED_WITHIN_NS - SECOND_NS)
    assert len(epoch.planner.requests) == 4
    epoch.tick(since_ns + ADOPTED_WITHIN_NS + SECOND_NS)
    assert set(epoch.planner.requests) == {(0, 1), (2, 1), (3, 1)}
    assert epoch.channel.table.flag(1) == (1, FlagState.EXPIRED, 0)
    assert [line["outcome"] for _, line in epoch.parts.recent] == ["forsaken"]
    engine.put((2, 1), FlagState.CANCELLED)
    engine.done((2, 1), Outcome.ABORTED)
    assert [line["adopted_ms"] is None for _, line in epoch.parts.recent] == [True, False]
    engine.put((1, 1), FlagState.FREE)  # the engine sees it, and uses the flag and its page again
    engine.hint([bytes([7]) * 32], key=(1, 2), early=True)
    assert (1, 2) in epoch.planner.requests
