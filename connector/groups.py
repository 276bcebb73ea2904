"""The KV groups of a vLLM engine, as rules for what a prefix needs of each; refuse those without such rules."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..shmring.groups import Group, Groups, Kind

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def of_engine(kv_cache_config: KVCacheConfig, hash_tokens: int, *, drafts: bool) -> Groups | None:
    """Return the rules of an engine's groups; None for one group of full attention, of which every block counts.

    Raises ValueError, in one line, for groups that are not served.  `drafts`: the engine drafts tokens from hidden
    states, so that the last block of a prefix would not count.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(kv_cache_config.prefix_cacheable_group_ids) < len(groups):
        raise ValueError(
            "KV groups outside the prefix cache are not served: "
            f"groups={len(groups)} prefix_cacheable={len(kv_cache_config.prefix_cacheable_group_ids)}"
        )
    found = Groups(tuple(_group(each.kv_cache_spec) for each in groups), hash_tokens)
    if [group.kind for group in found.groups] == [Kind.FULL]:
        return None
    found.check()
    if drafts or any(each.is_eagle_group for each in groups):
        raise ValueError(
            "drafts from hidden states are served with one KV group of full attention only: "
            f"groups={len(groups)} kinds={','.join(sorted({group.kind.value for group in found.groups}))}"
        )
    _check_states(kv_cache_config, found)
    return found


def _check_states(kv_cache_config: KVCacheConfig, found: Groups) -> None:
    """Raise ValueError for states in a company in which vLLM's own cache counts otherwise than our rules."""
    states = [group.kind is Kind.STATE for group in found.groups]
    attention = [
        each.kv_cache_spec for each, state in zip(kv_cache_config.kv_cache_groups, states, strict=True) if not state
    ]
    if not any(states):
        return
    # vLLM takes as local what the first group of full attention has, and asks no other group for that prefix.
    if any(group.kind not in (Kind.STATE, Kind.FULL) for group in found.groups) or any(
        spec != attention[0] for spec in attention
    ):
        raise ValueError(
            "states are served beside full attention of one kind only: "
            f"kinds={','.join(group.kind.value for group in found.groups)}"
        )
    for number, group in enumerate(found.groups):
        # vLLM then also counts a prefix that ends inside a block, by a copy of that block.
        if group.kind is Kind.STATE and group.block_tokens > found.hash_tokens:
            raise ValueError(
                f"prefixes that end inside a block of states are not served: group={number} "
                f"block_tokens={group.block_tokens} hash_tokens={found.hash_tokens} (leave prefix_match_unit unset)"
            )


def layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return the specifications of a group's layers: one where all are equal."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return [*spec.kv_cache_specs.values()] if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def padded(kv_cache_config: KVCacheConfig, block_bytes: int) -> list[bool]:
    """Return of each group whether its layers leave bytes of a block unwritten, as states and few layers do."""
    found = []
    for group in kv_cache_config.kv_cache_groups:
        sizes = [_written(spec) for spec in layer_specs(group.kv_cache_spec)]
        found.append(sum(sizes) * len(group.layer_names) // len(sizes) < block_bytes)
    return found


def _written(spec: Any) -> int:
    """Bytes of a block that a layer writes."""
    size: int = dataclasses.replace(spec, page_size_padded=None).page_size_bytes
    return size


def _group(spec: KVCacheSpec) -> Group:
    rules = {_layer(each) for each in layer_specs(spec)}
    if len(rules) > 1:
        raise ValueError(f"layers of one KV group differ: kinds={sorted(f'{kind}:{size}' for kind, _, size in rules)}")
    return rules.pop()


def _layer(spec: Any) -> Group:
    """Return the rules of one layer; its class must be known, as a subclass may have other rules."""
    from vllm.v1 import kv_cache_interface as kinds

    block = spec.block_size
    if type(spec) in (kinds.FullAttentionSpec, kinds.MLAAttentionSpec):
        return Group(Kind.FULL, block)
    if type(spec) in (kinds.SlidingWindowSpec, kinds.SlidingWindowMLASpec):
        # vLLM keeps the extra tokens for drafts, and allocates their blocks for a load, too.
        return Group(Kind.WINDOW, block, spec.sliding_window + spec.extra_retained_tokens)
    if type(spec) is kinds.ChunkedLocalAttentionSpec:
        return Group(Kind.CHUNK, block, spec.attention_chunk_size)
    if type(spec) is kinds.MambaSpec:
        if spec.mamba_cache_mode != "align":
            raise ValueError(f"states are served in one mode only: mamba_cache_mode={spec.mamba_cache_mode} (align)")
        return Group(Kind.STATE, block)
    raise ValueError(f"KV cache of this kind is not served: kv_cache_spec={type(spec).__name__}")
