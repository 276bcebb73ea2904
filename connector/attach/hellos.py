"""What an engine's processes say of themselves to the daemon when they attach."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvprefetch import __version__

from ...kv.hashing import PROBE_BLOCK_TOKENS, PROBE_SALT, PROBE_TOKENS
from ...shmring.wire.attach import MAX_MODEL, MAX_SETTINGS, GroupInfo, Hello, SchedulerInfo, WorkerInfo
from ...shmring.wire.records import MAX_HASH_BYTES, PROTOCOL, hint_bytes
from ..engine.compat import running_version
from ..engine.geometry import Geometry, publishes_events, stage_of
from ..identity.start import Start
from ..words.config import ConnectorConfig
from .resets import Weights

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

log = logging.getLogger("vllm.kvprefetch")


def as_made(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy that keeps what vLLM says now, for the link's thread: vLLM changes its objects later, too.

    It has the same layers (`compilation_config`).
    """
    kept = vllm_config.compilation_config
    with contextlib.suppress(Exception):  # a model's own code may put anything into its configuration
        return copy.deepcopy(vllm_config, {id(kept): kept})
    return vllm_config


def of_scheduler(vllm_config: VllmConfig, start: Start, geometry: Geometry, settings: ConnectorConfig) -> Hello:
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    hash_start, probe = start_and_probe(algorithm)
    blocks, rules, model = geometry.max_blocks, geometry.groups, vllm_config.model_config
    wants = SchedulerInfo(
        max_blocks=blocks,
        max_hint_bytes=hint_bytes(rules.digests(blocks), MAX_HASH_BYTES, rules.names(blocks)),
        groups=[GroupInfo(**each._asdict() | {"kind": each.kind.value}) for each in rules.groups],
        hash_tokens=rules.hash_tokens,
        models=[each for each in dict.fromkeys((model.model, model.served_model_name)) if len(each) <= MAX_MODEL],
        loads=geometry.loads,
        saves=geometry.saves,
        events=publishes_events(vllm_config),
        upstream_keys=settings.key_format == "vllm",
        settings=f"vllm={running_version()} kvprefetch={__version__} {settings.in_force}"[:MAX_SETTINGS],
        hash_algorithm=algorithm,
        hash_start=hash_start,
        hash_probe=probe,
    )
    return Hello(**_common(start, geometry), role="scheduler", rank=0, scheduler=wants)


def warn(transfer: KVTransferConfig, hello: Hello) -> None:
    """Log what of a scheduler's configuration makes loads or saves of little use."""
    if transfer.kv_load_failure_policy != "recompute":
        log.warning(
            'kvprefetch: set kv_load_failure_policy to "recompute"; with %r a failed load fails its request',
            transfer.kv_load_failure_policy,
        )
    if hello.scheduler is not None and not hello.scheduler.hash_probe:
        log.warning(
            "kvprefetch: prefix_caching_hash_algo=%s begins with a random number in each process, so no other "
            "engine and no later start finds the KV that this one saves: set PYTHONHASHSEED",
            hello.scheduler.hash_algorithm,
        )


def as_of_now(hello: Hello, live_epochs: Iterable[int], weights: Weights) -> Hello:
    """The scheduler's hello with its last reset and the earlier epochs that its steps may still name."""
    assert hello.scheduler is not None
    now = {"live_epochs": [*live_epochs], "reset_generation": weights.generation, "weights": weights.id}
    return hello.model_copy(update={"scheduler": hello.scheduler.model_copy(update=now)})


def of_worker(vllm_config: VllmConfig, start: Start, geometry: Geometry, tp_rank: int, info: WorkerInfo) -> Hello:
    rank = rank_of(vllm_config, tp_rank)
    return Hello(**_common(start, geometry), role="worker", rank=rank, worker=info)


def rank_of(vllm_config: VllmConfig, tp_rank: int) -> int:
    """This process's rank in its engine."""
    parallel, (pp_rank, pcp_rank) = vllm_config.parallel_config, stage_of(vllm_config)
    stage = pp_rank * parallel.prefill_context_parallel_size + pcp_rank
    return int(stage * parallel.tensor_parallel_size + tp_rank)


def _common(start: Start, geometry: Geometry) -> dict[str, Any]:
    return {
        "protocol": PROTOCOL,
        "version": __version__,
        "engine_id": start.engine_id,
        "incarnation": start.incarnation,
        "world_size": geometry.world_size,
    }


def start_and_probe(algorithm: str) -> tuple[str, str]:
    """SchedulerInfo.hash_start and hash_probe of this process, before or after vLLM chose its seed."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import (
        BlockHash,
        generate_block_hash_extra_keys,
        hash_block_tokens,
        resolve_none_hash_seed,
    )
    from vllm.v1.request import Request

    function = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(function)
    if seed != resolve_none_hash_seed(function):
        return "", ""
    request = Request("probe", [*PROBE_TOKENS], SamplingParams(max_tokens=1), None, cache_salt=PROBE_SALT)
    start = digest = BlockHash(function(seed))
    for end in range(PROBE_BLOCK_TOKENS, len(PROBE_TOKENS) + 1, PROBE_BLOCK_TOKENS):
        extra, _ = generate_block_hash_extra_keys(request, end - PROBE_BLOCK_TOKENS, end, 0)
        digest = hash_block_tokens(function, digest, PROBE_TOKENS[end - PROBE_BLOCK_TOKENS : end], extra)
    return start.hex(), digest.hex()
