"""What vLLM built around this connector: the worker of this rank, and its models."""

from __future__ import annotations

import inspect
from typing import Any


def calling_worker() -> Any | None:
    """Return the `WorkerBase` whose method is calling, or None.

    vLLM gives a connector neither its worker nor a model.  But the worker makes the connector and has it register the
    KV caches, with every executor and both model runners, so it is further up the stack then.  The configuration does
    not find it: MultiConnector hands its children copies.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if issubclass(type(caller), WorkerBase):  # not isinstance: it would ask lazy proxies for their class
            return caller
        frame = frame.f_back
    return None


def models(worker: Any) -> list[Any]:
    """Return the worker's model and, behind it, its drafter's model if it has one."""
    runner = worker.model_runner
    draft = runner.get_draft_model()
    return [runner.get_model(), *([] if draft is None else [draft])]
