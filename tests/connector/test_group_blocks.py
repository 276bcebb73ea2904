"""The blocks that vLLM's own manager allocates for a load, against the items of its prefix."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytest.importorskip("vllm.v1.core.kv_cache_manager")

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.kv.groups import Group, Groups, Kind
from tests.scheduler.shape import layer_spec
from tests.support.kv_groups import layouts

names = map(str, itertools.count())


def manager_of(groups: Groups, retention: int | None = None) -> Any:
    made = [KVCacheGroupSpec([f"l{i}"], layer_spec(one)) for i, one in enumerate(groups.groups)]
    config = KVCacheConfig(
        num_blocks=2000, kv_cache_tensors=[], kv_cache_groups=made, prefix_cache_retention_interval=retention
    )
    return KVCacheManager(config, 1 << 16, groups.unit_tokens, groups.hash_tokens)


def a_request(groups: Groups, tokens: int, shared: int = 1 << 16) -> Any:
    """A prompt whose first `shared` tokens all prompts have."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(groups.hash_tokens, sha256)
    return Request(
        next(names),
        [i if i < shared else -i for i in range(tokens)],
        SamplingParams(max_tokens=1),
        None,
        block_hasher=hasher,
    )


def servable(groups: Groups) -> bool:
    """Of one group vLLM hashes whole blocks."""
    return len(groups.groups) > 1 or groups.unit_tokens == groups.hash_tokens


@given(layouts().filter(servable), st.integers(0, 9), st.integers(1, 9), st.integers(1, 20))
def test_a_load_fills_all_that_vllm_gave_it_and_what_is_local_is_whole(
    groups: Groups, cached: int, more: int, rest: int
) -> None:
    """In every group: blocks before the first one needed are null, local ones are there, and the items are new."""
    manager, unit = manager_of(groups), groups.unit_tokens
    if cached:
        first = a_request(groups, cached * unit)
        assert manager.allocate_slots(first, cached * unit) is not None
        manager.free(first)
        manager.new_step_starts()
    request = a_request(groups, (cached + more) * unit + rest)
    found = manager.get_computed_blocks(request)
    local, cache = found[1], {block for table in found[0].get_block_ids() for block in table} | {0}
    assert local % unit == 0
    tokens = (cached + more) * unit
    assume(local < tokens)  # of chunks alone vLLM counts those that ended as local, although nothing is cached
    assert manager.allocate_slots(
        request,
        0,
        num_new_computed_tokens=local,
        new_computed_blocks=found[0],
        num_external_computed_tokens=tokens - local,
        delay_cache_blocks=True,
    )
    loaded: set[int] = set()
    for group, items, table in zip(
        groups.groups, groups.items(local, tokens), manager.get_block_ids(request.request_id), strict=True
    ):
        needed = next(iter(Groups((group,), group.block_tokens).items(0, tokens)))
        assert not any(table[: needed.start])
        assert all(table[block] in cache - {0} for block in needed if block not in items)
        new = {table[block] for block in items}
        assert len(new) == len(items)
        assert not new & (cache | loaded)
        loaded |= new


@pytest.mark.parametrize(("asks", "local"), [("get_computed_blocks", 0), ("get_computed_blocks_for_connector", 24)])
def test_what_vllm_counts_as_local_for_this_connector_is_there_in_all_groups(asks: str, local: int) -> None:
    """A connector that says it completes others, too, is asked behind the full attention that there is.

    Here its window and its state are gone; the items of a longer prefix would leave out what counts as local.
    """
    groups = Groups((Group(Kind.FULL, 4), Group(Kind.WINDOW, 4, 9), Group(Kind.STATE, 4)), 4)
    manager = manager_of(groups, retention=0)
    first = a_request(groups, 40)
    assert manager.allocate_slots(first, 40) is not None
    manager.free(first)
    manager.new_step_starts()
    found = getattr(manager, asks)(a_request(groups, 40, shared=24))
    assert found[1] == local
    assert not any(found[0].get_block_ids()[1])
    assert not KVPrefetchConnector.supports_divergent_local_hybrid_hits.fget(None)
