"""The rules that vLLM's KV groups get, and the groups that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

kinds = pytest.importorskip("vllm.v1.kv_cache_interface")

from kvprefetch.connector import groups  # noqa: E402
from kvprefetch.shmring.groups import Group, Groups, Kind  # noqa: E402

HEADS = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
FULL = kinds.FullAttentionSpec(**HEADS)
MLA = kinds.MLAAttentionSpec(**HEADS)
WINDOW = kinds.SlidingWindowSpec(**HEADS, sliding_window=100)
MLA_WINDOW = kinds.SlidingWindowMLASpec(**HEADS, sliding_window=100)
CHUNK = kinds.ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=128)
STATE = kinds.MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def cache(*specs: Any, eagle: tuple[int, ...] = ()) -> Any:
    """vLLM's configuration of groups with these layers."""
    made = [kinds.KVCacheGroupSpec([f"l{i}"], spec, is_eagle_group=i in eagle) for i, spec in enumerate(specs)]
    return kinds.KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=made)


def uniform(*specs: Any) -> Any:
    return kinds.UniformTypeKVCacheSpecs(
        block_size=specs[0].block_size, kv_cache_specs={f"layer.{i}": spec for i, spec in enumerate(specs)}
    )


@pytest.mark.parametrize("specs", [(FULL,), (MLA,), (uniform(FULL, MLA),)])
def test_one_group_of_full_attention_needs_no_rules(specs: tuple[Any, ...]) -> None:
    assert groups.of_engine(cache(*specs), 32, drafts=True) is None


@pytest.mark.parametrize(
    ("specs", "rules"),
    [
        ((FULL, WINDOW), (Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 100))),
        ((WINDOW,), (Group(Kind.WINDOW, 32, 100),)),
        ((MLA, MLA_WINDOW), (Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 100))),
        ((FULL, CHUNK), (Group(Kind.FULL, 32), Group(Kind.CHUNK, 32, 128))),
        ((FULL, STATE, STATE), (Group(Kind.FULL, 32), Group(Kind.STATE, 32), Group(Kind.STATE, 32))),
        ((uniform(FULL, MLA), uniform(WINDOW, WINDOW)), (Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 100))),
        # vLLM retains these tokens below the window for drafts, and gives a load blocks for them.
        (
            (FULL, dataclasses.replace(WINDOW, extra_retained_tokens=3)),
            (Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 103)),
        ),
    ],
)
def test_groups_get_the_rules_of_their_layers(specs: tuple[Any, ...], rules: tuple[Group, ...]) -> None:
    assert groups.of_engine(cache(*specs), 32, drafts=False) == Groups(rules, 32)


def test_blocks_may_differ_in_size() -> None:
    wide = dataclasses.replace(WINDOW, block_size=64)
    found = groups.of_engine(cache(FULL, wide), 32, drafts=False)
    assert found is not None
    assert found.unit_tokens == 64


@pytest.mark.parametrize(
    ("words", "specs"),
    [
        ("layers of one KV group differ", (FULL, uniform(WINDOW, dataclasses.replace(WINDOW, sliding_window=50)))),
        ("mamba_cache_mode=none", (FULL, dataclasses.replace(STATE, mamba_cache_mode="none"))),
        ("kv_cache_spec=CrossAttentionSpec", (FULL, kinds.CrossAttentionSpec(**HEADS))),
        ("kv_cache_spec=RSWASpec", (FULL, kinds.RSWASpec(**HEADS, rswa_window=8))),
        ("outside the prefix cache .*groups=2 prefix_cacheable=1", (FULL, kinds.CircularBufferSpec(**HEADS))),
        ("no multiple of the hash block: group=1 block_tokens=48", (FULL, dataclasses.replace(WINDOW, block_size=48))),
        (
            "inside a block of states .*block_tokens=64 hash_tokens=32",
            (FULL, dataclasses.replace(STATE, block_size=64)),
        ),
        ("states are served beside full attention of one kind only: kinds=full,window,state", (FULL, WINDOW, STATE)),
        ("states are served beside .*: kinds=full,full,state", (FULL, dataclasses.replace(FULL, head_size=32), STATE)),
        ("window_tokens=100 unit_tokens=32", (FULL, dataclasses.replace(CHUNK, attention_chunk_size=100))),
    ],
)
def test_groups_without_rules_are_refused_in_one_line(words: str, specs: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        groups.of_engine(cache(*specs), 32, drafts=False)
    assert "\n" not in str(refused.value)


def test_drafts_from_hidden_states_need_one_group_of_full_attention() -> None:
    for config, drafts in ((cache(FULL, WINDOW), True), (cache(WINDOW), True), (cache(FULL, FULL, eagle=(1,)), False)):
        with pytest.raises(ValueError, match="drafts from hidden states"):
            groups.of_engine(config, 32, drafts=drafts)


def test_a_subclass_of_a_known_kind_is_not_known() -> None:
    """Its rules may be others, as those of attention sinks are."""
    with pytest.raises(ValueError, match="kv_cache_spec=SinkFullAttentionSpec"):
        groups.of_engine(cache(kinds.SinkFullAttentionSpec(**HEADS, sink_len=4)), 32, drafts=False)
