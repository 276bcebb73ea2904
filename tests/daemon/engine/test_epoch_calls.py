"""Calls of an epoch: what it starts, and what of their outcome it counts, remembers and sends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvprefetch.daemon.engine import lookups
from kvprefetch.daemon.engine.transfers import Found
from kvprefetch.daemon.planning.bad_values import BAD_NS
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.work.call_size import CALL_NS
from kvprefetch.daemon.work.calls import FETCHES, Call, CallKind
from kvprefetch.shmring.wire.admin import AnnounceStep
from kvprefetch.shmring.wire.attach import ResetDone, Stored
from kvprefetch.shmring.wire.codec import Message
from kvprefetch.shmring.wire.records import FlagState, RecordKind, Saved, encode_saved
from tests.daemon.engine.epochs import (
    SECOND_NS,
    Answering,
    Engine,
    Pools,
    announced,
    block,
    digest,
    later_weights,
    make_epoch,
)
from tests.support.telemetry import sample

BLOCK_BYTES = 4096


class Setup(Engine):
    """An epoch, its engine, and a clock that stands still; a call ends when the test says so."""

    def __init__(self, store: Any = None, *, events: bool = False, chunk_blocks: int = 12) -> None:
        self.now, self.pools = SECOND_NS, Pools()
        self.sent: list[Message] = []
        own: Any = {"chunk_blocks": chunk_blocks, "events": events}
        super().__init__(make_epoch(store, self.pools, lambda: self.now, **own))
        self.epoch.parts.send = self.sent.append
        self.calls = self.pools.calls

    def start(self, lane: Lane = Lane.MEMORY) -> Call:
        """The fetch that this starts."""
        assert self.epoch.start_fetch(lane)
        assert self.calls[-1].kind is FETCHES[lane]
        return self.calls[-1]

    def fetched(self, *outcome: ErrorClass) -> None:
        """Start a fetch, which ends so."""
        self.start()
        self.pools.end(list(outcome))

    def known(self, name: str) -> bool:
        """Whether the value of this block is known to be bad now."""
        return self.epoch.parts.bad_values.known([block(name)], self.now) == [0]


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.leave()


OK, MISS, AGAIN = ErrorClass.OK, ErrorClass.MISS, ErrorClass.LOOKUP_AGAIN


def test_what_a_fetch_brought_and_missed_is_counted_by_its_lane(setup: Setup) -> None:
    setup.want((0, 1), "a", "b", "c")
    setup.want((1, 1), "x", "y", on_disk=True)
    requests = list(setup.epoch.planner.requests.values())
    for lane, outcome in ((Lane.MEMORY, [OK, OK, MISS]), (Lane.DISK, [OK, MISS])):
        setup.start(lane)
        assert not setup.epoch.start_fetch(lane), "nothing else is wanted"
        setup.now += 20_000_000
        setup.pools.end(outcome)
    counters = setup.epoch.counters
    assert counters.fetched_blocks == 3
    counters.publish()
    metrics = counters.metrics
    assert metrics.totals("fetched_bytes") == {"memory": 2 * BLOCK_BYTES, "disk": BLOCK_BYTES}
    assert metrics.totals("failed_blocks") == {"memory": 1, "disk": 1}
    assert [sample(metrics, "fetch_seconds_sum", medium=medium) for medium in ("memory", "disk")] == [0.02, 0.02]
    assert [request.fetched_blocks for request in requests] == [2, 1]


@pytest.mark.parametrize(("lane", "left"), [(Lane.MEMORY, 1), (Lane.DISK, 0)])
def test_after_a_slow_fetch_the_next_one_from_memory_is_smaller_and_one_from_a_disk_is_not(
    setup: Setup, lane: Lane, left: int
) -> None:
    """A disk may have a delay for each call, which many small calls would multiply."""
    meter = setup.pools.rates.fetches[lane]
    setup.want((0, 1), "a", "b", on_disk=lane is Lane.DISK)
    setup.start(lane)
    meter.began(setup.now)
    setup.now += 2 * CALL_NS
    meter.ended(setup.now)
    setup.pools.end([OK, OK])
    setup.want((1, 1), "c", "d", on_disk=lane is Lane.DISK)
    setup.start(lane)
    assert setup.epoch.gauges()["leases"] == left


def test_few_blocks_are_fetched_before_many_once_the_pace_is_known(setup: Setup) -> None:
    """A fetch of 2 s for one block: the eight that came first would take 16 s."""
    meter = setup.pools.rates.fetches[Lane.MEMORY]
    setup.want((0, 1), "z")
    setup.start()
    meter.began(setup.now)
    setup.now += 2 * SECOND_NS
    meter.ended(setup.now)
    setup.pools.end([OK])
    for flag, names in enumerate(("abcdefgh", "i"), 1):
        setup.hint([digest(name) for name in names], key=(flag, 1))
    setup.epoch.drain(8)
    setup.pools.end([Found(b"\1", b"\0")])  # for the first one, whose look-up was out
    setup.pools.end([Found(b"\1" * 8, b"\0" * 8), Found(b"\1", b"\0")])
    run: Any = setup.start().run
    assert run.args[2][0][0] == block("i")


@pytest.mark.parametrize("too_late", [False, True])
def test_calls_of_a_stopped_fetch_that_have_not_begun_are_dropped(too_late: bool) -> None:
    """They fail nothing and are no misses; one that begins as it is dropped brings its blocks for the engine."""
    setup = Setup(chunk_blocks=2)
    epoch, counters = setup.epoch, setup.epoch.counters
    setup.want((0, 1), *"abcdef")
    calls: list[Any] = [setup.start() for _ in range(3)]
    gets = [call.run.keywords["get"] for call in calls]
    gets[0].begun = True
    setup.ask((0, 1), stop=True)
    assert not epoch.planner.requests[0, 1].asked, "that is another record"
    assert [get.dropped for get in gets] == [False, True, True]
    gets[1].begun = too_late
    for call, outcome in zip(reversed(calls), (AGAIN, OK if too_late else AGAIN, OK), strict=True):
        assert epoch.channel.table.flag(0).state == FlagState.HINTED
        setup.calls.remove(call)
        call.finish([outcome] * 2)
    good = 4 if too_late else 2
    assert epoch.channel.table.flag(0) == (1, FlagState.READY, good)
    assert (counters.fetched_blocks, counters["failed_blocks"]) == (good, 0)
    assert sample(counters.metrics, "fetch_seconds_count", medium="memory") == good // 2
    assert not any(setup.known(name) for name in "cdef")
    setup.want((1, 1), "e")
    setup.start()
    setup.leave()


def test_a_call_that_begins_as_it_is_dropped_and_fails_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody hears otherwise that its slots are lost."""
    setup = Setup(chunk_blocks=2)
    setup.want((0, 1), *"ab")
    call: Any = setup.start()
    setup.ask((0, 1), stop=True)
    call.run.keywords["get"].begun = True
    setup.calls.remove(call)
    call.finish([ErrorClass.UNDER_WAY] * 2)
    assert "slots.quarantined" in capsys.readouterr().out
    assert setup.epoch.counters["failed_blocks"] == 2
    setup.leave()


def test_calls_of_a_stopped_fetch_before_one_that_has_begun_go_on() -> None:
    setup = Setup(chunk_blocks=2)
    setup.want((0, 1), *"abcd")
    calls: list[Any] = [setup.start(), setup.start()]
    calls[1].run.keywords["get"].begun = True  # its values lie on another node
    setup.ask((0, 1), stop=True)
    assert not calls[0].run.keywords["get"].dropped
    setup.leave()


def test_a_bad_value_is_left_alone_for_a_while(setup: Setup) -> None:
    """Docs: a foreign, corrupt or hanging object 30 s; a miss may be there at the next question."""
    setup.want((0, 1), *"mfct")
    setup.fetched(MISS, ErrorClass.FOREIGN, ErrorClass.CORRUPT, ErrorClass.TRANSIENT)
    setup.now += BAD_NS - 1
    assert [setup.known(name) for name in "mfct"] == [False, True, True, False]
    setup.now += 1
    assert not any(setup.known(name) for name in "mfct")


def test_a_fetch_past_its_deadline_is_a_bad_value_until_it_arrives_after_all(setup: Setup) -> None:
    setup.want((0, 1), "a", "b")
    setup.start().give_up()
    assert setup.epoch.gauges()["slots_stuck"] == 2
    assert setup.known("a")
    assert setup.known("b")
    setup.pools.end([OK, ErrorClass.TRANSIENT])
    assert not setup.known("a")
    assert setup.known("b")
    assert setup.epoch.gauges()["slots_stuck"] == 0


def test_a_fetch_that_raises_fails_its_own_blocks_only(setup: Setup) -> None:
    setup.want((0, 1), "a", "b")
    setup.start()
    setup.pools.end(RuntimeError("planted"))
    setup.epoch.counters.publish()
    assert setup.epoch.counters.metrics.totals("failed_blocks") == {"memory": 2, "disk": 0}
    assert setup.epoch.gauges()["orders"] == 0
    setup.want((1, 1), "c")
    setup.start()


def test_what_is_announced_needs_room_too_and_its_request_finds_it(setup: Setup) -> None:
    told: list[AnnounceStep] = []
    setup.epoch.announce(announced("a"), digest("a"), told.append)
    assert setup.calls[-1].kind is CallKind.LOOK_UP
    setup.pools.end([Found(b"\1", b"\0")])
    setup.pools.room = False
    assert not setup.epoch.start_fetch(Lane.MEMORY, ahead=True)
    setup.want((0, 1), "b")
    assert not setup.epoch.start_fetch(Lane.MEMORY)
    looking_up = len(setup.calls)
    setup.pools.room = True
    setup.start()
    assert setup.epoch.start_fetch(Lane.MEMORY, ahead=True)
    assert [call.kind for call in setup.calls[looking_up:]] == [CallKind.FETCH_MEMORY] * 2
    setup.pools.end([OK])
    setup.epoch.drain(0)
    assert [(each.outcome, each.fetched) for each in told] == [("accepted", 0), ("completed", 1)]
    setup.want((1, 1), "a")
    assert len(told) == 2, "the request goes first"
    setup.epoch.drain(0)
    assert (told[-1].outcome, told[-1].last) == ("used", True)
    setup.epoch.counters.publish()
    assert setup.epoch.counters.metrics.totals("announced_blocks")["fetched"] == 1
    assert setup.epoch.counters.metrics.totals("announcements")["used"] == 1


@pytest.mark.parametrize("events", [False, True])
def test_only_with_kv_events_is_the_store_asked_for_media_and_the_engine_told(events: bool) -> None:
    asked: list[str] = []

    def media(keys: list[str]) -> list[str]:
        asked.extend(keys)
        return ["disk"] * len(keys)

    store = Answering(
        exist=lambda keys: [False] * len(keys),
        media=media,
        put_from=lambda keys, *_: [OK] * len(keys),
    )
    setup = Setup(store, events=events)
    setup.push(RecordKind.SAVED, encode_saved(Saved(5, 0, False, [12], [block("a")])))
    assert setup.epoch.start_save()
    put = setup.calls[-1]
    assert put.kind is CallKind.SAVE
    setup.pools.end(put.run())
    assert setup.epoch.counters["saved_blocks"] == 1
    assert setup.sent == ([Stored(save_id=5, memory=[], disk=[12], failed=[])] if events else [])
    assert len(asked) == events
    setup.leave()


def test_a_reset_is_answered_at_once_and_no_later_call_names_an_older_key() -> None:
    """Whatever is under way: a put, a fetch and a look-up go on with the keys that they began with."""
    asked: list[str] = []
    store = Answering(
        exist=lambda keys: asked.extend(keys) or [False] * len(keys),
        put_from=lambda keys, *_: asked.extend(keys) or [OK] * len(keys),
    )
    setup = Setup(store)
    setup.push(RecordKind.SAVED, encode_saved(Saved(1, 0, False, [12], [block("a")])))
    assert setup.epoch.start_save()
    setup.want((0, 1), "a")
    setup.epoch.reset(later_weights(3))
    assert setup.sent == [ResetDone(reset_generation=3)]
    for call in list(setup.calls):
        setup.pools.calls.remove(call)
        call.finish(call.run())
    assert {key.count("@g:") for key in asked} == {0}
    asked.clear()
    setup.want((1, 1), "a")
    setup.pools.end(setup.calls[-1].run())
    setup.push(RecordKind.SAVED, encode_saved(Saved(2, 3, False, [12], [block("a")])))
    assert setup.epoch.start_save()
    setup.pools.end(setup.calls[-1].run())
    assert len(asked) == 3
    assert all(key.endswith(f"@g:{3:032x}@{digest('a').hex()}") for key in asked)
    setup.leave()


def test_a_look_up_past_its_deadline_makes_a_miss_and_the_store_suspect() -> None:
    suspected: list[str] = []
    setup = Setup(Answering(suspect=suspected.append))
    setup.want((0, 1), "a")
    [call] = setup.calls
    call.give_up()
    assert suspected == ["look_up"]
    setup.pools.end([Found(b"\1", b"\0")])
    setup.leave()


def test_another_mode_refuses_what_waits_for_its_request(setup: Setup) -> None:
    told: list[AnnounceStep] = []
    setup.epoch.announce(announced("a"), digest("a"), told.append)
    setup.epoch.switch("shadow")
    setup.epoch.drain(0)
    assert (told[-1].outcome, told[-1].reason) == ("rejected", "nothing is staged for this engine now: mode=shadow")


def test_what_is_left_as_the_store_goes_away_is_answered_in_the_next_turns_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup(store := Answering())
    monkeypatch.setattr(lookups, "GIVE_UP_NAMES", 1)
    for number in range(4):
        setup.hint([digest(str(number))], key=(number, 1))
    assert not setup.epoch.owes
    store.answering = False
    setup.pools.end(RuntimeError("away"))
    turns = 0
    while setup.epoch.owes:
        assert setup.epoch.parts.look_ups.waiting
        setup.epoch.drain(0)
        turns += 1
    assert turns == 2, "the first one had its question, and the second one was answered with it"
    assert not setup.epoch.parts.look_ups.waiting
    setup.leave()
