"""KV events of saved blocks: what is published, when, and what never is; and which tier hits came from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.shmring.messages import Stored
from kvprefetch.shmring.protocol import FlagState

from .fakes import BLOCK, Engine
from .test_scheduler_saves import admit


def connector_of(engine: Engine) -> KVPrefetchConnector:
    connector = object.__new__(KVPrefetchConnector)
    connector._scheduler, connector._worker = engine.side, None
    return connector


def saved(engine: Engine, blocks: int = 3, **fields: Any) -> int:
    """A request whose blocks are on their way into the store; its save id."""
    request = engine.add("r", blocks * BLOCK, **fields)
    admit(engine, request)
    meta = engine.step([(request, blocks * BLOCK)])
    engine.acknowledge(meta)
    return meta.saves[0].save_id


def test_a_block_is_announced_when_the_store_has_it_and_once() -> None:
    engine = Engine(publish=True)
    connector = connector_of(engine)
    engine.daemon.credits.grant([7, 8, 9])
    lora = SimpleNamespace(adapter_id=4, name="adapter")
    save_id = saved(engine, lora_request=lora, session_id="s")
    assert list(connector.take_events()) == [], "copied, pushed, and not yet in the store"
    engine.link.stored.append(Stored(save_id=save_id, memory=[7], disk=[9]))
    events = list(connector.take_events())
    digests = [maybe_convert_block_hash(d) for d in engine.side._entries["r"].request.digests(0, 3)]
    assert [type(event) for event in events] == [BlockStored, BlockStored]
    assert [(event.block_hashes, event.parent_block_hash, event.medium) for event in events] == [
        ([digests[0]], None, "cpu"),
        ([digests[2]], digests[1], MEDIUM_STORAGE),
    ]
    assert events[1].token_ids == list(range(2 * BLOCK, 3 * BLOCK))
    assert {(e.block_size, e.lora_id, e.lora_name, e.session_id, e.group_idx) for e in events} == {
        (BLOCK, 4, "adapter", "s", 0)
    }
    engine.link.stored.append(Stored(save_id=save_id, memory=[7], lost=[8]))
    assert list(connector.take_events()) == []
    assert engine.side._events is not None
    assert engine.side._events._saving == {}, "nothing is remembered of a save that is settled"


@pytest.mark.parametrize("how", ["reset", "epoch", "failed copy"])
def test_a_save_that_was_dropped_is_never_announced(how: str) -> None:
    engine = Engine(publish=True)
    engine.daemon.credits.grant([7])
    request = engine.add("r", BLOCK)
    admit(engine, request)
    meta = engine.step([(request, BLOCK)])
    save_id = meta.saves[0].save_id
    if how == "reset":
        engine.side.reset()
    if how == "epoch":
        engine.link.session = None
        engine.step()
    engine.acknowledge(meta, failed=[save_id] if how == "failed copy" else [])
    engine.link.stored.append(Stored(save_id=save_id, memory=[7]))
    assert list(connector_of(engine).take_events()) == []


def test_without_kv_events_nothing_is_prepared() -> None:
    engine = Engine()
    engine.daemon.credits.grant([7])
    save_id = saved(engine, 1)
    engine.link.stored.append(Stored(save_id=save_id, memory=[7]))
    assert list(connector_of(engine).take_events()) == []


def test_events_and_sources_reach_vllm_through_multi_connector() -> None:
    engine = Engine(publish=True)
    engine.daemon.credits.grant([7])
    child = connector_of(engine)
    other = SimpleNamespace(take_events=lambda: ["other"])
    parent = object.__new__(MultiConnector)
    parent._connectors = [other, child]
    parent._requests_to_connector = {"r": 1}
    save_id = saved(engine, 1)
    engine.link.stored.append(Stored(save_id=save_id, memory=[7]))
    events = list(parent.take_events())
    assert events[0] == "other"
    assert isinstance(events[1], BlockStored)
    request = loaded(engine, disk=1)
    parent._requests_to_connector = {request.request_id: 1}
    assert parent.get_external_cache_hit_sources(request, 3 * BLOCK) == {
        CacheHitSource.HOST: 2 * BLOCK,
        CacheHitSource.DISK: BLOCK,
    }


def loaded(engine: Engine, *, disk: int | None, local: int = 0, blocks: int = 3) -> Any:
    """A request whose load of blocks [local, blocks) was just dispatched."""
    request = engine.add("hit", blocks * BLOCK + 1, local=local * BLOCK)
    hint = engine.daemon.hint("hit")
    if disk is not None:
        engine.daemon.flags.set_disk(hint.flag, disk)
    engine.daemon.stage("hit", blocks)
    tokens, _ = engine.match(request)
    assert tokens == (blocks - local) * BLOCK
    engine.allocate(request, tokens)
    return request


@pytest.mark.parametrize(
    ("disk", "sources"),
    [
        (0, {CacheHitSource.HOST: 3 * BLOCK}),
        (2, {CacheHitSource.HOST: BLOCK, CacheHitSource.DISK: 2 * BLOCK}),
        (3, {CacheHitSource.DISK: 3 * BLOCK}),
        (None, {CacheHitSource.EXTERNAL_UNSPECIFIED: 3 * BLOCK}),
        (9, {CacheHitSource.DISK: 3 * BLOCK}),
    ],
)
def test_hit_sources_tell_disk_from_memory_and_always_add_up(
    disk: int | None, sources: dict[CacheHitSource, int]
) -> None:
    """vLLM reports a sum that differs as unspecified. What the daemon has not said is not guessed."""
    engine = Engine()
    request = loaded(engine, disk=disk)
    assert connector_of(engine).get_external_cache_hit_sources(request, 3 * BLOCK) == sources


def test_the_source_of_another_request_s_load_is_not_used() -> None:
    engine = Engine()
    loaded(engine, disk=3)
    other = engine.add("other", BLOCK + 1)
    sources = connector_of(engine).get_external_cache_hit_sources(other, BLOCK)
    assert sources == {CacheHitSource.EXTERNAL_UNSPECIFIED: BLOCK}
    assert engine.daemon.flag("hit").state == FlagState.CLAIMED
