"""The set-up of the harness's engines: vLLM's own configuration objects, made small."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import vllm.distributed
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvprefetch.connector.engine import refusals
from kvprefetch.kv.groups import Group, Groups, Kind
from tests.lab.connectors import ours
from tests.lab.control import Reader
from tests.lab.daemon import Daemon
from tests.scheduler.model import BLOCK, BLOCK_BYTES, LAYERS, ONE_GROUP, PAGE_BYTES
from tests.support.auditor import Auditor

MAX_MODEL_LEN = 64
DRAFTS = 2
SYNC_BLOCKS = 3  # load_mode auto: larger loads are asynchronous


@dataclass(frozen=True)
class Site:
    """A daemon on a real store and a client that reads that store: they outlive an engine."""

    daemon: Daemon
    reader: Reader
    auditor: Auditor


@dataclass(frozen=True)
class Shape:
    """The set-up of an engine. `queue` is the batch queue's size: 1 for the synchronous step, else steps in flight.

    `groups`: of the model's layers, with `drafts` perhaps a drafter's; `retention`: vLLM's
    prefix_cache_retention_interval, for several groups.
    `one_head`: all ranks hold the same bytes. `patient`: requests wait for late blocks even if recomputing is sooner.
    """

    groups: Groups = ONE_GROUP
    retention: int | None = None
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
    events: bool = False
    blocks: int = 24
    seqs: int = 4
    budget: int = 16
    settled: bool = True

    @property
    def has_states(self) -> bool:
        return Kind.STATE in {group.kind for group in self.groups.groups}


def vllm_config(shape: Shape, name: str, socket: Path | None) -> Any:
    """An engine's configuration; `name` tells it from all others. Without a socket it has no connector."""
    base = base_config(_models[shape.one_head], MAX_MODEL_LEN, DRAFTS if shape.drafts else 0)
    config = sized(base, BLOCK, shape.blocks, shape.ranks, shape.seqs, shape.budget)
    config.scheduler_config.async_scheduling = shape.queue > 1
    config.cache_config.mamba_cache_mode = "align" if shape.has_states else "none"
    if shape.drafts and shape.groups.proof_tokens:  # the workers draft as before; what vLLM drops is a drafter's
        config.speculative_config = copy.copy(config.speculative_config)
        config.speculative_config.method = "eagle"
    config.scheduler_config.policy = "priority" if shape.priorities else "fcfs"
    config.instance_id = name
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=shape.events, publisher="null")
    config.kv_transfer_config = None
    if socket is not None:
        extra: dict[str, Any] = {
            "cache_prefix": name,
            "key_format": "vllm",
            "load_mode": shape.load_mode,
            "save_decode_cache": shape.decode,
            "wait_timeout_ms": 2000,
            "wait_policy": "timeout" if shape.patient else "adaptive",
            "hint_on_arrival": shape.early,
            "sync_load_max_bytes": SYNC_BLOCKS * BLOCK_BYTES,
        }
        config.kv_transfer_config = KVTransferConfig(**ours(socket, **extra), engine_id=name)
    return config


def make_request(name: str, tokens: list[int], out: int, *, skip_reading: bool = False, **options: Any) -> Request:
    """vLLM's request, as the front end makes it; `options`: of vLLM's Request."""
    params = SamplingParams(max_tokens=out, temperature=0.0, ignore_eos=True)
    params.skip_reading_prefix_cache = skip_reading
    return Request(name, list(tokens), params, None, block_hasher=get_request_block_hasher(BLOCK, sha256), **options)


@functools.lru_cache(maxsize=8)
def base_config(model: Path, max_model_len: int, drafts: int = 0) -> Any:
    """vLLM's own configuration of an engine with this model; made once, copied by `sized`."""
    init_none_hash(sha256)
    ngram = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    limits = {"max_model_len": max_model_len, "max_num_seqs": 4, "max_num_batched_tokens": max_model_len}
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        block_size=32,
        speculative_config=ngram if drafts else None,
        **limits,
    ).create_engine_config()
    logging.getLogger("vllm").propagate = True  # it set up vLLM's logging, which keeps lines from the root logger
    return config


def sized(base: Any, block_tokens: int, blocks: int, ranks: int, seqs: int, budget: int) -> Any:
    """A copy of vLLM's configuration with a small prefix-cached pool and these ranks, requests and tokens a step."""
    config = copy.copy(base)
    for part in ("scheduler_config", "cache_config", "parallel_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.scheduler_config.max_num_seqs = seqs
    config.scheduler_config.max_num_batched_tokens = budget
    config.cache_config.block_size = block_tokens
    config.cache_config.num_gpu_blocks = blocks
    config.cache_config.enable_prefix_caching = True
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
    return config


_models: list[Path] = []


def use_models(two_heads: Path, one_head: Path) -> None:
    """The checkpoints of which engines take the configuration (nothing loads their weights)."""
    _models[:] = [two_heads, one_head]


def cache_config(
    blocks: int,
    groups: Groups = ONE_GROUP,
    retention: int | None = None,
    page_bytes: int = PAGE_BYTES,
    drafts: int = 0,
) -> kinds.KVCacheConfig:
    """A paged cache of uint8: LAYERS layers of each group, layer-outermost, `page_bytes` a block and layer.

    As in vLLM the groups lie over each other: a block id is of one group at a time.
    """
    made, tensors = [], []
    for number, group in enumerate(groups.groups):
        names = [f"layer{number}.{i}" for i in range(LAYERS)]
        width = page_bytes // (1 if group.kind is Kind.STATE else 2 * group.block_tokens)
        spec = layer_spec(group, width=width, dtype=torch.uint8, drafts=drafts)
        assert spec.page_size_bytes == page_bytes, "the connector takes the block's size from the configuration"
        made.append(kinds.KVCacheGroupSpec(names, spec, is_eagle_group=group.drafts))
        strides = {"layer_stride": blocks * page_bytes, "block_stride": page_bytes}
        tensors.append(kinds.KVCacheTensor(size=blocks * page_bytes * LAYERS, layers=names, **strides))
    config = kinds.KVCacheConfig(blocks, tensors, made, retention, kv_cache_layout="LBNHC")
    if "hash_block_size" in {each.name for each in dataclasses.fields(config)}:  # from vLLM 0.32 on
        config = dataclasses.replace(config, hash_block_size=groups.hash_tokens)
    return config


def layer_spec(
    group: Group, *, width: int = 8, dtype: torch.dtype = torch.float32, mla: bool = False, drafts: int = 0
) -> Any:
    """vLLM's specification of such a group's layers: of one head, or a state, so wide."""
    size = group.block_tokens
    if group.kind is Kind.STATE:
        parts: dict[str, Any] = {"shapes": ((width,),), "dtypes": (dtype,), "num_speculative_blocks": drafts}
        return kinds.MambaSpec(block_size=size, mamba_cache_mode="align", **parts)
    heads: dict[str, Any] = {"block_size": size, "num_kv_heads": 1, "head_size": width, "dtype": dtype}
    if group.kind is Kind.WINDOW:
        window = kinds.SlidingWindowMLASpec if mla else kinds.SlidingWindowSpec
        return window(**heads, sliding_window=group.window_tokens)
    if group.kind is Kind.CHUNK:
        return kinds.ChunkedLocalAttentionSpec(**heads, attention_chunk_size=group.window_tokens)
    return (kinds.MLAAttentionSpec if mla else kinds.FullAttentionSpec)(**heads)


@contextmanager
def tensor_parallel_rank(rank: int) -> Iterator[None]:
    """A worker-role connector made inside takes itself for this rank's."""
    with (
        mock.patch.object(vllm.distributed, "get_tensor_model_parallel_rank", return_value=rank),
        mock.patch.object(refusals, "check_ranks"),  # no process groups here
    ):
        yield
