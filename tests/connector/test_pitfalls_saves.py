"""Pitfalls of saving (docs/PITFALLS.md): each check fails once its guard is taken away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.connector.request.reported import Reported
from kvprefetch.connector.request.request_state import RequestState
from kvprefetch.connector.request.saves import Saves
from kvprefetch.connector.scheduler.prefix_cache import PrefixCache
from kvprefetch.connector.scheduler.scheduler import SchedulerSide
from kvprefetch.connector.worker.worker import WorkerSide

from .fakes import BLOCK, fails_with
from .real import RealEngine

Make = Callable[..., RealEngine]
Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("in_flight", [1, 3])
def test_p14_only_known_and_computed_tokens_are_saved(make: Make, monkeypatch: Patch, in_flight: int) -> None:
    """Chunked prefill and decoding, also with placeholders for tokens in flight. Random schedules: tests/scheduler."""

    def check() -> None:
        engine = make(in_flight=in_flight, budget=BLOCK + 7, save_decode_cache=True, credits=range(32, 64))
        request = engine.add("r", 3 * BLOCK + 5, out=3 * BLOCK)
        engine.stage("r", 0)
        saved = 0
        while not request.is_finished():
            engine.schedule()
            for order in engine.metas[-1].saves:
                saved = (max(map(engine.table("r").index, order.block_ids)) + 1) * BLOCK
                assert saved <= min(request.num_tokens, request.num_computed_tokens)
            while len(engine.flight) >= engine.in_flight:
                engine.process()
        assert saved == request.num_tokens // BLOCK * BLOCK, "the last token's KV is never computed"
        engine.finish()

    original = Saves.storable_blocks

    def longer(self: Saves, state: Any, *rest: Any) -> int:
        return min(original(self, state, *rest) + 1, len(state.request.block_hashes))

    fails_with(check, monkeypatch, Saves, "storable_blocks", longer)


def test_p15_a_save_is_reported_only_when_its_copies_are_done(monkeypatch: Patch) -> None:
    """They are queued behind the forward on the current stream; the event recorded after them says so."""
    from kvprefetch.connector.words.metadata import KVPrefetchMetadata, SaveOrder

    from .test_worker import EPOCH, Fence, make

    def check() -> None:
        worker, _, _, paged = make()
        fence = Fence()
        monkeypatch.setattr(paged, "fence", lambda: fence)
        worker.save(KVPrefetchMetadata(saves=[SaveOrder(1, EPOCH, [3], [1])]))
        assert worker.report() is None, "not copied yet"
        fence.done = True
        report = worker.report()
        assert report is not None
        assert report.saves == {1: 1}

    original = WorkerSide.report

    def hasty(self: WorkerSide) -> Any:
        for batch in self._running:
            batch.fence = None
        return original(self)

    fails_with(check, monkeypatch, WorkerSide, "report", hasty, match="not copied yet")


def late_reports(engine: RealEngine) -> None:
    """Workers report two steps later: model runner V1 does so one step later with speculation, a slow copy any."""
    for worker in engine.workers:
        side, held = worker.worker_side, [None, None]

        def late(side: Any = side, report: Any = side.report, held: list[Any] = held) -> Any:
            held.append(report())
            return held.pop(0)

        side.report = late


def saving_after_the_last_request(make: Make) -> RealEngine:
    engine = make()
    late_reports(engine)
    engine.daemon.credits.grant(list(range(32, 64)))
    engine.add("r", 3 * BLOCK, out=1)
    engine.stage("r", 0)
    engine.step()
    while engine.scheduler.requests:
        engine.step()
    engine.step()  # tells the workers that it has finished
    return engine


def test_p16_a_save_in_flight_pins_nothing_and_keeps_the_engine_stepping(make: Make, monkeypatch: Patch) -> None:
    def check() -> None:
        engine = saving_after_the_last_request(make)
        assert len(engine.side.saves.waiting) == 1
        assert engine.scheduler.has_requests(), "its acknowledgement comes with a step"
        assert engine.scheduler.reset_prefix_cache(), "a pinned block makes this fail"
        engine.run(limit=3)
        assert not engine.connector.has_pending_push_work()
        engine.daemon.drain()
        assert len(engine.daemon.saved) == 1
        assert engine.left() == []

    with monkeypatch.context() as patch:
        patch.setattr(SchedulerSide, "has_pending_work", lambda self: False)
        with pytest.raises(AssertionError, match="acknowledgement"):
            check()
    with monkeypatch.context() as patch:
        patch.setattr(Saves, "acknowledge", lambda *args: None)
        with pytest.raises(AssertionError, match="does not come to rest"):
            check()
    original = KVPrefetchConnector.build_connector_meta

    def pinning(self: KVPrefetchConnector, output: Any) -> Any:
        meta = original(self, output)
        assert self._kv_cache_manager is not None
        pool = self._kv_cache_manager.block_pool
        for order in meta.saves:
            pool.touch([pool.blocks[block_id] for block_id in order.block_ids])
        return meta

    fails_with(check, monkeypatch, KVPrefetchConnector, "build_connector_meta", pinning, match="pinned")


def test_p30_a_step_whose_end_is_not_told_is_saved_before_the_next(make: Make, monkeypatch: Patch) -> None:
    """The first of two stages of model runner V1 with drafts: it returns before vLLM says wait_for_save."""

    def first_stage(engine: RealEngine, worker: Any, output: Any) -> Any:
        with (
            mock.patch.object(mixin, "get_kv_transfer_group", return_value=worker),
            mock.patch.object(mixin, "get_forward_context", return_value=None),
        ):
            worker.handle_preemptions(output.kv_connector_metadata)
            if not output.num_scheduled_tokens:
                return mixin.KVConnectorModelRunnerMixin.kv_connector_no_forward(
                    output, worker._vllm_config
                ).kv_connector_output
            with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output, defer_finalize=True) as report:
                paged = worker.worker_side.paged
                sevens = np.full((1, paged.block_bytes), 7, np.uint8)
                paged.load(sevens, [0] * paged.num_blocks, range(paged.num_blocks))
            return report

    def check() -> None:
        engine = make(ranks=2)
        last_stage = engine.run_rank
        engine.run_rank = lambda worker, output: (  # type: ignore[method-assign]
            first_stage(engine, worker, output) if worker is engine.workers[0] else last_stage(worker, output)
        )
        engine.daemon.credits.grant(list(range(32, 64)))
        engine.add("r", 3 * BLOCK, out=2)
        engine.stage("r", 0)
        engine.run()
        engine.daemon.drain()
        (saved,) = engine.daemon.saved
        assert len(saved.names) == 3
        side = engine.workers[0].worker_side
        rows = side.link.mapped(engine.daemon.layout.epoch).rows
        assert {
            int(rows[slot].min()) for slot in saved.slots if slot % side.keys.replicas == side.keys.replica_index
        } == {7}
        assert engine.left() == []

    fails_with(
        check, monkeypatch, KVPrefetchConnector, "handle_preemptions", lambda *args: None, match="does not come to rest"
    )


def started(make: Make, **options: Any) -> RealEngine:
    """An engine whose ranks have reported with a first step: loads may be synchronous."""
    engine = make(**options)
    engine.add("before", 1, out=1)
    engine.run()
    engine.tokens.clear()
    return engine


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("loader", ["ours", "another connector's"])
def test_p31_what_was_computed_on_a_failed_load_is_not_stored(
    make: Make, monkeypatch: Patch, loader: str, in_flight: int
) -> None:
    """vLLM computes those blocks again, and what any request computed on them since; our copies of it are older."""

    def fail(*_: Any) -> None:
        raise OSError("planted")

    def check() -> None:
        engine = started(
            make, multi=True, load_mode="sync", in_flight=in_flight, save_decode_cache=True, credits=range(32, 64)
        )
        prompt = list(range(100, 100 + 4 * BLOCK))
        engine.add("first", [*prompt, 7], out=BLOCK)
        engine.add("sharing", [*prompt[: 3 * BLOCK], *range(500, 500 + BLOCK + 1)], out=BLOCK)
        engine.daemon.drain()
        engine.stage("first", 2 if loader == "ours" else 0)
        engine.stage("sharing", 0)
        other, ours = engine.scheduler.connector._connectors[0], engine.workers[0]._connectors[1]
        if loader == "ours":
            ours.worker_side.paged.load = fail
        else:
            other.get_num_new_matched_tokens = lambda request, local: (0 if local else 2 * BLOCK, False)
            engine.schedule()
            report = engine.flight[-1][1][0]
            report.invalid_block_ids = set(engine.table("first")[:2])
        engine.run()
        assert engine.orders("saves")
        assert all(saved.dropped for saved in engine.daemon.saved)
        assert {name: len(tokens) for name, tokens in engine.tokens.items()} == {"first": BLOCK, "sharing": BLOCK}
        assert engine.left() == []

    fails_with(check, monkeypatch, Saves, "drop", lambda *args: None)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_p31_no_later_request_finds_a_block_that_a_failed_load_left_unfilled(
    make: Make, monkeypatch: Patch, in_flight: int
) -> None:
    """vLLM has it, and what was computed on it, under their names, also where the request ends before it fills them."""

    def check() -> None:
        engine = started(make, load_mode="sync", in_flight=in_flight, credits=range(32, 64))
        first = engine.hinted("first", 5 * BLOCK + 1, 3)
        engine.workers[0].worker_side.link.epochs.clear()
        engine.schedule()
        while engine.flight:
            engine.process()
        assert engine.side.counters["failed_loads"] == 1
        assert len(engine.table("first")) > 3
        engine.abort("first")
        second = engine.add("second", first.prompt_token_ids)
        assert engine.side.cache.tokens(second) == 0
        assert engine.daemon.hint("second").local_blocks == 0
        engine.stage("second", 0)
        engine.run()
        assert len(engine.tokens["second"]) == 3
        assert engine.left() == []

    fails_with(check, monkeypatch, PrefixCache, "forget", lambda *args: None)


@pytest.mark.parametrize(("in_flight", "end"), [(1, "aborted"), (2, "aborted"), (2, "preempted")])
def test_p31_what_was_computed_on_an_unfilled_block_is_not_found_where_the_request_ended(
    make: Make, monkeypatch: Patch, in_flight: int, end: str
) -> None:
    """Its table is gone by then; a later request that computes the unfilled blocks would go on with those behind."""

    def check() -> None:
        options = {"in_flight": in_flight, "asynchronous": end != "preempted", "blocks": 8, "wait_timeout_ms": 0}
        engine = started(make, load_mode="sync", credits=range(32, 64), **options)
        other = engine.add("other", BLOCK - 2, out=9)
        while other.num_computed_tokens < BLOCK - 1:
            engine.step()
        first = engine.add("first", 5 * BLOCK + 1)
        engine.stage("first", 1)
        engine.workers[0].worker_side.link.epochs.clear()
        engine.schedule()
        assert len(engine.orders()) == 1
        if end == "aborted":
            engine.abort("first")
        else:
            assert engine.schedule().preempted_req_ids == {"first"}, "the other one needs a block"
            engine.abort("first")
        engine.abort("other")
        while engine.flight:
            engine.process()
        assert engine.side.counters["failed_loads"] == 1
        second = engine.add("second", [*first.prompt_token_ids[:BLOCK], 7])
        assert engine.side.cache.tokens(second) == 0
        engine.run()
        assert engine.side.cache.tokens(engine.add("third", first.prompt_token_ids)) == BLOCK
        engine.run()
        assert engine.left() == []

    forget = PrefixCache.forget
    fails_with(check, monkeypatch, PrefixCache, "forget", lambda self, failed, admitted: forget(self, failed, ()))


class Weights:
    def update_weights(self) -> None: ...


@pytest.mark.parametrize("in_flight", [2, 3])
def test_p40_no_token_of_a_step_behind_a_failed_load_is_given_out(
    make: Make, monkeypatch: Patch, in_flight: int
) -> None:
    """Weights that were updated since the last step make the next load fail, and steps behind it are under way."""

    def check() -> None:
        engine = started(make, load_mode="sync", in_flight=in_flight)
        for number, updated in enumerate([False, True]):
            name, weights = f"r{number}", Weights()
            engine.workers[0].worker_side.updates.watch(weights, ["update_weights"])
            engine.add(name, 5 * BLOCK)
            engine.stage(name, 2)
            if updated:
                weights.update_weights()
            for _ in range(in_flight):
                engine.schedule()
            assert len(engine.orders()) == number + 1
            while engine.flight:
                engine.process()
            assert engine.orders()[-1].asynchronous is updated
            assert engine.side.counters["failed_loads"] == updated
            assert not updated or engine.tokens[name] == []
            engine.run()
            assert len(engine.tokens[name]) == 3
        assert engine.left() == []

    fails_with(check, monkeypatch, Reported, "all", True)


@pytest.mark.parametrize(("in_flight", "second_runner"), [(1, True), (3, False)])
def test_p17_a_preempted_request_starts_over(
    make: Make, monkeypatch: Patch, in_flight: int, second_runner: bool
) -> None:
    """Resumed in either runner's form: matched again, and saved from its new blocks."""

    def check() -> None:
        engine = make(
            in_flight=in_flight,
            second_runner=second_runner,
            blocks=12,
            seqs=2,
            save_decode_cache=True,
            wait_timeout_ms=0,
            credits=range(64),
        )
        for name in ("a", "b"):
            engine.add(name, 3 * BLOCK + 12, out=5 * BLOCK)
        preempted = 0
        for _ in range(600):
            if not engine.scheduler.has_requests():
                break
            preempted += len(engine.schedule().preempted_req_ids or ())
            waiting = engine.side.saves.waiting
            for order in engine.metas[-1].saves:
                for request in engine.scheduler.requests.values():
                    table = engine.table(request.request_id)
                    if set(order.block_ids) <= set(table):
                        names = [request.block_hashes[table.index(block)] + b"\0" for block in order.block_ids]
                        assert names == waiting[order.save_id].names
            while len(engine.flight) >= engine.in_flight:
                engine.process()
            engine.daemon.drain()
            engine.daemon.free()
        assert preempted > 0
        assert engine.side.counters["timed_out"] > 2, "asked for again after the preemption"
        engine.run()
        assert {name: len(tokens) for name, tokens in engine.tokens.items()} == {"a": 5 * BLOCK, "b": 5 * BLOCK}
        assert engine.left() == []

    def forgetful(self: RequestState, *_: Any) -> None:
        self.preemptions, self.loadable = self.request.num_preemptions, False

    fails_with(check, monkeypatch, RequestState, "restart", forgetful, match="after the preemption")
