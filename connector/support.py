"""Check vLLM's configuration, take our numbers from it, build the hellos; refuse engines that cannot be served."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..shmring.wire.attach import HASH_PROBE_TOKENS, GroupInfo, Hello, SchedulerInfo, WorkerInfo
from ..shmring.wire.records import MAX_HASH_BYTES, PROTOCOL, hint_bytes
from . import compat, groups
from .namespace import RankKeys, rank_keys
from .resets import Weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from ..kv.groups import Group, Groups
    from .metadata import KVPrefetchNode

# Of the running kernel: containers of one node have the same one. See random(4).
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = uuid.UUID("8f5a6b0e-6a5c-5f0e-9d9b-2f3f1d6c9a41")


@dataclass(frozen=True)
class Geometry:
    """Numbers of one engine. Sizes in tokens or bytes; `block_bytes` is one rank's share of a block.

    A block is the unit of all KV groups.  `max_running`: requests that run at a time.  `spec_kinds`: of each group the
    kind of cache and the window in vLLM's KV events.  `retention`: vLLM's prefix_cache_retention_interval.
    """

    groups: Groups
    world_size: int
    block_bytes: int
    max_blocks: int
    max_running: int
    loads: bool
    saves: bool
    # EAGLE-like drafters: the draft KV of the last matched block depends on the next token, which no hash covers.
    drop_last: bool
    spec_kinds: tuple[tuple[str, int | None], ...]
    # Data-parallel ranks of a mixture of experts step together: each waits for whatever another does between steps.
    lockstep: bool
    retention: int | None = None

    @cached_property
    def block_tokens(self) -> int:
        return self.groups.unit_tokens

    @cached_property
    def hashes_per_block(self) -> int:
        return self.groups.unit_tokens // self.groups.hash_tokens


def check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ValueError, in one line, for an engine this connector cannot serve correctly."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    if vllm_config.model_config.is_encoder_decoder:
        raise _refused(f"encoder-decoder models are not served: model={vllm_config.model_config.model}")
    if not vllm_config.cache_config.enable_prefix_caching:
        raise _refused(
            "prefix caching must be on: enable_prefix_caching=False (vLLM turns it off where output is wrong with KV "
            "that another request computed)"
        )
    parallel = vllm_config.parallel_config
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            raise _refused(f"context parallelism is not served: {name}={size} max=1")
    launcher = parallel.distributed_executor_backend
    if parallel.world_size > 1 and (launcher == "external_launcher" or parallel.nnodes_within_dp > 1):
        # A scheduler of its own for each rank, or a daemon of its own for each node.
        raise _refused(
            "an engine's ranks must be on one node, and started by vLLM: "
            f"distributed_executor_backend={launcher} nnodes={parallel.nnodes} world_size={parallel.world_size}"
        )
    if launcher == "ray" and parallel.pipeline_parallel_size > 1 and not compat.ray_reports_all_stages():
        raise _refused(
            "vLLM's older Ray executor returns the reports of the last pipeline stage only, so that no load would "
            f"ever be complete: pipeline_parallel_size={parallel.pipeline_parallel_size} max=1 "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 (set it to 1, vLLM's default)"
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise _refused(
            "sleep mode is not served: enable_sleep_mode=True (no test has put an engine with a GPU to sleep while its "
            "KV was being copied)"
        )
    if parallel.enable_fault_tolerance:
        raise _refused(
            "fault tolerance is not served: enable_fault_tolerance=True (after a step that failed the engine goes on "
            "with blocks in its cache that the step did not fill)"
        )
    if vllm_config.aux_output_config.enabled:
        raise _refused(
            "routed experts are not known for tokens with loaded KV: enable_return_routed_experts=True (the engine "
            "would end when a request asks for them)"
        )
    if kv_cache_config.hisparse_host_num_blocks is not None:
        raise _refused("host-resident KV caches are not served: hisparse_host_num_blocks is set")
    _check_groups(vllm_config, kv_cache_config)
    inline_scales = any(
        isinstance(one, AttentionSpec) and one.kv_quant_mode.is_per_token_head for one in _layer_specs(kv_cache_config)
    )
    if inline_scales and not vllm_config.kernel_config.enable_jit_warmup:
        raise _refused(
            "per-token-head KV scales are not served without the kernels' warm-up: enable_jit_warmup=False (as with "
            "enforce_eager; the engine's first step overwrites the scales of what was loaded)"
        )


def this_node() -> KVPrefetchNode:
    """The node of this process; its boot id is "" where it cannot be read."""
    from .metadata import KVPrefetchNode

    try:
        return KVPrefetchNode(BOOT_ID.read_text().strip(), socket.gethostname())
    except OSError:
        return KVPrefetchNode("", socket.gethostname())


def check_ranks(vllm_config: VllmConfig) -> None:
    """Raise ValueError, in one line, on a rank that is not on the node of its engine's other ranks.

    All ranks call it at the same time.  Whatever launched them, and also where MultiConnector hides our handshake.
    """
    from torch.distributed import all_gather_object
    from vllm.distributed import get_pp_group, get_tp_group

    here = this_node()
    for name, group in (("tp_rank", get_tp_group()), ("pp_rank", get_pp_group())):
        nodes: list[Any] = [None] * group.world_size
        all_gather_object(nodes, here, group=group.cpu_group)
        for rank, node in enumerate(nodes):
            _check_node(vllm_config, f"{name}={rank}", node, f"{name}={group.rank_in_group}", here)


def check_nodes(vllm_config: VllmConfig, here: KVPrefetchNode, ranks: Mapping[tuple[int, int], KVPrefetchNode]) -> None:
    """Raise ValueError, in one line, where a rank runs on another node than `here`, the scheduler's.

    `ranks` has keys (pp_rank, tp_rank). Ray places ranks at their creation, so the configuration cannot say.
    """
    for (pp_rank, tp_rank), node in sorted(ranks.items(), key=lambda each: each[0]):
        _check_node(vllm_config, f"pp_rank={pp_rank} tp_rank={tp_rank}", node, "scheduler", here)


def _check_node(vllm_config: VllmConfig, rank: str, node: KVPrefetchNode, other: str, here: KVPrefetchNode) -> None:
    if node.boot_id and here.boot_id and node.boot_id != here.boot_id:
        raise _refused(
            "an engine's ranks must be on the node of its scheduler, as they share memory with one daemon: "
            f"{rank} is on node={node.hostname}, {other} on node={here.hostname}, "
            f"distributed_executor_backend={vllm_config.parallel_config.distributed_executor_backend} "
            "(give an engine no more ranks than one node has GPUs; data-parallel engines may be on other nodes)"
        )


def _check_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Accept groups with rules; of several, the refusal says how vLLM can make one group."""
    from vllm.v1 import kv_cache_interface as kinds

    found = {type(one) for one in _layer_specs(kv_cache_config)}
    full = {kinds.FullAttentionSpec, kinds.MLAAttentionSpec}
    windowed = {kinds.SlidingWindowSpec, kinds.SlidingWindowMLASpec, kinds.ChunkedLocalAttentionSpec}
    count = len(kv_cache_config.kv_cache_groups)
    # Beside full attention vLLM can keep windows as if they were, all their blocks.
    advice = " (start vLLM with --disable-hybrid-kv-cache-manager)"
    advice = advice if count > 1 and found & full and found <= full | windowed else ""
    try:
        _rules(vllm_config, kv_cache_config)
    except ValueError as error:
        raise _refused(f"{error}{advice}") from None


def _rules(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Groups:
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return groups.of_engine(kv_cache_config, hash_tokens, drafts=_drops_last(vllm_config))


def _drops_last(vllm_config: VllmConfig) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.use_eagle_block_drop())


def drafted_tokens(vllm_config: VllmConfig) -> int:
    """Return how many tokens a step drafts at most."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or 0)


def geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Geometry:
    """The numbers of a configuration that `check` accepted."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    transfer, rules = vllm_config.kv_transfer_config, _rules(vllm_config, kv_cache_config)
    return Geometry(
        groups=rules,
        world_size=vllm_config.parallel_config.world_size,
        # All layers of all blocks lie in one allocation, whose size each of its tensors names.
        block_bytes=kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks,
        max_blocks=max(1, vllm_config.model_config.max_model_len // rules.unit_tokens),
        max_running=vllm_config.scheduler_config.max_num_seqs,
        loads=transfer.is_kv_consumer,
        saves=transfer.is_kv_producer,
        drop_last=_drops_last(vllm_config),
        spec_kinds=tuple(
            (get_kv_cache_spec_kind(each.kv_cache_spec).value, get_kv_cache_spec_sliding_window(each.kv_cache_spec))
            for each in kv_cache_config.kv_cache_groups
        ),
        # vLLM tells ranks that need not step together that there is but one (EngineCoreProc.run_engine_core).
        lockstep=vllm_config.parallel_config.data_parallel_size > 1,
        retention=kv_cache_config.prefix_cache_retention_interval,
    )


def _layer_specs(kv_cache_config: KVCacheConfig) -> list[KVCacheSpec]:
    """Cache specs of the layers: one per group of equal layers."""
    return [one for group in kv_cache_config.kv_cache_groups for one in groups.layer_specs(group.kv_cache_spec)]


def keys_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, tp_rank: int, cache_prefix: str) -> RankKeys:
    """The store keys of this process's rank, of each KV group."""
    return rank_keys(
        model=vllm_config.model_config.model,
        tp_rank=tp_rank,
        pp_rank=_pp_rank(vllm_config),
        replicas=_replicas(vllm_config, kv_cache_config),
        cache_prefix=cache_prefix,
    )


def _replicas(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[int]:
    """The number of neighbours with equal KV, for each group. As upstream's _spec_tp_replication_factor."""
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowMLASpec

    ranks = vllm_config.parallel_config.tensor_parallel_size
    found = []
    for group in kv_cache_config.kv_cache_groups:
        specs = groups.layer_specs(group.kv_cache_spec)
        shards = vllm_config.model_config.get_total_num_kv_heads()
        if any(isinstance(one, MambaSpec) for one in specs):
            shards = ranks
        elif all(isinstance(one, (MLAAttentionSpec, SlidingWindowMLASpec)) for one in specs):
            shards = 1
        found.append(max(1, ranks // shards))
    return found


def _pp_rank(vllm_config: VllmConfig) -> int:
    parallel = vllm_config.parallel_config
    rank: int = parallel.rank // parallel.tensor_parallel_size % parallel.pipeline_parallel_size
    return rank


def publishes_events(vllm_config: VllmConfig) -> bool:
    """Whether this engine publishes KV events."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def incarnation(vllm_config: VllmConfig) -> str:
    """An id of one engine start, the same in all its processes.

    engine_id has the data-parallel suffix before the workers are spawned; instance_id is the configuration's creation
    time (ns).  Both reach the workers inside the pickled configuration.
    """
    text = f"{vllm_config.kv_transfer_config.engine_id}\0{vllm_config.instance_id}"
    return uuid.uuid5(_NAMESPACE, text).hex


def hash_probe(algorithm: str) -> str:
    """SchedulerInfo.hash_probe of this process, before or after vLLM chose its seed."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, resolve_none_hash_seed

    function = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(function)
    if seed != resolve_none_hash_seed(function):
        return ""
    probe: bytes = hash_block_tokens(function, BlockHash(function(seed)), HASH_PROBE_TOKENS)
    return probe.hex()


def scheduler_hello(vllm_config: VllmConfig, geometry: Geometry, *, upstream_keys: bool) -> Hello:
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    blocks, rules = geometry.max_blocks, geometry.groups
    wants = SchedulerInfo(
        max_blocks=blocks,
        max_hint_bytes=hint_bytes(blocks * geometry.hashes_per_block, MAX_HASH_BYTES, rules.names(blocks)),
        groups=[_told(each) for each in rules.groups],
        hash_tokens=rules.hash_tokens,
        loads=geometry.loads,
        saves=geometry.saves,
        events=publishes_events(vllm_config),
        upstream_keys=upstream_keys,
        hash_algorithm=algorithm,
        hash_probe=hash_probe(algorithm) if geometry.hashes_per_block == 1 else "",
    )
    return Hello(**_common(vllm_config, geometry), role="scheduler", rank=0, scheduler=wants)


def _told(group: Group) -> GroupInfo:
    return GroupInfo(kind=group.kind.value, block_tokens=group.block_tokens, window_tokens=group.window_tokens)


def as_of_now(hello: Hello, live_epochs: Iterable[int], weights: Weights) -> Hello:
    """The scheduler's hello with its last reset and the earlier epochs that its steps may still name."""
    assert hello.scheduler is not None
    now = {"live_epochs": [*live_epochs], "reset_generation": weights.generation, "weights": weights.id}
    return hello.model_copy(update={"scheduler": hello.scheduler.model_copy(update=now)})


def worker_hello(vllm_config: VllmConfig, geometry: Geometry, tp_rank: int, info: WorkerInfo) -> Hello:
    rank = _pp_rank(vllm_config) * vllm_config.parallel_config.tensor_parallel_size + tp_rank
    return Hello(**_common(vllm_config, geometry), role="worker", rank=rank, worker=info)


def _common(vllm_config: VllmConfig, geometry: Geometry) -> dict[str, Any]:
    return {
        "protocol": PROTOCOL,
        "version": __version__,
        "engine_id": vllm_config.kv_transfer_config.engine_id,
        "incarnation": incarnation(vllm_config),
        "world_size": geometry.world_size,
    }


def _refused(reason: str) -> ValueError:
    return ValueError(f"KVPrefetchConnector: change this, or start the engine without the connector: {reason}")
