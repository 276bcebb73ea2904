"""Blocks that found no save slot while their request lived are saved later, as long as the engine's cache has them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from kvprefetch.connector.request import saves
from kvprefetch.connector.scheduler.prefix_cache import PrefixCache

from .fakes import BLOCK, GEOMETRY, Engine, Request
from .real import RealEngine
from .test_scheduler_saves import saved_digests


def finish(engine: Engine, request: Request, blocks: int, *, cached: bool = True) -> None:
    """The request ends; its full blocks stay in the engine's prefix cache until they are needed."""
    ids = [100 + number for number in range(blocks)]
    if cached:
        engine.cache.names.update(zip(ids, request.names(0, blocks), strict=True))
    engine.side.finished(request, [ids])


def run_short(engine: Engine, name: str, blocks: int) -> Request:
    request = engine.admitted(name, blocks * BLOCK)
    engine.acknowledge(engine.step([(request, blocks * BLOCK)]))
    return request


@pytest.mark.parametrize("how", ["hangs", "is gone"])
def test_an_idle_engine_does_not_step_for_a_daemon_that_does_not_take_its_saves(how: str) -> None:
    engine = Engine(credits=[40, 41])
    request = run_short(engine, "r", 5)
    finish(engine, request, 5)
    engine.daemon.credits.grant([40, 41])
    assert engine.side.has_pending_work()
    if how == "hangs":
        engine.clock.advance_ms(6000)
    else:
        engine.link.epoch = None
        engine.step()
    assert not engine.side.has_pending_work()


def test_a_finished_request_is_saved_on_when_slots_come_back() -> None:
    engine = Engine(credits=[40, 41])
    request = run_short(engine, "r", 5)
    finish(engine, request, 5)
    assert not engine.side.has_pending_work(), "without a slot there is nothing an idle engine could do"
    engine.daemon.credits.grant([40, 41])
    assert engine.side.has_pending_work()
    meta = engine.step()
    assert [save.block_ids for save in meta.saves] == [[102, 103]]
    engine.acknowledge(meta)
    engine.daemon.credits.grant([40, 41])
    engine.acknowledge(engine.step())
    assert saved_digests(engine) == request.digests(0, 5)
    assert engine.side.counters["save_blocks_unsaved"] == 0
    assert not engine.side.has_pending_work()


def test_what_requests_share_is_left_once() -> None:
    engine = Engine()
    for name in ("r", "s"):
        request = engine.admitted(name, 3 * BLOCK, salt="same")
        engine.acknowledge(engine.step([(request, 3 * BLOCK)]))
        finish(engine, request, 3)
    assert len(engine.side.saves.left) == 3


def test_a_step_looks_at_so_many_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "LEFT_LOOKS", 4)
    engine = Engine()
    finish(engine, run_short(engine, "gone", 6), 6, cached=False)
    finish(engine, run_short(engine, "r", 1), 1)
    engine.daemon.credits.grant([40])
    assert engine.step().saves == []
    assert engine.side.counters["save_blocks_unsaved"] == 4
    assert [save.block_ids for save in engine.step().saves] == [[100]]


def test_more_than_a_record_holds_is_left_for_the_next_step() -> None:
    engine = Engine(ring=4096, slots=256)
    finish(engine, run_short(engine, "r", 60), 60)
    engine.daemon.credits.grant(list(range(64)))
    blocks = [block for _ in range(3) for save in engine.step().saves for block in save.block_ids]
    assert blocks == list(range(100, 160))


def test_what_is_left_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "MAX_LEFT", 4)
    engine = Engine()
    for name in ("a", "b"):
        finish(engine, run_short(engine, name, 3), 3)
    assert engine.side.counters["save_blocks_unsaved"] == 2


@pytest.mark.parametrize("why", ["reset", "failed load", "failed load before", "preempted"])
def test_what_cannot_be_trusted_is_not_left(why: str) -> None:
    engine = Engine()
    request = engine.add("r", 4 * BLOCK)
    engine.daemon.stage("r", 1, found=1)
    engine.match(request)
    engine.allocate(request, BLOCK)
    first = engine.step([(request, 3 * BLOCK)])
    if why == "failed load before":
        engine.acknowledge(first, failed_loads=[first.loads[0].load_id])
    if why == "preempted":
        engine.preempt(request)
    finish(engine, request, 4)
    if why == "reset":
        engine.reset()
    if why == "failed load":  # reported with the outputs of a step that was in flight when the request ended
        engine.acknowledge(first, failed_loads=[first.loads[0].load_id])
    engine.daemon.credits.grant(list(range(30, 40)))
    assert engine.step().saves == []


def test_nothing_is_left_where_the_engines_cache_holds_old_weights() -> None:
    """The same block may be cached again by a request that computed it on them."""
    engine = Engine()
    engine.cache.count = 1
    engine.reset()
    request = run_short(engine, "r", 3)
    finish(engine, request, 3)
    engine.daemon.credits.grant(list(range(30, 40)))
    assert engine.step().saves == []


def test_a_block_stored_by_another_request_meanwhile_is_not_saved_again() -> None:
    engine = Engine()
    request = run_short(engine, "a", 3)
    finish(engine, request, 3)
    other = engine.add("b", 3 * BLOCK + 1, salt="a")
    engine.daemon.stage("b", 3, found=3)
    engine.take(other, 3 * BLOCK)
    engine.daemon.credits.grant(list(range(30, 40)))
    meta = engine.step([(other, 1)])
    assert meta.saves == []
    engine.acknowledge(meta)
    assert not engine.side.has_pending_work()


def test_vllms_own_pool_says_whether_a_block_is_still_there(make: Callable[..., RealEngine]) -> None:
    """With the real scheduler: an idle engine saves what a short request left, unless the blocks went to another."""
    for reused in (False, True):
        engine = make(blocks=8)
        engine.add("short", 4 * BLOCK, out=1)
        engine.daemon.stage("short", 0, found=0)
        engine.run()
        assert engine.orders("saves") == []
        left = len(engine.side.saves.left)
        assert left == 4
        if reused:
            engine.add("next", 6 * BLOCK, out=1)
            engine.daemon.stage("next", 0, found=0)
            engine.run()
        engine.daemon.credits.grant(list(range(40, 60)))
        assert engine.scheduler.has_requests(), "stepped for what is left"
        engine.run(limit=5)
        digests = {digest for saved in engine.daemon.saved for digest in saved.names}
        assert len(digests) == (1 + 6 if reused else 4), "seven blocks: one of the first request is left beside six"
        assert engine.left() == []


def test_after_a_reset_it_looks_at_what_the_engine_cached_since() -> None:
    """vLLM replaces the map of cached blocks at each reset."""
    pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=BLOCK)
    manager: Any = SimpleNamespace(block_pool=pool, get_computed_blocks=lambda _: (None, BLOCK))
    cache = PrefixCache(manager, GEOMETRY)

    def put(digest: bytes) -> list[Any]:
        blocks = pool.get_new_blocks(1)
        pool.cached_block_hash_to_block.insert(make_block_hash_with_group_id(BlockHash(digest), 0), blocks[0])
        return blocks

    def tokens(digest: bytes) -> int:
        return cache.tokens(SimpleNamespace(block_hashes=[digest]))  # type: ignore[arg-type]

    old, new = b"a" * 32, b"b" * 32
    pool.free_blocks(put(old))
    assert (cache.blocks(), tokens(old)) == (1, BLOCK)
    assert pool.reset_prefix_cache()
    assert (cache.blocks(), tokens(old)) == (0, 0)
    put(new)
    assert (cache.blocks(), tokens(old), tokens(new)) == (1, 0, BLOCK)
