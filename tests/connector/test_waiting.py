"""A request at the head of the queue while its blocks are not there, against a fake daemon."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvprefetch.connector.request.claims import Claims
from kvprefetch.connector.request.request_state import QUEUED, RUNNING, SAVING, Pass
from kvprefetch.shmring.wire.records import FlagState, Outcome

from .fakes import BLOCK, MS, Engine, FakeDaemon, Request, fails_with
from .waiting import NOTHING, PENDING, measured, step, visits_until_decided


def test_a_fetch_that_does_not_come_is_given_up_and_cancelled() -> None:
    """40 blocks recompute in 64 ms: nothing for three quarters of that, and the request goes on without."""
    engine = measured()
    request = engine.add("r", 40 * BLOCK + 1)
    reply, visits = visits_until_decided(engine, request)
    assert reply == NOTHING
    assert 9 <= visits <= 12
    engine.daemon.drain()
    assert engine.daemon.flag("r").state == FlagState.CANCELLED
    assert [done.outcome for done in engine.daemon.dones][-1] == Outcome.RECOMPUTED
    assert engine.side.counters["recomputed"] == 1
    assert not any(ask.stop for ask in engine.daemon.asks), "what is not looked up has nothing under way"


def test_only_the_first_of_those_that_wait_is_judged() -> None:
    """A request behind it is not late; its time begins when no request before it waits any more, and ends as well."""
    engine = measured()
    first, second = (engine.add(name, 40 * BLOCK + 1) for name in ("first", "second"))
    for count in range(0, 40, 4):
        engine.daemon.stage("first", count, ready=False, found=40)
        assert (engine.match(first), engine.match(second)) == (PENDING, PENDING)
        step(engine)
    engine.daemon.stage("first", 40)
    assert engine.match(first)[0] == 40 * BLOCK
    engine.allocate(first, 40 * BLOCK)
    assert visits_until_decided(engine, second, most=50)[0] == NOTHING


def test_a_fetch_that_stops_half_way_gives_what_it_brought() -> None:
    engine = measured()
    request = engine.add("r", 40 * BLOCK + 1)
    assert engine.match(request) == PENDING
    step(engine)
    engine.daemon.stage("r", 20, ready=False, found=40)
    assert engine.match(request) == PENDING
    reply, visits = visits_until_decided(engine, request)
    assert reply == (20 * BLOCK, False)
    assert visits <= 12, "20 blocks recompute in 32 ms, and it waited half as long again"
    assert engine.side.counters["stopped"] == 1
    assert engine.daemon.flag("r") == (1, FlagState.CLAIMED, 20)
    assert engine.side.counters["cut_short"] == 1
    engine.allocate(request, 20 * BLOCK)
    assert len(engine.step([(request, 20 * BLOCK + 1)]).loads[0].slots) == 20


def test_another_request_s_blocks_are_no_silence_for_the_one_before_it() -> None:
    """They take turns on the link, and the second one's come first: a block each ms."""
    engine = measured()
    first, second = engine.add("first", 20 * BLOCK + 1), engine.add("second", 60 * BLOCK + 1)
    engine.daemon.look_up("first", 20)
    for count in range(10):
        engine.daemon.stage("second", 5 * count, ready=False, found=60)
        assert engine.match(first) == PENDING
        assert engine.match(second) == PENDING
        step(engine)
    assert engine.side.counters["stopped"] == 0, "45 ms; 20 blocks recompute in 32"
    reply, visits = visits_until_decided(engine, first)
    assert (reply, visits <= 16) == (NOTHING, True), "and it does not wait for the others for ever"


def test_what_the_store_holds_is_known_before_it_has_come() -> None:
    """Two blocks of forty are in the store: not worth a visit, although the prompt is long."""
    engine = measured()
    request, other = engine.add("r", 40 * BLOCK + 1), engine.add("other", 40 * BLOCK + 1)
    engine.daemon.flags.set_found(engine.daemon.hint("r").flag, 2)
    assert engine.match(request) == NOTHING
    assert engine.match(other) == PENDING, "not looked up yet: it may hold all"


@pytest.mark.parametrize("hint_on_arrival", [True, False])
def test_a_short_prompt_never_waits(hint_on_arrival: bool) -> None:
    """Two blocks recompute in 3 ms, a visit is 5 ms away; a hint that would come too late is not pushed."""
    engine = measured(hint_on_arrival=hint_on_arrival)
    request = engine.add("r", 2 * BLOCK + 1)
    assert engine.match(request) == NOTHING
    engine.allocate(request, 0)
    engine.daemon.drain()
    assert len([hint for hint in engine.daemon.hints if hint.request_id == "r"]) == hint_on_arrival


def test_new_hints_do_not_move_the_bound() -> None:
    """A daemon that restarts or ends hints again and again holds a request no longer than one that is slow."""
    engine = Engine(wait_timeout_ms=100)
    request = engine.add("r", 3 * BLOCK)
    assert engine.match(request) == PENDING
    engine.clock.advance_ms(60)
    engine.daemon.move(engine.daemon.hint("r").flag, FlagState.EXPIRED, 0)
    assert engine.match(request) == PENDING
    engine.clock.advance_ms(39)
    engine.link.epoch = FakeDaemon(engine.clock, epoch=2).epoch()
    assert engine.match(request) == PENDING
    engine.clock.advance_ms(1)
    assert engine.match(request) == NOTHING


def test_what_a_prefill_token_takes_is_measured_in_the_engines_steps_drafts_and_decodes_left_out() -> None:
    """0.5 ms a token."""
    engine = Engine(wait_policy="adaptive")
    request = engine.add("r", 2000)
    engine.allocate(request, 0)
    for _ in range(30):
        engine.step([(request, 1)], step_ms=5)
    computed = request.num_computed_tokens
    engine.step([(request, 2000 - computed)], step_ms=5 + 0.5 * (2000 - computed))
    cost_ns = engine.side.policy.cost_ns
    assert cost_ns(0, 10, 0.0) == pytest.approx(10 * BLOCK * 0.5 * MS)
    request.num_computed_tokens = 1999
    for _ in range(30):
        engine.step([(request, 5)], step_ms=50)  # one token and four drafts
        request.num_computed_tokens = 1999
    assert cost_ns(0, 10, 0.0) == pytest.approx(10 * BLOCK * 0.5 * MS)


def test_a_wait_begins_anew_when_local_blocks_are_lost() -> None:
    """All that was asked for came, and then the engine's step took long: that says nothing of the next fetch."""
    engine = measured()
    request = engine.add("r", 40 * BLOCK + 1, local=9 * BLOCK)
    assert engine.match(request, 9 * BLOCK) == PENDING
    engine.daemon.stage("r", 40)
    engine.clock.advance_ms(2000)
    engine.daemon.beat()
    assert engine.match(request, 5 * BLOCK) == PENDING
    assert engine.daemon.hint("r").local_blocks == 0
    assert engine.daemon.dones[-1].outcome == Outcome.LOCAL_GAP
    step(engine)
    engine.daemon.stage("r", 40)
    assert engine.match(request, 5 * BLOCK) == (35 * BLOCK, False)


# --- behind another request that waits ---------------------------------------------------------------------------


def waits_behind(local: int = 0) -> tuple[Engine, Request]:
    """A request that two passes deferred; in the third, the request before it waits already."""
    engine = measured()
    first, second = engine.add("first", 40 * BLOCK + 1), engine.add("second", 40 * BLOCK + 1, local=local * BLOCK)
    for _ in range(2):
        assert engine.match(first) == engine.match(second) == PENDING
        step(engine)
    assert engine.match(first) == PENDING
    return engine, second


def ready() -> None:
    engine, second = waits_behind()
    engine.daemon.stage("second", 40)
    assert engine.match(second) == (40 * BLOCK, False)


def all_local() -> None:
    engine, second = waits_behind()
    assert engine.match(second, 40 * BLOCK) == NOTHING


def evicted() -> None:
    engine, second = waits_behind(local=2)
    assert engine.match(second, BLOCK) == PENDING
    assert engine.daemon.hint("second").local_blocks == 0


def expired() -> None:
    engine, second = waits_behind()
    engine.daemon.move(engine.daemon.hint("second").flag, FlagState.EXPIRED, 0)
    assert engine.match(second) == PENDING
    assert len([hint for hint in engine.daemon.hints if hint.request_id == "second"]) == 1
    engine.daemon.drain()
    assert len([hint for hint in engine.daemon.hints if hint.request_id == "second"]) == 2


@pytest.mark.parametrize("check", [ready, all_local, evicted, expired])
def test_a_change_is_seen_behind_a_request_that_waits(
    check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_with(check, monkeypatch, Claims, "waits_behind", lambda *_: True)


def test_another_epoch_is_seen_behind_a_request_that_waits() -> None:
    engine, second = waits_behind()
    engine.link.epoch = None
    assert engine.match(second) == NOTHING


def test_a_wait_behind_another_is_charged_once_from_its_first_question_to_its_last() -> None:
    engine, second = waits_behind()
    counted = engine.side.counters["wait_ns"]
    assert engine.match(second) == PENDING
    assert engine.side.counters["wait_ns"] == counted, "it goes on"
    engine.clock.advance_ms(5)
    engine.daemon.stage("second", 40)
    assert engine.match(second) == (40 * BLOCK, False)
    assert engine.side.counters["wait_ns"] - counted == 15 * MS
    handle = engine.side.requests["second"].handle
    assert handle is not None
    assert handle.waited_ns == 15 * MS


# --- what a single request may ask for ---------------------------------------------------------------------------


def test_a_request_may_choose_its_own_policy_and_bound() -> None:
    engine = Engine(wait_policy="timeout", wait_timeout_ms=100)
    eager = engine.add("eager", 3 * BLOCK, kv_transfer_params={"kvprefetch": {"wait_policy": "best_effort"}})
    patient = engine.add("patient", 3 * BLOCK, kv_transfer_params={"kvprefetch": {"wait_timeout_ms": 200}})
    others = engine.add("others", 3 * BLOCK, kv_transfer_params={"do_remote_prefill": False})
    assert engine.match(eager) == NOTHING
    assert engine.match(patient) == engine.match(others) == PENDING
    engine.clock.advance_ms(150)
    assert engine.match(others) == NOTHING
    assert engine.match(patient) == PENDING
    engine.clock.advance_ms(50)
    assert engine.match(patient) == NOTHING


@pytest.mark.parametrize(
    ("wishes", "names"),
    [
        ({"wait_timeout_ms": -1}, ["wait_timeout_ms: should be 0 to 3600000: wait_timeout_ms=-1"]),
        ({"wait_policy": "best_effort", "mode": "off"}, ["mode", "'off'", "wait_policy, wait_timeout_ms"]),
        ("best_effort", ["kvprefetch", "'best_effort'", "object"]),
    ],
)
def test_a_bad_wish_is_one_warning_and_the_default(
    caplog: pytest.LogCaptureFixture, wishes: object, names: list[str]
) -> None:
    engine = Engine(wait_policy="timeout", wait_timeout_ms=100)
    request = engine.add("r-bad", 3 * BLOCK, kv_transfer_params={"kvprefetch": wishes})
    again = engine.add("again", 3 * BLOCK, kv_transfer_params={"kvprefetch": wishes})
    with caplog.at_level(logging.WARNING, logger="vllm.kvprefetch"):
        assert engine.match(request) == engine.match(request) == engine.match(again) == PENDING
    (record,) = caplog.records
    for name in ["r-bad", *names]:
        assert name in record.getMessage()
    assert engine.side.counters["bad_overrides"] == 2
    engine.clock.advance_ms(100)
    assert engine.match(request) == NOTHING


@pytest.mark.parametrize("policy", ["wait", "timeout"])
def test_a_request_that_waits_at_any_cost_makes_no_other_wait(policy: str) -> None:
    """Its client may say so: an adaptive request behind it is judged as if it were the first."""
    engine = measured()
    wishes = {"kvprefetch": {"wait_policy": policy, "wait_timeout_ms": 5000}}
    patient = engine.add("patient", 40 * BLOCK + 1, kv_transfer_params=wishes)
    behind = engine.add("behind", 40 * BLOCK + 1)
    for _ in range(15):
        assert engine.match(patient) == PENDING
        if (reply := engine.match(behind)) != PENDING:
            break
        step(engine)
    assert reply == NOTHING


# --- places in the batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("running", "reply"), [(14, NOTHING), (15, PENDING)])
def test_the_last_place_is_kept_for_a_pass_for_a_request_in_look_up(
    running: int, reply: tuple[int | None, bool]
) -> None:
    """Of 16 places: a request that has to wait for its look-up would get one when the next request ends."""
    engine = measured()
    engine.side.phases[RUNNING] |= dict.fromkeys(range(running - 1))  # type: ignore[arg-type]
    first, second, fetched = (engine.add(name, 40 * BLOCK + 1) for name in ("first", "second", "fetched"))
    engine.daemon.stage("second", 0)
    assert engine.match(first) == PENDING
    assert engine.match(second) == reply
    engine.side.claims.this_pass = Pass()
    assert engine.match(first) == PENDING
    assert engine.match(second) == NOTHING, "for one pass only"
    assert engine.side.counters["waits"] == 1, "the first one's: the other's was not its own"
    engine.side.claims.this_pass = Pass()
    engine.daemon.look_up("fetched", 40)
    assert engine.match(fetched) == PENDING
    third = engine.add("third", 40 * BLOCK + 1, staged=0)
    assert engine.match(third) == NOTHING, "a fetch may take long, and keeps no place"


def test_who_holds_a_place_is_known_in_a_step_without_it() -> None:
    """With pipeline stages the next step is planned while one is under way, and has others' tokens."""
    engine = measured()
    request = engine.admitted("one", BLOCK)
    engine.step([(request, BLOCK)])
    assert engine.side.requests["one"].phase >= SAVING
    engine.step([(engine.admitted("two", BLOCK), BLOCK)])
    assert all(state.phase >= SAVING for state in engine.side.requests.values())
    request.num_preemptions += 1
    engine.match(request)
    assert engine.side.requests["one"].phase == QUEUED


def test_a_request_that_is_asked_about_while_all_places_seem_taken_is_answered_as_any_other() -> None:
    """It was preempted, or another one has ended: vLLM asks only for a request that it has a place for."""
    engine = measured()
    engine.side.phases[RUNNING] |= dict.fromkeys(range(20))  # type: ignore[arg-type]
    staged, pending = (engine.add(name, 40 * BLOCK + 1) for name in ("staged", "pending"))
    engine.daemon.stage("staged", 40)
    assert engine.match(staged)[0] == 40 * BLOCK
    assert engine.match(pending) == PENDING
    assert engine.side.requests["pending"].wait is not None, "judged, and not made to give way"
