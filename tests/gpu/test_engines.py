"""Engines of real vLLM on a GPU: tokens as without a connector, from device slots, and across the daemon's death.

It needs vLLM and Mooncake in addition, but none of vLLM's compiled kernels: torch computes in float32, and attention is
Triton's.  tests/e2e/test_device.py has more of it, on the fake driver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.checkpoint import TINY, make_checkpoint
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts
from tests.support.waiting import eventually

pytestmark = pytest.mark.gpu

PROMPTS = make_prompts(12, 520, seed=71)
HIT_TOKENS = 512
PLAIN = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def worker_counters(_engine: Any) -> dict[str, int]:
    """In the engine's process: what its worker's side of the connector counted."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return dict(get_kv_transfer_group().worker_side.counters)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    pytest.importorskip("mooncake.store", reason="Mooncake is not installed")
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), TINY)


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def test_tokens_are_those_of_an_engine_without_a_connector(model: Path, stack: contextlib.ExitStack) -> None:
    spec = EngineSpec(
        model=model,
        max_num_seqs=2,
        num_gpu_blocks=512,
        extra={
            "compilation_config": {"custom_ops": ["none"]},
            "gpu_memory_utilization": 0.3,
            "attention_backend": "TRITON_ATTN",
        },
        env=PLAIN,
    )
    options = ("--device-staging", "64MiB")
    daemon = stack.enter_context(Daemon(memory="1GiB", staging="256MiB", extra=options))
    right = stack.enter_context(Engine(spec)).run(PROMPTS, max_tokens=16).tokens
    engine = stack.enter_context(Engine(spec.but(kv_transfer=ours(daemon.socket))))

    def attached() -> None:
        eventually(lambda: engine.call("tests.e2e.probes:attached"), 30.0, "an attached engine", pause_s=0.05)

    attached()
    assert engine.run(PROMPTS, max_tokens=16).tokens == right, "saving"
    eventually(lambda: len(daemon.records("request.done")) >= len(PROMPTS), 20.0, "each request's line")
    for _ in range(2):
        assert engine.reset_prefix_cache()
        served = engine.run(PROMPTS, max_tokens=16)
        assert served.tokens == right
        assert served.cached_tokens == [HIT_TOKENS] * len(PROMPTS)
    assert engine.call("tests.gpu.test_engines:worker_counters")["load_device_bytes"] > 0
    assert engine.reset_prefix_cache()
    engine.begin(PROMPTS, max_tokens=16)
    engine.wait_event("first_token")
    daemon.sigkill()
    assert engine.finish().tokens == right, "a request that loads from a dead daemon's slots has wrong tokens"
    daemon.start()
    attached()
    assert engine.run(PROMPTS, max_tokens=16).tokens == right
