"""Hints that leave on vLLM's input thread: adopted with the request, or given back, whatever happens in between."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from kvprefetch.connector import examine
from kvprefetch.connector.engine import compat
from kvprefetch.connector.scheduler import early
from kvprefetch.connector.scheduler.early import ADOPTED_WITHIN_NS
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.wire.records import FlagState, Outcome

from .fakes import BLOCK, MS, Engine, FakeDaemon, Request
from .real import RealEngine

PENDING = (None, False)
SQL = LoRARequest("sql", 1, "/adapters/sql")
Make = Callable[..., RealEngine]


def come(engine: Engine, name: str, blocks: int = 4, *, local: int = 0, **fields: Any) -> Request:
    """A request comes to the engine core; the scheduler does not have it yet."""
    request = Request(name, blocks * BLOCK + 1)
    for field, value in fields.items():
        setattr(request, field, value)
    engine.cache.hits[name] = local * BLOCK
    engine.side.early.hint(request)
    return request


def outcomes(engine: Engine) -> list[Outcome]:
    engine.daemon.drain()
    return [done.outcome for done in engine.daemon.dones]


def test_the_hint_leaves_at_once_and_the_scheduler_adopts_it() -> None:
    engine = Engine()
    request = come(engine, "r", local=1)
    hint = engine.daemon.hint("r")
    assert (hint.early, hint.blocks, hint.local_blocks, hint.arrival_ns) == (True, 4, 1, engine.clock())
    assert engine.daemon.flags.adopted_ns(hint.flag) < hint.arrival_ns
    assert engine.side.counters["hints"] == 0, "counters are the scheduler's"
    engine.clock.advance_ms(20)
    engine.daemon.beat()
    engine.daemon.stage("r", 4)
    engine.side.arrived(request)
    assert engine.daemon.flags.adopted_ns(hint.flag) == hint.arrival_ns + 20 * MS
    assert engine.match(request) == (3 * BLOCK, False)
    engine.daemon.drain()
    assert len(engine.daemon.hints) == engine.side.counters["hints"] == 1
    assert engine.cache.looks == 0, "nor does the scheduler's thread look up what is local"
    engine.allocate(request, 3 * BLOCK)
    engine.step([(request, 1)])
    engine.side.finished(request)


@pytest.mark.parametrize("without", [{"hint_on_arrival": False}, {"loads": False}], ids=["on demand", "saves alone"])
def test_an_engine_whose_requests_are_not_hinted_at_arrival_hints_none_early(without: dict[str, Any]) -> None:
    """Although another engine of the process has vLLM hand requests over."""
    engine = Engine(**without)
    come(engine, "r")
    engine.daemon.drain()
    assert engine.daemon.hints == []
    assert engine.side.early.waiting == {}


def test_a_reset_in_between_voids_it_and_the_scheduler_hints_again() -> None:
    engine = Engine()
    request = come(engine, "r")
    old = engine.daemon.hint("r")
    engine.reset()
    engine.side.arrived(request)
    new = engine.daemon.hint("r")
    assert not new.early
    assert engine.daemon.flags.flag(old.flag).state == FlagState.CANCELLED
    assert outcomes(engine) == [Outcome.VOIDED]
    engine.side.finished(request)
    assert engine.daemon.unreturned() == []


def test_while_a_reset_is_not_confirmed_nothing_is_hinted_and_nothing_kept() -> None:
    engine = Engine()
    before = come(engine, "before")
    engine.link.confirms = False
    engine.reset()
    after = come(engine, "after")
    engine.side.arrived(before)
    engine.side.arrived(after)
    assert engine.side.early.waiting == {}
    assert outcomes(engine) == [Outcome.VOIDED]
    assert [each.request_id for each in engine.daemon.hints] == ["before"]
    assert engine.daemon.unreturned() == []


def test_a_hint_of_an_ended_epoch_is_not_touched() -> None:
    engine = Engine()
    request = come(engine, "r")
    first = engine.daemon
    engine.daemon = FakeDaemon(engine.clock, epoch=2)
    engine.link.epoch = engine.daemon.epoch()
    engine.side.arrived(request)
    assert first.flag("r").state == FlagState.HINTED, "its daemon has gone, or ends it"
    assert not engine.daemon.hint("r").early
    other = come(engine, "other")  # the input thread uses an epoch that the scheduler's has not seen
    engine.daemon = FakeDaemon(engine.clock, epoch=3)
    engine.link.epoch = engine.daemon.epoch()
    new = come(engine, "new")
    engine.side.arrived(new)
    engine.side.arrived(other)
    assert engine.daemon.hint("new").early
    assert not engine.daemon.hint("other").early


def test_one_whose_request_never_comes_is_given_back_in_time_and_others_are_not() -> None:
    engine = Engine()
    come(engine, "rejected")
    engine.clock.advance_ms(ADOPTED_WITHIN_NS // MS - 1)
    engine.daemon.beat()
    request = come(engine, "late")
    engine.clock.advance_ms(2)
    engine.step()
    assert engine.daemon.flag("rejected").state == FlagState.CANCELLED
    assert engine.daemon.flag("late").state == FlagState.HINTED
    assert outcomes(engine) == [Outcome.ABORTED]
    engine.side.arrived(request)
    engine.side.finished(request)
    assert engine.daemon.unreturned() == []


def test_one_that_the_daemon_has_ended_by_its_own_deadline_is_hinted_at_again() -> None:
    engine = Engine()
    request = come(engine, "r")
    engine.daemon.move(engine.daemon.hint("r").flag, FlagState.EXPIRED, 0)
    engine.side.arrived(request)
    assert engine.match(request) == PENDING
    assert not engine.daemon.hint("r").early
    come(engine, "gone")
    engine.daemon.move(flag := engine.daemon.hint("gone").flag, FlagState.EXPIRED, 0)
    engine.clock.advance_ms(ADOPTED_WITHIN_NS // MS + 1)
    engine.daemon.beat()
    engine.step()
    assert engine.daemon.flags.flag(flag).state == FlagState.FREE


def test_a_hint_that_comes_while_others_are_looked_at_ends_no_step() -> None:
    """Python may collect garbage, and so run another thread, wherever it makes an object."""
    engine = Engine()
    for number in range(4):
        come(engine, f"r{number}")
    late = iter(range(8))

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and (number := next(late, None)) is not None:
            come(engine, f"late{number}")

    before = gc.get_threshold()
    gc.callbacks.append(collected)
    try:
        for _ in range(8):  # the next object that Python makes
            gc.set_threshold(1)
            engine.side.early.forget(engine.link.epoch, engine.clock())
            gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    assert next(late, None) is None, "none came in between"


def test_an_id_that_is_used_again_has_a_hint_for_each_request() -> None:
    engine = Engine()
    first = come(engine, "r")
    flag = engine.daemon.hint("r").flag
    again = come(engine, "r", 6)
    engine.side.arrived(again)
    assert engine.side.requests["r"].usable == 6
    assert list(engine.side.early.waiting) == [first]
    engine.clock.advance_ms(ADOPTED_WITHIN_NS // MS + 1)
    engine.daemon.beat()
    engine.step()
    assert engine.daemon.flags.flag(flag).state == FlagState.CANCELLED
    assert engine.daemon.flag("r").state == FlagState.HINTED


@pytest.mark.parametrize(
    "fields",
    [
        {"resumable": True},
        {"prompt_is_token_ids": [True]},
        {"skip_reading_prefix_cache": True},
        {"lora_request": SQL},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_transfer_params": {"max_load_tokens": "many"}},
        {"kv_transfer_params": {"max_load_tokens": 0}},
        {"local": 4},
        {"blocks": 0},
    ],
    ids=str,
)
def test_what_only_the_scheduler_knows_is_left_to_it(fields: dict[str, Any]) -> None:
    engine = Engine()
    request = come(engine, "r", **fields)
    engine.daemon.drain()
    assert engine.daemon.hints == []
    engine.side.arrived(request)
    assert engine.side.early.waiting == {}


def test_an_adapter_that_was_read_is_hinted_early_by_its_content() -> None:
    engine = Engine(credits=range(8))
    engine.read(SQL, "a")
    request = come(engine, "r", lora_request=SQL)
    hint = engine.daemon.hint("r")
    engine.side.arrived(request)
    state = engine.side.requests["r"]
    assert (hint.early, hint.hashes) == (True, b"".join(state.digests or ()))
    assert state.digests != request.block_hashes
    engine.daemon.drain()
    assert len(engine.daemon.hints) == 1
    engine.admit(request)
    (save,) = engine.step([(request, 2 * BLOCK)]).saves
    assert len(save.slots) == 2, "what it computes has the names that were hinted"


@pytest.mark.parametrize("contents", ["b", "ba"], ids=["replaced", "replaced and back"])
def test_an_adapter_that_is_replaced_in_between_voids_the_hint(contents: str) -> None:
    """Its KV is not shared until a reset, as vLLM's own cache has blocks of both contents."""
    engine = Engine()
    engine.read(SQL, "a")
    request = come(engine, "r", lora_request=SQL)
    for content in contents:
        engine.read(SQL, content)
    come(engine, "after", lora_request=SQL)
    engine.side.arrived(request)
    assert outcomes(engine) == [Outcome.VOIDED]
    assert [each.request_id for each in engine.daemon.hints] == ["r"]
    assert engine.match(request) == (0, False)
    assert engine.daemon.unreturned() == []


def test_a_cap_counts_from_what_is_local() -> None:
    engine = Engine()
    come(engine, "r", 8, local=2, kv_transfer_params={"max_load_tokens": 3 * BLOCK})
    assert engine.daemon.hint("r").blocks == 5


def test_without_room_the_scheduler_drops_the_hint_and_counts_it_once() -> None:
    engine = Engine(ring=4096)
    for number in range(4):
        come(engine, f"fill{number}", 39)
    assert engine.side.counters["hints_dropped"] == 0
    request = come(engine, "lost", 39)
    engine.side.arrived(request)
    assert engine.side.counters["hints_dropped"] == 1


def test_memory_that_cannot_be_right_ends_the_epoch_on_the_schedulers_thread() -> None:
    engine = Engine(ring=4096)
    assert engine.link.epoch is not None
    while engine.link.epoch.producer.push(1, bytes(100)):
        pass
    engine.daemon.words.store_release(Line.HEAD, 1 << 50)
    with pytest.raises(SegmentCorrupt):  # the wrapped method of vLLM keeps it inside
        come(engine, "r")
    assert engine.link.detached == []
    engine.add("r", 4 * BLOCK + 1)
    assert len(engine.link.detached) == 1


# --- what is local ----------------------------------------------------------------------------------------------------


def test_what_the_engine_holds_is_found_without_its_scheduler(make: Make) -> None:
    engine = make(wait_policy="best_effort")
    prompt = list(range(20 * BLOCK + 5))
    engine.add("first", prompt)
    engine.run()
    for shared in (0, 1, 7, 19, 20):
        request = engine.request(f"r{shared}", prompt[: shared * BLOCK] + [1] * 30)
        most = len(request.block_hashes)
        assert engine.side.early.cache.guess(request, most) == engine.side.cache.tokens(request) // BLOCK == shared
    assert engine.side.early.cache.guess(engine.request("most", prompt), 5) == 5


# --- vLLM's side ------------------------------------------------------------------------------------------------------


@pytest.fixture
def preprocess() -> Iterator[None]:
    original = EngineCore.preprocess_add_request
    yield
    EngineCore.preprocess_add_request = original


@pytest.mark.usefixtures("preprocess")
def test_the_engine_core_hands_requests_over_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        EngineCore, "preprocess_add_request", lambda core, request: (made.append(request) or request, 7)
    )
    assert early.install()
    assert early.install(), "twice is once"
    engine = Engine()
    connector: Any = SimpleNamespace(scheduler_side=engine.side)
    core: Any = SimpleNamespace(scheduler=SimpleNamespace(get_kv_connector=lambda: connector))
    request = Request("r", 4 * BLOCK + 1)
    assert EngineCore.preprocess_add_request(core, request) == (request, 7)
    assert list(engine.side.early.waiting) == made == [request]
    connector = SimpleNamespace(_connectors=[SimpleNamespace(), connector])  # vLLM's MultiConnector
    second = Request("second", 4 * BLOCK + 1)
    EngineCore.preprocess_add_request(core, second)
    assert list(engine.side.early.waiting) == [request, second]
    for other in (None, SimpleNamespace(scheduler_side=None), SimpleNamespace(scheduler_side=7)):
        connector = other
        assert EngineCore.preprocess_add_request(core, request) == (request, 7), "whatever we do"


def test_a_child_of_vllms_multiconnector_hints_early(make: Make) -> None:
    engine = make(multi=True)
    request = engine.request("r", 4 * BLOCK)
    early.hand_over(engine.scheduler.connector, request)
    assert list(engine.side.early.waiting) == [request]


def test_a_vllm_that_does_not_hand_them_over_is_served_as_before(
    monkeypatch: pytest.MonkeyPatch, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(EngineCore, "preprocess_add_request")
    with caplog.at_level(logging.WARNING):
        engine = make()
    assert compat.NOT_EARLY in caplog.text
    engine.hinted("r", 4 * BLOCK)
    engine.finish()


def test_without_a_gil_no_other_thread_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not early.install()


def test_the_doctor_says_of_a_vllm_that_does_not_hand_them_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def told() -> list[str]:
        return [what for _, what, _ in examine.environment(SimpleNamespace())]  # type: ignore[arg-type]

    assert compat.NOT_EARLY not in told()
    (tmp_path / "v1" / "engine").mkdir(parents=True)
    (tmp_path / "v1" / "engine" / "core.py").write_text("class EngineCore: ...\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(compat, "find_spec", lambda name: spec)
    assert compat.NOT_EARLY in told()


def test_of_several_groups_what_is_local_is_the_schedulers_to_say() -> None:
    groups = Groups((Group(Kind.FULL, BLOCK), Group(Kind.WINDOW, BLOCK, 64)), BLOCK)
    engine = Engine(groups=groups)
    request = come(engine, "r")
    hint = engine.daemon.hint("r")
    assert (hint.early, len(hint.pages)) == (True, 1)
    engine.side.arrived(request)
    assert engine.side.requests["r"].handle is not None
    engine.cache.guess = lambda request, most: None  # type: ignore[method-assign]
    come(engine, "held")
    engine.daemon.drain()
    assert [each.request_id for each in engine.daemon.hints] == ["r"]
