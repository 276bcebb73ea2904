"""Pitfalls of ends, returns and reports made once (docs/PITFALLS.md): each check fails without its guard."""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.request import RequestStatus

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.connector.engine import compat
from kvprefetch.connector.request.loads import Loads
from kvprefetch.connector.scheduler.scheduler import SchedulerSide
from kvprefetch.connector.worker.worker import WorkerSide
from kvprefetch.shmring.wire.records import Outcome

from .fakes import BLOCK, fails_with
from .real import RealEngine

Make = Callable[..., RealEngine]
Patch = pytest.MonkeyPatch


def loading(engine: RealEngine, name: str = "r") -> Any:
    """A request with a load dispatched in the step in flight."""
    request = engine.add(name, 4 * BLOCK)
    engine.daemon.drain()
    engine.stage(name)
    engine.schedule()
    assert len(engine.orders()) == 1
    return request


def test_p08_an_asynchronous_load_is_reported_once_also_after_an_abort(make: Make, monkeypatch: Patch) -> None:
    def check() -> None:
        engine = make(ranks=2, in_flight=2, load_mode="async")
        request = loading(engine)
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        engine.abort("r")
        received: Counter[str] = Counter()
        process = engine.process

        def counting() -> Any:
            output = process()
            received.update(output.finished_recving or ())
            return output

        engine.process = counting  # type: ignore[method-assign]
        engine.run()
        assert received == {"r": 1}
        assert engine.left() == []

    fails_with(check, monkeypatch, WorkerSide, "received", lambda self: set(), match="does not come to rest")


def test_p08_a_synchronous_load_is_never_reported(make: Make, monkeypatch: Patch) -> None:
    def check() -> None:
        engine = make(load_mode="sync")
        loading(engine)
        engine.finish()

    original = WorkerSide.load

    def talkative(self: WorkerSide, meta: Any) -> None:
        self._received.update(order.request_id for order in meta.loads)
        original(self, meta)

    fails_with(check, monkeypatch, WorkerSide, "load", talkative)


def test_p09_failed_blocks_are_told_with_the_end_of_the_load(make: Make, monkeypatch: Patch) -> None:
    """Reported later, the engine would go on with blocks that nobody filled."""

    def check() -> None:
        engine = make(ranks=2, load_mode="async")
        engine.hinted("r", 4 * BLOCK, out=1)
        load = engine.workers[1].worker_side.paged.load

        def fail(*_: Any) -> None:
            raise OSError("planted")

        engine.workers[1].worker_side.paged.load = fail
        engine.schedule()
        report = engine.flight[-1][1][1]
        assert report.finished_recving == {"r"}
        assert report.invalid_block_ids == set(engine.orders()[0].block_ids)
        engine.workers[1].worker_side.paged.load = load
        engine.process()
        computed = 0
        while engine.scheduler.has_requests():
            computed += engine.step().num_scheduled_tokens.get("r", 0)
        assert computed == 4 * BLOCK, "all of it is recomputed"

    fails_with(check, monkeypatch, WorkerSide, "failed_blocks", lambda self: set())


def test_p12_request_finished_never_keeps_blocks(make: Make, monkeypatch: Patch) -> None:
    """Least of all for a request that still receives: freed for both reasons, it would end the engine."""

    def check() -> None:
        engine = make(in_flight=2, load_mode="async", seqs=2, credits=range(40, 50))
        loading(engine)
        engine.abort("r")
        engine.add("runs", 3 * BLOCK)
        engine.add("never scheduled", 3 * BLOCK)
        engine.abort("never scheduled")
        engine.daemon.drain()
        engine.stage("runs", 0)
        engine.finish()

    def keeps(self: KVPrefetchConnector, request: Any, block_ids: Any) -> tuple[bool, None]:
        assert self.scheduler_side is not None
        self.scheduler_side.finished(request, block_ids)
        return True, None

    fails_with(check, monkeypatch, KVPrefetchConnector, "request_finished_all_groups", keeps)


def test_p13_request_finished_cleans_up_also_what_was_never_scheduled(make: Make, monkeypatch: Patch) -> None:
    def check() -> None:
        engine = make(seqs=1)
        engine.add("runs", 3 * BLOCK)
        engine.stage("runs", 0)
        engine.step()
        engine.add("waits", 3 * BLOCK)
        engine.stage("waits")
        engine.abort("waits")
        engine.finish()

    fails_with(check, monkeypatch, SchedulerSide, "finished", lambda self, request, block_ids: None)


def test_p18_a_preempted_requests_tokens_are_not_thrown_away(make: Make, monkeypatch: Patch) -> None:
    def check() -> None:
        engine = make(in_flight=2)
        assert engine.connector.requires_kv_delivery is False
        assert engine.scheduler.requires_kv_delivery is False

    fails_with(check, monkeypatch, KVPrefetchConnector, "requires_kv_delivery", KVConnectorBase_V1.requires_kv_delivery)


def test_p20_metadata_is_small_plain_and_there_in_every_step(make: Make, monkeypatch: Patch) -> None:
    """It is pickled to every worker, and the scheduler's block state must not outlive the call that shows it."""

    def check() -> None:
        engine = make(load_mode="async", credits=range(32, 64))
        engine.hinted("r", 9 * BLOCK, staged=4)
        while engine.scheduler.has_requests():
            output = engine.step()
            assert output.kv_connector_block_state is None
            meta = engine.metas[-1]
            assert meta.live_epochs == (1,), "also in a step without a forward"
            data = pickle.dumps(meta)
            assert b"vllm" not in data, "a reference into the scheduler"
            assert len(data) < 2000
            assert pickle.loads(data) == meta

    original = SchedulerSide.plan_step

    def keeps(self: SchedulerSide, output: Any, meta: Any) -> None:
        original(self, output, meta)
        meta.state = next(iter(output.num_scheduled_tokens), None) and self.requests["r"].request.status

    fails_with(check, monkeypatch, SchedulerSide, "plan_step", keeps, match="a reference")


@pytest.mark.parametrize("load_mode", ["sync", "async"])
def test_p21_loads_are_done_where_vllm_starts_them(make: Make, monkeypatch: Patch, load_mode: str) -> None:
    """By vLLM's own order around a forward: before it for a synchronous load, after it for an asynchronous one."""

    def check() -> None:
        engine = make(load_mode=load_mode)
        engine.hinted("r", 4 * BLOCK)
        done_at_forward = []

        def forward(worker: Any, output: Any) -> None:
            if engine.orders():
                done_at_forward.append(worker.worker_side.counters["load_bytes"] > 0)

        engine.forward = forward  # type: ignore[method-assign]
        engine.run()
        assert done_at_forward[:2] == [load_mode == "sync", True]
        assert engine.left() == []

    check()
    monkeypatch.setattr(KVPrefetchConnector, "start_load_kv", lambda self, context, **_: None)

    def late(self: KVPrefetchConnector) -> None:
        assert self.worker_side is not None
        self.worker_side.load(self._step)

    monkeypatch.setattr(KVPrefetchConnector, "wait_for_save", late)
    # After the forward is where an asynchronous one belongs.
    with pytest.raises(AssertionError) if load_mode == "sync" else contextlib.nullcontext():
        check()


def test_p26_a_streaming_session_is_left_alone(make: Make, monkeypatch: Patch) -> None:
    """Its later chunks reuse the id, are never matched, and may cut tokens back that were counted as saved."""

    def check() -> None:
        engine = make(credits=range(32, 64))
        engine.add("s", 3 * BLOCK, out=2, resumable=True)
        for chunk in range(2):
            for _ in range(6):
                engine.step()
                engine.daemon.drain()
            if chunk == 0:
                engine.add("s", [50 + i for i in range(2 * BLOCK)], out=2, resumable=True)
        assert len(engine.tokens["s"]) == 4
        assert engine.daemon.hints == []
        assert engine.orders("saves") == []
        engine.abort("s")
        engine.finish()

    original = SchedulerSide.arrived

    def taken_for_a_request(self: SchedulerSide, request: Any) -> None:
        request.resumable = False
        original(self, request)
        request.resumable = True

    fails_with(check, monkeypatch, SchedulerSide, "arrived", taken_for_a_request)


def test_p41_a_hit_of_which_vllm_computes_all_again_is_not_claimed(make: Make, monkeypatch: Patch) -> None:
    """vLLM does not take it; without the guard the answer that it drops is given back, and nothing is loaded."""

    def check() -> None:
        engine = make(replayed=2 * BLOCK)
        engine.hinted("r", 5 * BLOCK, staged=2)
        engine.finish()
        assert engine.orders() == []
        assert len(engine.tokens["r"]) == 3
        assert engine.daemon.dones[-1].outcome == Outcome.RECOMPUTED, "claimed, and given back"

    fails_with(check, monkeypatch, compat, "replayed_tokens", lambda config: 0, match="claimed, and given back")


@pytest.mark.parametrize(("unit", "loaded"), [(2, [[0, 1]]), (4, [])])
def test_p41_vllm_cuts_an_answer_to_its_own_unit(
    make: Make, monkeypatch: Patch, unit: int, loaded: list[list[int]]
) -> None:
    """A part is loaded, or nothing; the slots of the rest go back."""

    def check() -> None:
        engine = make(replayed=BLOCK)
        engine.scheduler.block_size = unit * BLOCK
        engine.hinted("r", 5 * BLOCK, staged=3)
        computed = sum(engine.step().num_scheduled_tokens.values())
        while engine.scheduler.requests and not engine.tokens["r"]:
            computed += sum(engine.step().num_scheduled_tokens.values())
        assert [list(order.slots) for order in engine.orders()] == loaded
        assert computed == (5 - (1 if loaded else 0)) * BLOCK, "of two blocks one is computed again"
        engine.finish()
        assert engine.daemon.dones[-1].outcome == (Outcome.LOADED if loaded else Outcome.UNUSED)

    dispatch, admitted = Loads.dispatch, SchedulerSide.allocated

    def all_of_it(self: Loads, state: Any, allocated: Any, tokens: int) -> None:
        dispatch(self, state, allocated, state.answer.count * BLOCK)

    def none_of_it(self: SchedulerSide, request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            admitted(self, request, blocks, tokens)

    planted = (Loads, "dispatch", all_of_it) if loaded else (SchedulerSide, "allocated", none_of_it)
    fails_with(check, monkeypatch, *planted)
