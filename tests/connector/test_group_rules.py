"""Rules of KV groups against vLLM's own: its MooncakeStoreConnector's coordinator, over generated groups."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvprefetch.connector.engine.groups import of_engine
from kvprefetch.kv import prompts as search
from kvprefetch.kv.groups import Group, Groups, Kind
from tests.support.kv_groups import layouts

coordinator = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator")

from vllm.v1 import kv_cache_interface as kinds  # noqa: E402

from tests.scheduler.shape import layer_spec  # noqa: E402

LONGEST = 12  # units of a prompt


def upstream(groups: Groups, mla: bool, wrapped: bool, retention: int | None = None) -> Any:
    specs = []
    for i, one in enumerate(groups.groups):
        layer = layer_spec(one, mla=mla)
        if wrapped:
            layer = kinds.UniformTypeKVCacheSpecs(block_size=one.block_tokens, kv_cache_specs={"layer": layer})
        specs.append(kinds.KVCacheGroupSpec([f"l{i}"], layer, is_eagle_group=one.drafts))
    return coordinator.MooncakeStoreCoordinator(
        specs, groups.unit_tokens, groups.hash_tokens, retention_interval=retention
    )


def numbers(mask: list[bool] | None, blocks: range) -> list[int]:
    """The numbers of the blocks that a mask of upstream's names; None names all."""
    assert mask is None or len(mask) == len(blocks)
    return [block for i, block in enumerate(blocks) if mask is None or mask[i]]


Prompt = tuple[Groups, int, int, int]
Shape = tuple[bool, bool]
prompts = st.tuples(layouts(), st.integers(0, LONGEST), st.integers(0, LONGEST), st.integers(0, 11))
shapes = st.tuples(st.booleans(), st.booleans())


def longest(groups: Groups, hashes: list[bytes], local: int, usable: int, exists: set[tuple[int, bytes]]) -> int:
    """The tokens of the longest prefix, as a request finds them by asking for three blocks at a time."""
    unit = groups.unit_tokens
    blocks = range(local // unit, groups.blocks(usable // groups.hash_tokens))
    if not blocks:
        return local
    digests = b"".join(hashes[: groups.digests(blocks.stop)])
    asks = search.Prompt(groups, digests, blocks, room=10_000, staged=lambda _: False)
    while names := asks.next(3):
        asks.found(bytes((name[-1], name[:-1]) in exists for name in names), b"")
    return asks.choose().blocks * unit


@given(prompts, shapes, st.randoms(use_true_random=False), st.floats(0.4, 1))
def test_the_longest_prefix_is_upstreams(prompt: Prompt, shape: Shape, random: Random, share: float) -> None:
    """What the engine's own cache has counts as if the store had it, too.

    With drafts upstream drops too much of a window whose blocks are smaller than the unit, at a prompt's begin, and
    with three kinds of groups it forgets a window's proof when another group shortens the prefix.
    """
    groups, local, more, rest = prompt
    unit = groups.unit_tokens
    small = any(one.drafts and one.kind is Kind.WINDOW and one.block_tokens < unit for one in groups.groups)
    assume(not small and (not groups.proof_tokens or len(set(groups.groups)) < 3))
    local, usable = local * unit, (local + more) * unit + rest
    hashes = [bytes([i]) * 4 for i in range(usable // groups.hash_tokens)]
    exists = set()
    for number, group in enumerate(groups.groups):
        there = [
            each < local // group.block_tokens or random.random() < share
            for each in range(usable // group.block_tokens)
        ]
        exists |= {
            (number, hashes[index]) for index in ((np.flatnonzero(there) + 1) * groups.ratio(number) - 1).tolist()
        }
    ours = upstream(groups, *shape)
    pool = coordinator.ExternalCachedBlockPool(groups.hash_tokens, exists)
    _, theirs = ours.find_longest_cache_hit(hashes, ours.align_lookup_length(usable), pool)
    assert longest(groups, hashes, local, usable, exists) == (max(theirs, local) if groups.proof_tokens else theirs)


@given(prompts, shapes)
def test_the_items_of_a_prefix_are_upstreams_load_mask(prompt: Prompt, shape: Shape) -> None:
    groups, local, more, _ = prompt
    unit = groups.unit_tokens
    local, tokens = local * unit, (local + more) * unit
    hashes = [bytes([i]) * 4 for i in range(tokens // groups.hash_tokens)]
    masks = upstream(groups, *shape).load_mask(hashes, tokens)
    for group, blocks, mask in zip(groups.groups, groups.items(local, tokens), masks, strict=True):
        loaded = numbers(mask, range(len(mask)))
        assert list(blocks) == [block for block in loaded if block >= local // group.block_tokens]


@given(prompts, shapes, st.integers(1, 200), st.sampled_from([None, 0, 1, 2, 5]))
def test_saves_are_upstreams_store_mask(prompt: Prompt, shape: Shape, prefill: int, retention: int | None) -> None:
    """With drafts vLLM 0.31 keeps a window in front of the prompt's end, where nothing can prove it."""
    groups, before, more, _ = prompt
    assume(not groups.proof_tokens or hasattr(coordinator, "replay_boundaries"))
    unit = groups.unit_tokens
    before, after = before * unit, (before + more) * unit
    kept = None if retention is None else retention * unit
    masks = upstream(groups, *shape, retention=kept).store_mask(after, before, prefill)
    for group, blocks, mask in zip(groups.groups, groups.saved(before, after, prefill, kept), masks, strict=True):
        assert list(blocks) == numbers(mask, range(before // group.block_tokens, after // group.block_tokens))


@given(st.integers(1, 5), st.integers(2, 40), st.integers(1, 20), st.randoms(use_true_random=False))
def test_tokens_below_a_window_are_covered_as_upstream_does_from_0_33_on(
    blocks: int, window: int, extra: int, random: Random
) -> None:
    """Upstream's earlier releases count prefixes whose blocks vLLM allocates for a load, and which nothing fills."""
    size = 8
    full = layer_spec(Group(Kind.FULL, size))
    below = replace(layer_spec(Group(Kind.WINDOW, size, window)), extra_retained_tokens=extra)
    made = [kinds.KVCacheGroupSpec([f"l{i}"], each) for i, each in enumerate((full, below))]
    config = kinds.KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=made)
    rules = of_engine(config, size, drafts=False)
    assert rules is not None
    usable = 4 * blocks * size
    hashes = [bytes([i]) * 4 for i in range(usable // size)]
    present = [np.array([random.random() < 0.8 for _ in hashes], dtype=np.bool_) for _ in made]
    exists = {(group, hashes[i]) for group, there in enumerate(present) for i in np.flatnonzero(there)}
    theirs = coordinator.MooncakeStoreCoordinator(made, size, size)
    _, hit = theirs.find_longest_cache_hit(hashes, usable, coordinator.ExternalCachedBlockPool(size, exists))
    ours = longest(rules, hashes, 0, usable, exists)
    if hasattr(coordinator, "_coverage_spec"):
        assert ours == hit
    else:
        assert ours <= hit
