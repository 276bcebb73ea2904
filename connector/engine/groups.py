"""The KV groups of a vLLM engine, as rules for what a prefix needs of each; refuse those without such rules.

Groups outside vLLM's prefix cache get none: nobody hashes, saves or loads their blocks.  After a hit vLLM computes them
anew: a window from the hit's last tokens (bounded replay), and a ring, which holds what is not compressed yet, from the
next token on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ...kv.groups import Group, Groups, Kind
from ...shmring.wire.attach import MAX_BORDERS
from . import compat

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec

# How many parts of a state vLLM copies with it, by the kind of layer; it is not known of other kinds.
_STATE_PARTS = {"MAMBA1": 2, "MAMBA2": 2, "GDN_ATTN": 2, "SHORT_CONV": 1, "LINEAR": 1}


def of_engine(kv_cache_config: KVCacheConfig, hash_tokens: int, *, drafts: bool, shards: int = 1) -> Groups:
    """Return the rules of an engine's groups.

    Raises ValueError, in one line, for groups that are not served.  `drafts`: the engine drafts tokens from hidden
    states (EAGLE, MTP), so that vLLM drops the last block of a prefix; `shards`: ranks that share a block's tokens, by
    decode context parallelism.
    """
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_cache_spec

    groups, cached = kv_cache_config.kv_cache_groups, kv_cache_config.prefix_cacheable_group_ids
    for number, each in enumerate(groups):
        if number not in cached and not all(map(compat.computed_anew, layer_specs(each.kv_cache_spec))):
            names = ",".join(sorted({type(one).__name__ for one in layer_specs(each.kv_cache_spec)}))
            raise ValueError(
                f"KV cache of this kind, outside the prefix cache, is not served: group={number} kv_cache_spec={names}"
            )
    # As vLLM decides which groups have a drafter's KV: all where it flags none; equal ones are looked up as one.
    none = not any(each.is_eagle_group for each in groups)
    flagged = [each.kv_cache_spec for each in groups if each.is_eagle_group or (drafts and none)]
    specs = [resolve_dcp_kv_cache_spec(each.kv_cache_spec, shards) for each in groups]
    rules = (_group(specs[number], drafts=groups[number].kv_cache_spec in flagged) for number in cached)
    found = Groups(tuple(rules), hash_tokens)
    found.check()
    # vLLM cuts hits to whole blocks of all groups.
    if rest := [each.block_size for each in specs if found.unit_tokens % each.block_size]:
        raise ValueError(
            "blocks of KV groups outside the prefix cache must divide those of the others: "
            f"block_tokens={rest[0]} unit_tokens={found.unit_tokens}"
        )
    for number, group in enumerate(found.groups):
        # vLLM then also counts a prefix that ends inside a block, by a copy of that block.
        longest = group.block_tokens if shards == 1 else found.unit_tokens
        if group.kind is Kind.STATE and longest > found.hash_tokens:
            raise ValueError(
                f"prefixes that end inside a block of states are not served: group={number} "
                f"block_tokens={longest} hash_tokens={found.hash_tokens} (leave prefix_match_unit unset; "
                "other groups' blocks must be multiples of it)"
            )
    return found


def served(kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """Return the configuration with the groups of the prefix cache alone: all that is saved and loaded."""
    chosen = [kv_cache_config.kv_cache_groups[number] for number in kv_cache_config.prefix_cacheable_group_ids]
    return dataclasses.replace(kv_cache_config, kv_cache_groups=chosen)


def layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Return the specifications of a group's layers: one where all are equal."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    return [*spec.kv_cache_specs.values()] if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def specs_by_layer(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    """Return the specification of each layer of a group, without layers that share another one's KV."""
    spec = group.kv_cache_spec
    found: dict[str, KVCacheSpec] = getattr(spec, "kv_cache_specs", dict.fromkeys(group.layer_names, spec))
    return {layer: found[layer] for layer in group.layer_names if layer in found}


def written(
    kv_cache_config: KVCacheConfig, places: Mapping[str, Sequence[tuple[int, int]]], block_bytes: int, *, drafts: int
) -> list[list[int]]:
    """Return, for each group, which bytes of a block's value its layers write in any case (`WorkerInfo.written`).

    `places`: of the paged cache (`PagedCache.places`); `drafts`: tokens that a step drafts at most.  Of more stretches
    than a hello takes, the longest.
    """
    found: list[list[tuple[int, int]]] = []
    for group in kv_cache_config.kv_cache_groups:
        stretches = []
        for layer, spec in specs_by_layer(group).items():
            if hasattr(spec, "shapes"):
                start, _ = places[layer][0]
                stretches += [(start + begin, start + end) for begin, end in _state(spec, drafts)]
            else:
                stretches += [(start, start + length) for start, length in places[layer]]
        found.append(_joined(stretches))
    if all(each == [(0, block_bytes)] for each in found):
        return []
    longest = sorted((begin - end, group, begin) for group, each in enumerate(found) for begin, end in each)
    kept = {(group, begin) for _, group, begin in longest[: MAX_BORDERS // 2]}
    return [
        [border for begin, end in each if (group, begin) in kept for border in (begin, end)]
        for group, each in enumerate(found)
    ]


def _state(spec: MambaSpec, drafts: int) -> list[tuple[int, int]]:
    """Return which bytes of a state's page have a value once the state is computed, as (begin, end).

    vLLM keeps the parts one after the other, and copies the first ones only: the convolution's, and the state proper.
    Others, which its kernels keep for drafted tokens, may never be written.  Nor may the convolution's last rows, one
    for each drafted token; where its rows are the inner dimension, written bytes stand between them.
    """
    found, at = list[tuple[int, int]](), 0
    kind = getattr(spec.mamba_type, "name", "")
    for part, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
        size = prod(shape) * dtype.itemsize
        if part < _STATE_PARTS.get(kind, 0):
            inner_rows = kind == "LINEAR" or part > 0 or shape[0] >= shape[-1]
            rows = shape[0] if inner_rows else max(shape[0] - drafts, 0)
            found.append((at, at + size // shape[0] * rows))
        at += size
    return found


def _joined(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the stretches in order, those that touch or overlap as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(each for each in stretches if each[0] < each[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _group(spec: KVCacheSpec, *, drafts: bool) -> Group:
    rules = {_layer(each) for each in layer_specs(spec)}
    if len(rules) > 1:
        kinds = sorted(f"{rule.kind}:{rule.window_tokens}" for rule in rules)
        raise ValueError(f"layers of one KV group differ: kinds={kinds}")
    rule = rules.pop()
    return rule._replace(drafts=drafts and rule.kind is not Kind.STATE)


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
