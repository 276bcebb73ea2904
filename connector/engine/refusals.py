"""Refuse an engine that this connector cannot serve: its configuration, and the nodes that its ranks run on."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import compat, geometry, groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from ..words.metadata import KVPrefetchNode

# Of the running kernel: containers of one node have the same one. See random(4).
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


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
    launcher = parallel.distributed_executor_backend
    if parallel.world_size > 1 and (launcher == "external_launcher" or parallel.nnodes_within_dp > 1):
        # A scheduler of its own for each rank, or a daemon of its own for each node.
        raise _refused(
            "an engine's ranks must be on one node, and started by vLLM (vLLM's MooncakeStoreConnector serves others): "
            f"distributed_executor_backend={launcher} nnodes={parallel.nnodes} world_size={parallel.world_size}"
        )
    if launcher == "ray" and parallel.pipeline_parallel_size > 1 and not compat.ray_reports_all_stages():
        raise _refused(
            "vLLM's older Ray executor returns the reports of the last pipeline stage only, so that no load would "
            f"ever be complete: pipeline_parallel_size={parallel.pipeline_parallel_size} max=1 "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 (set it to 1, vLLM's default)"
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
        geometry.rules_of(vllm_config, kv_cache_config)
    except ValueError as error:
        raise _refused(f"{error}{advice}") from None


def _layer_specs(kv_cache_config: KVCacheConfig) -> list[KVCacheSpec]:
    """Cache specs of the layers: one per group of equal layers."""
    return [one for group in kv_cache_config.kv_cache_groups for one in groups.layer_specs(group.kv_cache_spec)]


def this_node() -> KVPrefetchNode:
    """The node of this process; its boot id is "" where it cannot be read."""
    from ..words.metadata import KVPrefetchNode

    try:
        return KVPrefetchNode(BOOT_ID.read_text().strip(), socket.gethostname())
    except OSError:
        return KVPrefetchNode("", socket.gethostname())


def check_ranks(vllm_config: VllmConfig) -> None:
    """Raise ValueError, in one line, on a rank that is not on the node of its engine's other ranks.

    All ranks call it at the same time.  Whatever launched them, and also where MultiConnector hides our handshake.
    """
    from torch.distributed import all_gather_object
    from vllm.distributed import get_pcp_group, get_pp_group, get_tp_group

    here = this_node()
    for name, group in (("tp_rank", get_tp_group()), ("pcp_rank", get_pcp_group()), ("pp_rank", get_pp_group())):
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
            "(give an engine no more ranks than one node has GPUs, or use vLLM's MooncakeStoreConnector; data-parallel "
            "engines may be on other nodes)"
        )


def _refused(reason: str) -> ValueError:
    return ValueError(f"KVPrefetchConnector: change this, or start the engine without the connector: {reason}")
