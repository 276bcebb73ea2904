"""Namespace of a rank's blocks in the store: the prefixes of their keys (kv/keys.py), and the fingerprint in them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...kv.keys import rank_prefix, with_fingerprint
from ..engine import groups
from ..engine.geometry import stage_of
from . import built, checkpoint, fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from .start import Start

log = logging.getLogger("vllm.kvprefetch")


@dataclass(frozen=True)
class RankKeys:
    """`prefixes`: those of vLLM's own connector for each KV group, unless its ranks are counted in another way.

    `replicas` ranks hold the same bytes of all groups under the same keys; this one fills the save slots with
    slot % replicas == replica_index.  `shards`: where vLLM's own connector has other replicas, into how many parts the
    ranks divide each group, for the fingerprint.
    """

    prefixes: tuple[str, ...]
    replicas: int
    replica_index: int
    shards: str = ""


def rank_keys(
    *,
    model: str,
    tp_rank: int,
    stage: tuple[int, int, int] = (0, 0, 0),
    replicas: Sequence[int] = (1,),
    cache_prefix: str = "",
    shards: str = "",
) -> RankKeys:
    """Return the keys of one rank; `stage`: its pp_rank, pcp_rank and dcp_rank.

    `replicas`: for each KV group the number of neighbouring ranks that hold the same bytes.  The smallest divides the
    others.
    """
    pp_rank, *context = stage
    prefixes = tuple(
        rank_prefix(
            model, tp_rank=tp_rank // each, pp_rank=pp_rank, group=group, cache_prefix=cache_prefix, context=context
        )
        for group, each in enumerate(replicas)
    )
    return RankKeys(prefixes, min(replicas), tp_rank % min(replicas), shards)


def keys_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    tp_rank: int,
    cache_prefix: str,
    worker: Any = None,
    *,
    upstream_keys: bool = False,
) -> RankKeys:
    """The store keys of this process's rank, of each KV group. `worker`: vLLM's, if it is known.

    Raises ValueError where ranks with one key of vLLM's own connector (`upstream_keys`) hold unlike bytes.
    """
    parallel, (stage, pcp_rank) = vllm_config.parallel_config, stage_of(vllm_config)
    pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    if upstream_keys and pcp > 1 and max(dcp, parallel.pipeline_parallel_size) > 1:
        raise ValueError(
            'KVPrefetchConnector: key_format "vllm" cannot serve prefill context parallelism together with decode '
            "context parallelism or pipeline stages, whose ranks vLLM's own connector counts wrong: "
            f"prefill_context_parallel_size={pcp} decode_context_parallel_size={dcp} "
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} (leave key_format out)"
        )
    theirs = [_upstream_replicas(vllm_config, group) for group in kv_cache_config.kv_cache_groups]
    replicas, shards, ranks = theirs, "", parallel.tensor_parallel_size
    if max(theirs) > 1:
        heads = built.head_replicas(worker, vllm_config.compilation_config.static_forward_context)
        held = [_replicas(vllm_config, group, heads) for group in kv_cache_config.kv_cache_groups]
        mixed = [group for group, each in enumerate(held) if each is not None and each % theirs[group]]
        if upstream_keys and mixed:
            raise ValueError(
                'KVPrefetchConnector: key_format "vllm" cannot serve this model: its layers have unlike numbers of KV '
                f"heads, and ranks with other heads would have one key: model={vllm_config.model_config.model} "
                f"ranks={ranks} group={mixed[0]} (leave key_format out)"
            )
        if not upstream_keys:
            replicas = [
                1 if mine is None else math.gcd(upstream, mine) for upstream, mine in zip(theirs, held, strict=True)
            ]
            if any(each % min(replicas) for each in replicas):
                replicas = [math.gcd(*replicas)] * len(replicas)
        if replicas != theirs:
            shards = ",".join(str(ranks // each) for each in replicas)
    return rank_keys(
        model=vllm_config.model_config.model,
        tp_rank=tp_rank,
        stage=(stage, pcp_rank, (tp_rank * pcp + pcp_rank) % dcp),
        replicas=replicas,
        cache_prefix=cache_prefix,
        shards=shards,
    )


def _upstream_replicas(vllm_config: VllmConfig, group: KVCacheGroupSpec) -> int:
    """The number of neighbours with equal KV, as upstream's _spec_tp_replication_factor."""
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

    ranks: int = vllm_config.parallel_config.tensor_parallel_size
    specs = groups.layer_specs(group.kv_cache_spec)
    if vllm_config.parallel_config.decode_context_parallel_size > 1 or any(isinstance(one, MambaSpec) for one in specs):
        return 1
    if all(isinstance(one, (MLAAttentionSpec, SlidingWindowMLASpec)) for one in specs):
        return ranks
    heads: int = vllm_config.model_config.get_total_num_kv_heads()
    return max(1, ranks // heads)


def _replicas(vllm_config: VllmConfig, group: KVCacheGroupSpec, heads: Mapping[str, int]) -> int | None:
    """The number of neighbours with equal KV in each layer, or None. `heads`: built.head_replicas."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    ranks = vllm_config.parallel_config.tensor_parallel_size
    found = [
        ranks if isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)) else heads.get(layer)
        for layer, spec in groups.specs_by_layer(group).items()
    ]
    return None if None in found else math.gcd(*filter(None, found))


class Namespace(NamedTuple):
    """`fingerprint` is empty for vLLM's own keys, which keep no engine out. `unknown`: why there is no fingerprint."""

    prefixes: tuple[str, ...]
    fingerprint: dict[str, str]
    unknown: str = ""


def fingerprinted(
    vllm_config: VllmConfig, keys: RankKeys, running: Callable[[], Mapping[str, str]], start: Start
) -> Namespace:
    """Return the namespace that only engines with equal KV share. Reads the model's files.

    `running` returns the rank's part of the fingerprint.  On an error in it or in the rest, the namespace belongs to
    this engine start alone.
    """
    found, digits, unknown = dict[str, str](), start.incarnation, ""
    try:
        found = fingerprint.fitting({**running(), **fingerprint.of_model(vllm_config, start.configured_ns)})
        found |= {"kv_shards": keys.shards} if keys.shards else {}
        digits = fingerprint.digest(found)
    except Exception as error:
        unknown = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        if isinstance(error, OSError):  # our own errors name their cures
            unknown += f" {checkpoint.READABLE}"
    return Namespace(tuple(with_fingerprint(prefix, digits) for prefix in keys.prefixes), found, unknown)


def log_sharing(where: Namespace, *, first_rank: bool) -> None:
    """Log which engines share this one's stored KV. Ranks nearly always agree, so the others log less."""
    if where.unknown:
        log.log(
            logging.WARNING if first_rank else logging.INFO,
            "kvprefetch: no other engine start finds the KV that this one stores, because its fingerprint is not known"
            ': %s. If that must stay, and every engine with this model name has the same KV, set key_format to "vllm"',
            where.unknown,
        )
    elif first_rank and where.fingerprint:
        text = " ".join(f"{name}={value}" for name, value in sorted(where.fingerprint.items()))
        log.info("kvprefetch: stored KV is shared with engines that have all of this: %s", text)
    elif first_rank:
        log.warning(
            'kvprefetch: key_format is "vllm": every engine with keys that begin with %s shares the stored KV, and '
            "nothing checks that its KV is the same: give each kind of engine (weights, configuration, dtype, layout, "
            "parallel split) a cache_prefix of its own",
            where.prefixes[0],
        )
