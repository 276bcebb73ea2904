"""The scheduler side's claims and loads, against a fake daemon on real shared memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.core import EngineCore

from kvprefetch.connector.request import reported
from kvprefetch.shmring.wire.records import FlagState, Outcome

from .fakes import BLOCK, BLOCK_BYTES, MS, Engine
from .real import RealEngine
from .reports import Blocks
from .waiting import TOKEN_MS, measured

NOTHING, PENDING = (0, False), (None, False)


def test_pending_then_ready_then_loaded() -> None:
    """None while pending with one Ask; then a claim, an answer, a load, and the flag back after every rank."""
    engine = Engine(world_size=2)
    request = engine.add("r", 4 * BLOCK + 5, local=BLOCK)
    assert [engine.match(request) for _ in range(5)] == [PENDING] * 5
    engine.step()
    engine.daemon.drain()
    assert len(engine.daemon.asks) == 1
    engine.daemon.stage("r", 3, ready=False)
    assert engine.match(request) == PENDING
    engine.daemon.stage("r", 4, slots=[9, 3, 7])
    assert engine.match(request) == (3 * BLOCK, False)
    assert engine.daemon.flag("r") == (1, FlagState.CLAIMED, 4)
    ids = engine.take(request, 3 * BLOCK)
    meta = engine.step([(request, 5)])
    (load,) = meta.loads
    assert (list(load.block_ids), list(load.slots), load.asynchronous) == (ids[1:4], [9, 3, 7], False)
    assert meta.live_epochs == (1,)
    assert engine.side.has_pending_work()
    engine.acknowledge(meta, ranks=1)
    assert engine.daemon.flag("r").state == FlagState.CLAIMED
    engine.side.finished(request)
    assert engine.daemon.flag("r").state == FlagState.CLAIMED, "an end must not free a dispatched load"
    engine.clock.advance_ms(3)
    engine.acknowledge(meta, ranks=1)
    engine.daemon.drain()
    assert engine.daemon.flag("r").state == FlagState.RELEASED
    (done,) = engine.daemon.dones
    assert (done.outcome, done.loaded_from, done.loaded_blocks) == (Outcome.LOADED, 1, 3)
    assert 0 < done.asked_ns <= done.claimed_ns < done.loaded_ns
    assert not engine.side.has_pending_work()
    engine.acknowledge(meta, ranks=1)
    assert engine.side.counters["unknown_loads"] == 1, "reported once too often"


def test_the_first_save_and_the_first_hit_are_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    """Once for an engine, after all ranks; the computing that a hit saved, where its cost is known."""
    engine = Engine(world_size=2, credits=range(40, 50))
    engine.side.steps.began(engine.clock.ns, 300, executed=True)
    engine.clock.advance_ms(600)
    engine.side.steps.ended(engine.clock.ns)
    with caplog.at_level(logging.INFO, "vllm.kvprefetch"):
        for number in range(2):
            saving = engine.admitted(f"save{number}", 2 * BLOCK)
            meta = engine.step([(saving, 2 * BLOCK)])
            engine.acknowledge(meta, ranks=1)
            assert len(caplog.messages) == 2 * bool(number)
            engine.acknowledge(meta, ranks=1)
            loading = engine.add(f"load{number}", 3 * BLOCK + 5, staged=3)
            engine.take(loading, 3 * BLOCK)
            engine.acknowledge(engine.step([(loading, 5)]))
    first, hit = caplog.messages
    assert first.startswith("kvprefetch: first save: 2 blocks go to the store")
    tokens, saved_s = f"{3 * BLOCK} of {3 * BLOCK + 5} tokens", 3 * BLOCK * 0.00195
    assert hit == f"kvprefetch: first prefix from the store: {tokens}, saved {saved_s:.2f} s of computing"


def test_a_load_that_failed_is_no_first_hit(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    request = engine.add("r", 3 * BLOCK + 5, staged=3)
    engine.take(request, 3 * BLOCK)
    with caplog.at_level(logging.INFO, "vllm.kvprefetch"):
        meta = engine.step([(request, 5)])
        engine.acknowledge(meta, failed_loads=[meta.loads[0].load_id])
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("mode", "limit", "expected"),
    [
        ("sync", 0, False),
        ("async", 1 << 30, True),
        ("auto", 2 * BLOCK_BYTES, False),
        ("auto", 2 * BLOCK_BYTES - 1, True),
    ],
)
def test_load_mode(mode: str, limit: int, expected: bool) -> None:
    """Forced, or by the bytes of the load on one rank; the second call after an asynchronous load changes nothing."""
    engine = Engine(load_mode=mode, sync_load_max_bytes=limit)
    request = engine.add("r", 3 * BLOCK, staged=2)
    assert engine.match(request) == (2 * BLOCK, expected)
    engine.allocate(request, 2 * BLOCK)
    (load,) = engine.step().loads
    assert load.asynchronous is expected
    engine.side.allocated(request, Blocks([]), 0)
    assert engine.daemon.flag("r").state == FlagState.CLAIMED


@pytest.mark.parametrize(("admitted", "expected"), [(7, False), (9, True)])
def test_a_busy_engine_is_not_held_up_by_a_load_that_an_empty_one_takes(admitted: int, expected: bool) -> None:
    """Two of the four blocks that may be loaded before the forward, with 7 and 9 of at most 16 requests running."""
    engine = Engine(sync_load_max_bytes=4 * BLOCK_BYTES)
    for number in range(admitted):
        engine.allocate(engine.add(f"other {number}", BLOCK), 0)
    request = engine.add("r", 3 * BLOCK, staged=2)
    assert engine.match(request) == (2 * BLOCK, expected)


def test_at_the_deadline_the_ready_prefix_is_taken() -> None:
    engine = Engine(wait_timeout_ms=100)
    late, nothing = engine.add("late", 4 * BLOCK), engine.add("nothing", 4 * BLOCK)
    engine.clock.advance_ms(500)
    assert engine.match(late) == engine.match(nothing) == PENDING, "the time before the first visit does not count"
    engine.daemon.stage("late", 2, ready=False)
    engine.clock.advance_ms(99)
    assert engine.match(late) == PENDING
    engine.clock.advance_ms(1)
    assert engine.match(late) == (2 * BLOCK, False)
    assert engine.match(nothing) == NOTHING
    assert engine.match(nothing) == NOTHING
    engine.daemon.drain()
    assert [done.outcome for done in engine.daemon.dones] == [Outcome.TIMED_OUT]
    assert engine.daemon.flag("nothing").state == FlagState.CANCELLED


class Between:
    """A handle whose first claim comes after `act`."""

    def __init__(self, handle: Any, act: Callable[[], object]) -> None:
        self._handle, self._act = handle, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def claim(self, *args: int) -> Any:
        act, self._act = self._act, lambda: None
        act()
        return self._handle.claim(*args)


@pytest.mark.parametrize("again", [False, True])
def test_a_claim_after_a_taking_back_fails_or_reads_the_new_slots(again: bool) -> None:
    """The flag moves between the look and the claim; published again, its word is what it was."""
    engine = Engine()
    request = engine.add("r", 4 * BLOCK)
    hint = engine.daemon.stage("r", 3, slots=[4, 5, 6])

    def taken_back() -> None:
        engine.daemon.move(hint.flag, FlagState.HINTED, 0)
        if again:
            engine.daemon.stage("r", 3, slots=[1, 2, 3])

    state = engine.side.requests["r"]
    vars(state)["handle"] = Between(state.handle, taken_back)
    if not again:
        assert engine.match(request) == PENDING
        assert engine.daemon.flag("r") == (1, FlagState.HINTED, 0)
        return
    engine.take(request, 3 * BLOCK)
    assert list(engine.step([(request, 4 * BLOCK)]).loads[0].slots) == [1, 2, 3]


@pytest.mark.parametrize("answered", [0, 1])
def test_an_allocation_nobody_answered_is_not_survived(answered: int) -> None:
    """Swallowing it would compute on blocks that nobody fills."""
    engine = Engine()
    request = engine.add("r", 3 * BLOCK, staged=answered)
    assert engine.match(request) == (answered * BLOCK, False)
    with pytest.raises(RuntimeError, match="not given"):
        engine.allocate(request, 2 * BLOCK)


def test_a_load_says_what_computing_its_blocks_would_have_taken() -> None:
    """By the engine's own steps; nothing where it measured none."""
    for engine, spared_ns in ((measured(), 10 * BLOCK * TOKEN_MS * MS), (Engine(wait_policy="adaptive"), 0)):
        request = engine.add("r", 10 * BLOCK + 1)
        engine.daemon.stage("r", 10)
        assert engine.match(request) == (10 * BLOCK, False)
        engine.take(request, 10 * BLOCK)
        meta = engine.step([(request, 1)])
        engine.acknowledge(meta, ranks=1)
        engine.daemon.drain()
        assert engine.daemon.dones[-1].loaded_blocks == 10
        assert engine.daemon.dones[-1].spared_ns == pytest.approx(spared_ns, rel=0.1)


def test_a_call_to_the_workers_makes_loads_asynchronous_until_a_step_has_reported(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., RealEngine]
) -> None:
    """Weights change in another process then. So it is before the first step, and where vLLM does not say."""
    calls: list[Any] = []
    monkeypatch.setattr(EngineCore, "collective_rpc", lambda core, *call: calls.append(call) or 7)
    engine = make(in_flight=2, load_mode="sync")
    assert reported.install(), "twice is once"
    core: Any = SimpleNamespace(scheduler=engine.scheduler)

    def loads_beside(name: str) -> bool:
        engine.add(name, 3 * BLOCK)
        engine.stage(name, 2)
        engine.schedule()
        asynchronous: bool = engine.orders()[-1].asynchronous
        engine.run()
        return asynchronous

    assert [loads_beside(name) for name in "ab"] == [True, False]
    assert EngineCore.collective_rpc(core, "update_weights", None) == 7
    assert [loads_beside(name) for name in "cd"] == [True, False]
    assert calls == [("update_weights", None)]
    monkeypatch.delattr(EngineCore, "collective_rpc")
    engine = make(in_flight=2, load_mode="sync")
    assert [loads_beside(name) for name in "ab"] == [True, True]
