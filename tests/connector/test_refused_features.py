"""The reasons to refuse some of vLLM's features at start: vLLM's own code fails with them on loaded KV."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

vllm = pytest.importorskip("vllm")

from kvprefetch.connector.engine import refusals  # noqa: E402
from tests.connector.test_connector import FULL, kv_cache_config  # noqa: E402
from tests.lab.checkpoint import TINY, make_checkpoint  # noqa: E402


def engine_config(folder: Path, **options: Any) -> Any:
    """vLLM's own configuration of an engine with a tiny model."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(make_checkpoint(folder, TINY)), skip_tokenizer_init=True, max_model_len=512, block_size=32, **options
    ).create_engine_config()


def check(config: Any, reason: str | None, cache: Any = None) -> None:
    """The engine is refused for this reason, or is not."""
    with contextlib.nullcontext() if reason is None else pytest.raises(ValueError, match=reason):
        refusals.check(config, cache or kv_cache_config())


def per_token_head() -> Any:
    from vllm.v1.kv_cache_interface import KVQuantMode

    spec = dataclasses.replace(FULL, dtype=torch.int8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    return kv_cache_config([spec])


@pytest.mark.shows("KV scales per token and head, `--enforce-eager`", refused=True)
def test_per_token_head_scales_are_refused_without_the_warm_up_that_comes_to_every_layer(tmp_path: Path) -> None:
    eager = engine_config(tmp_path, enforce_eager=True)
    check(eager, None)
    check(eager, r"enable_jit_warmup=False \(as with enforce_eager", per_token_head())
    check(engine_config(tmp_path), None, per_token_head())


@pytest.mark.shows("routed experts in the output", refused=True)
def test_routed_experts_of_a_block_that_was_not_computed_here_end_the_engine(tmp_path: Path) -> None:
    """vLLM's worker asks its own store for them, also where a load filled the block."""
    from vllm.distributed.aux_output_connector.connector import PackedBlockHashes
    from vllm.distributed.aux_output_connector.routed_experts import materialize_routed_experts, routed_experts_keys
    from vllm.distributed.aux_output_connector.store import BlockObjectStore, BlockObjectStoreError

    store = BlockObjectStore(max_bytes=1 << 16, object_nbytes=64)
    keys = routed_experts_keys(PackedBlockHashes(b"h" * 32, 32), "0")
    with pytest.raises(BlockObjectStoreError, match="does not exist"):
        materialize_routed_experts(store, keys, shape_per_token=(1, 1), dtype=np.dtype(np.int16))
    config = engine_config(tmp_path)
    config.aux_output_config.enable_return_routed_experts = True
    check(config, "enable_return_routed_experts=True")


@pytest.mark.shows("HiSparse", refused=True)
def test_p35_an_engine_that_would_name_the_blocks_of_an_answer_later_is_refused(tmp_path: Path) -> None:
    """With the host's cache of HiSparse alone; else an answer that a pass did not use is void."""
    config, cache = engine_config(tmp_path), kv_cache_config()
    check(config, None, cache)
    cache.hisparse_host_num_blocks = 1
    check(config, "host-resident KV caches are not served: hisparse_host_num_blocks is set", cache)


@pytest.mark.shows("`--enable-fault-tolerance`", refused=True)
def test_an_engine_that_lives_on_after_a_failed_step_is_refused(tmp_path: Path) -> None:
    """vLLM keeps its prefix cache over such a step, and blocks are in it before the step fills them."""
    config = engine_config(tmp_path)
    config.parallel_config.enable_fault_tolerance = True
    check(config, "enable_fault_tolerance=True")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"distributed_executor_backend": "external_launcher"}, None),
        pytest.param(
            {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2},
            "=external_launcher nnodes",
            marks=pytest.mark.shows("external launcher", refused=True),
        ),
        ({"distributed_executor_backend": "mp", "tensor_parallel_size": 2}, None),
        ({"distributed_executor_backend": "mp", "tensor_parallel_size": 2, "nnodes": 2}, "=mp nnodes=2 world_size=2$"),
    ],
)
def test_ranks_without_one_scheduler_and_one_daemon_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str | None
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # an external launcher's configuration sets it
    check(engine_config(tmp_path, **options), reason)


@pytest.mark.parametrize(
    ("stages", "newer", "reason"),
    [
        pytest.param(
            2,
            "0",
            r"pipeline_parallel_size=2 max=1 VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 \(set it to 1",
            marks=pytest.mark.shows("pipeline stages, Ray's older executor", refused=True),
        ),
        (2, "1", None),
        (1, "0", None),
    ],
)
def test_pipeline_stages_whose_reports_ray_s_older_executor_drops_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: int, newer: str, reason: str | None
) -> None:
    """It asks the last stage alone, and a load is complete when every rank has reported it."""
    monkeypatch.setitem(vars(vllm.envs), "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", newer == "1")  # gone in 0.33
    config = engine_config(tmp_path, distributed_executor_backend="mp", pipeline_parallel_size=stages)
    config.parallel_config.distributed_executor_backend = "ray"  # which is not installed here
    check(config, reason)


def test_a_mistyped_key_ends_the_start_where_vllm_has_cuda_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM then asks the class while it configures itself: the API server ends before it starts an engine."""
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    from kvprefetch.connector import register

    register()
    ours = {"kv_connector": "KVPrefetchConnector", "kv_role": "kv_both"}
    typo: dict[str, Any] = {**ours, "kv_connector_extra_config": {"sockett": "/x"}}
    several: dict[str, Any] = {
        **ours,
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [typo]},
    }
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda *_: True)
    engine_config(tmp_path, kv_transfer_config=KVTransferConfig(**ours))
    for given in (typo, several):
        with pytest.raises(
            ValueError, match=r"kv_connector_extra_config: unknown key 'sockett'.*did you mean socket\?"
        ):
            engine_config(tmp_path, kv_transfer_config=KVTransferConfig(**given))
