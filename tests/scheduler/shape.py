"""How an engine of the harness is set up: vLLM's own configuration objects, made small."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm.distributed
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.request import Request

from tests.lab.control import Reader
from tests.lab.daemon import Daemon
from tests.scheduler.model import BLOCK, BLOCK_BYTES, LAYERS
from tests.support.auditor import Auditor

MAX_MODEL_LEN = 64
RESET_TIMEOUT_MS = 30_000
DRAFTS = 2
SYNC_BLOCKS = 3  # load_mode auto: larger loads are asynchronous


@dataclass(frozen=True)
class Site:
    """What outlives an engine: a daemon on a real store, a client that reads that store."""

    daemon: Daemon
    reader: Reader
    auditor: Auditor


@dataclass(frozen=True)
class Shape:
    """How an engine is set up. `queue` is the batch queue's size: 1 for the synchronous step, else steps in flight.

    `one_head`: all ranks hold the same bytes. `patient`: requests wait for late blocks even if recomputing is sooner.
    """

    ranks: int = 1
    one_head: bool = False
    patient: bool = False
    queue: int = 1
    second_runner: bool = False
    load_mode: str = "auto"
    early: bool = True
    decode: bool = False
    drafts: bool = False
    report_before_save: bool = False
    priorities: bool = False
    blocks: int = 24
    seqs: int = 4
    budget: int = 16
    settled: bool = True
    wait_timeout_ms: int = 2000


def vllm_config(shape: Shape, name: str, socket: Path | None) -> Any:
    """An engine's configuration; `name` tells it from all others. Without a socket it has no connector."""
    config = copy.copy(_base_config(_models[shape.one_head], shape.drafts))
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.async_scheduling = shape.queue > 1
    config.scheduler_config.max_num_seqs = shape.seqs
    config.scheduler_config.max_num_batched_tokens = shape.budget
    config.scheduler_config.policy = "priority" if shape.priorities else "fcfs"
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = shape.blocks
    config.cache_config.enable_prefix_caching = True
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = shape.ranks
    config.instance_id = name
    config.kv_transfer_config = None
    if socket is not None:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVPrefetchConnector", kv_connector_module_path="kvprefetch.connector",
            kv_role="kv_both", kv_load_failure_policy="recompute", engine_id=name,
            kv_connector_extra_config={
                "socket": str(socket), "cache_prefix": name, "key_format": "vllm", "load_mode": shape.load_mode,
                "save_decode_cache": shape.decode, "wait_timeout_ms": shape.wait_timeout_ms,
                "wait_policy": "timeout" if shape.patient else "adaptive",
                "reset_timeout_ms": RESET_TIMEOUT_MS,
                "hint_on_arrival": shape.early, "sync_load_max_bytes": SYNC_BLOCKS * BLOCK_BYTES,
            },
        )  # fmt: skip
    return config


def make_request(
    name: str, tokens: list[int], out: int, *, session: bool, skip_reading: bool, priority: int, arrival: float
) -> Request:
    """vLLM's request, as the front end makes it."""
    params = SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True)
    params.skip_reading_prefix_cache = skip_reading
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(
        name, list(tokens), params, None, block_hasher=hasher, resumable=session, priority=priority,
        arrival_time=arrival,
    )  # fmt: skip


@functools.lru_cache(maxsize=8)
def _base_config(model: Path, drafts: bool) -> Any:
    init_none_hash(sha256)
    speculative = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 2} if drafts else None
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, max_num_seqs=4,
        max_num_batched_tokens=MAX_MODEL_LEN, block_size=32, speculative_config=speculative,
    ).create_engine_config()  # fmt: skip


_models: list[Path] = []


def use_models(two_heads: Path, one_head: Path) -> None:
    """The checkpoints of which engines take the configuration (nothing loads their weights)."""
    _models[:] = [two_heads, one_head]


def cache_config(blocks: int) -> KVCacheConfig:
    """The paged cache of the ranks in workers.py: LAYERS layers, layer-outermost."""
    names = [f"layer{i}" for i in range(LAYERS)]
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.uint8)
    assert spec.page_size_bytes * LAYERS == BLOCK_BYTES, "the connector takes the block's size from the configuration"
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=blocks * BLOCK_BYTES, layers=names, layer_stride=blocks * page, block_stride=page)
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        kv_cache_layout="LBNHC", hash_block_size=BLOCK,
    )  # fmt: skip


@contextmanager
def tensor_parallel_rank(rank: int) -> Iterator[None]:
    """A worker-role connector made inside takes itself for this rank's."""
    original = vllm.distributed.get_tensor_model_parallel_rank
    vllm.distributed.get_tensor_model_parallel_rank = lambda: rank
    try:
        yield
    finally:
        vllm.distributed.get_tensor_model_parallel_rank = original
