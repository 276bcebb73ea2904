"""Engines of the bed: in a process with its scheduler, or served (`child` of their specification)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.lab import process
from tests.lab.bed import layouts
from tests.lab.bed.settings import Settings
from tests.lab.bed.timeline import Preset
from tests.lab.engine import Engine, EngineSpec
from tests.lab.template import Template

CHECKPOINTS = process.REPO / "build" / "checkpoints" / "bed"


def spec(
    *,
    layout: str = "full",
    connector: dict[str, Any] | None = None,
    scheduling: str = "async",
    runner: str = "v2",
    preset: Preset | None = None,
    every_step: bool = True,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    model: Path | None = None,
    prepare: str = "",
    extra: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    **changes: Any,
) -> EngineSpec:
    """Return how to build an engine whose worker is the bed's; `changes` are more fields of EngineSpec.

    `layout`: of `layouts.MODELS`, or one of `layouts.given_specs`; `scheduling`: async or sync; `runner`: v2 or v1;
    `preset`: of the timeline, without which steps take no time.
    """
    ranks = tensor_parallel * pipeline_parallel * (extra or {}).get("prefill_context_parallel_size", 1)
    executor = "mp" if ranks > 1 or changes.get("own_worker") else "tests.lab.bed.worker.Executor"
    given = "" if layout in layouts.MODELS else layout
    known = layouts.BESIDE.get(given, "full") if given else layout
    return EngineSpec(
        model=layouts.MODELS[known](CHECKPOINTS) if model is None else model,
        kv_transfer=connector,
        tensor_parallel_size=tensor_parallel,
        prepare=f"tests.lab.bed.worker:install {prepare}",
        extra={
            "worker_cls": "tests.lab.bed.worker.Worker",
            "distributed_executor_backend": executor,
            "async_scheduling": scheduling == "async",
            "pipeline_parallel_size": pipeline_parallel,
            **(extra or {}),
        },
        env={
            **Settings(preset, every_step, given).variable(),
            "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "v2" else "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it computes nothing
            **(env or {}),
        },
        **changes,
    )


@contextlib.contextmanager
def engine(*, template: Template | None = None, **options: Any) -> Iterator[Engine]:
    """Start an engine with its scheduler in a process of its own; `options`: of `spec`."""
    with Engine(spec(**options), template=template) as started:
        yield started


def report(engine: Engine, *, reset: bool = False) -> list[dict[str, Any]]:
    """Return what each rank counted and found wrong (`Worker.bed_report`)."""
    found: list[dict[str, Any]] = engine.call("tests.lab.bed.worker:report", reset)
    return found
