"""Functions for Engine.call and EngineSpec.prepare: what trainers do to the weights of running engines."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def readable() -> None:
    """Let vLLM's CPU backend keep a layer's weights in its parameters, as on GPUs: it packs them for oneDNN."""
    setattr(importlib.import_module("vllm._custom_ops"), "_supports_onednn", False)  # noqa: B010


def load(engine: Any, checkpoint: str) -> None:
    """As a trainer's RPC: `model.load_weights` on each rank, of a checkpoint."""
    engine.engine_core.engine_core.model_executor.collective_rpc(_load, args=(checkpoint,))


def reload(engine: Any, checkpoint: str) -> None:
    """vLLM's `reload_weights` on each rank."""
    executor = engine.engine_core.engine_core.model_executor
    executor.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})


def known(engine: Any) -> bool:
    """Whether the daemon knows what the weights are since a reset or an update."""
    side = engine.engine_core.engine_core.scheduler.connector.scheduler_side
    return bool(side.resets.step.agreed and side.link.confirmed_reset == side.resets.generation)


def _load(wrapper: Any, checkpoint: str) -> None:
    from safetensors.torch import load_file

    (file,) = Path(checkpoint).glob("*.safetensors")
    wrapper.worker.get_model().load_weights(iter(load_file(file).items()))
