"""What vLLM built around this connector: the worker of this rank, and its models."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any


def calling(kind: type[Any]) -> Any | None:
    """Return the object of this class whose method is calling, directly or not, or None."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if issubclass(type(caller), kind):  # not isinstance: it would ask lazy proxies for their class
            return caller
        frame = frame.f_back
    return None


def calling_worker() -> Any | None:
    """Return the `WorkerBase` whose method is calling, or None.

    vLLM gives a connector neither its worker nor a model.  But the worker makes the connector and has it register the
    KV caches, with every executor and both model runners, so it is further up the stack then.  The configuration does
    not find it: MultiConnector hands its children copies.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    return calling(WorkerBase)


def is_child() -> bool:
    """Whether MultiConnector makes the connector that asks."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    return calling(MultiConnector) is not None


def models(worker: Any) -> list[Any]:
    """Return the worker's model and, behind it, its drafter's model if it has one."""
    runner = worker.model_runner
    draft = runner.get_draft_model()
    return [runner.get_model(), *([] if draft is None else [draft])]


def head_replicas(worker: Any, layers: Mapping[str, Any]) -> dict[str, int]:
    """Return by name, of the attention layers that `layers` has, on how many neighbouring ranks each KV head is.

    It is the number by which vLLM's loader gives heads to ranks.  A layer is absent where it is not known: without a
    worker, or where no projection with such a number is beside it.
    """
    from vllm.model_executor.layers.linear import QKVParallelLinear

    names = {id(layer): name for name, layer in layers.items()}
    found: dict[str, int] = {}
    built = [] if worker is None else models(worker)
    for owner in (each for model in built for each in model.modules()):
        children = [getattr(child, "base_layer", child) for child in owner.children()]  # LoRA wraps projections
        replicas = [each.num_kv_head_replicas for each in children if isinstance(each, QKVParallelLinear)]
        attention = [names[id(each)] for each in children if id(each) in names]
        if replicas and attention:
            found |= dict.fromkeys(attention, math.gcd(*replicas))
    return found
