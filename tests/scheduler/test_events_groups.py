"""KV events of engines with several KV groups, against those that vLLM's own cache publishes of the same blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.scheduler.engine import Engine
from tests.scheduler.schedules import truth_of
from tests.scheduler.shape import Shape, Site
from tests.scheduler.test_schedules_groups import LAYOUTS
from tests.support.waiting import eventually


@pytest.mark.shows("KV events", "full attention and sliding windows")
@pytest.mark.parametrize("layout", ["unlike blocks", "window and chunk"])
def test_each_stored_block_is_announced_as_the_engines_own_cache_does(site: Site, layout: str) -> None:
    groups, retention = LAYOUTS[layout]
    shape = Shape(groups=groups, retention=retention, events=True, blocks=60)
    engine = Engine(shape, site, truth_of(shape))
    published: list[BlockStored] = []
    engine.scheduler.kv_event_publisher = SimpleNamespace(
        publish=lambda batch: published.extend(batch.events), shutdown=lambda: None
    )
    try:
        engine.add(list(range(40)), 6, cache_salt="salt")
        engine.run(60)

        def announced() -> bool:
            engine.add([7, 7, 7], 1)  # events are taken with steps
            engine.run(4)
            return sum(event.medium == MEDIUM_CPU for event in published) == engine.side.counters["save_blocks"]

        eventually(announced, 20, "the events of all saved blocks")
    finally:
        engine.drain()
        engine.close()
    ours = [event for event in published if event.medium == MEDIUM_CPU]
    theirs = {
        (event.group_idx, digest, event.block_size, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, extra)
        for event in published
        if event.medium == MEDIUM_GPU
        for digest, extra in zip(event.block_hashes, event.extra_keys or (), strict=True)
    }
    assert engine.oracle is not None
    prompts = {maybe_convert_block_hash(digest): tokens for digest, tokens in engine.oracle.tokens.items()}
    assert {event.group_idx for event in ours} == set(range(len(groups.groups)))
    assert {extra for event in ours for extra in event.extra_keys or ()} == {("salt",), None}
    for event in ours:
        [digest], [extra] = event.block_hashes, event.extra_keys or ()
        size, tokens = groups.groups[event.group_idx or 0].block_tokens, prompts[digest]
        about = (size, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window, extra)
        assert (event.group_idx, digest, *about) in theirs
        assert (event.block_size, tuple(event.token_ids)) == (size, tokens[-size:])
        assert prompts.get(event.parent_block_hash, ()) == tokens[:-size]
