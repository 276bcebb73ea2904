"""What differs between the releases of vLLM that are served: the names that not all of them have.

No other module of the connector asks whether a name exists; releases.py says which releases are served.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NOT_EARLY = "this vLLM does not hand requests over before its scheduler has them: each hint is up to a step late"


def engine_core() -> Any | None:
    """Return vLLM's class whose `preprocess_add_request(request)` makes each request, on the thread that gets it."""
    try:
        found = getattr(importlib.import_module("vllm.v1.engine.core"), "EngineCore", None)
    except ImportError:
        return None
    return found if callable(getattr(found, "preprocess_add_request", None)) else None


def scheduler_sides(connector: Any) -> list[Any]:
    """Return the scheduler sides of our connectors in a scheduler's, which may be vLLM's MultiConnector, or None."""
    found = (getattr(each, "scheduler_side", None) for each in getattr(connector, "_connectors", (connector,)))
    return [side for side in found if side is not None]


def hands_over_early() -> bool:
    """Whether the installed vLLM has `engine_core`'s method, without an import."""
    spec = find_spec("vllm")
    source = None if spec is None or spec.origin is None else Path(spec.origin).with_name("v1") / "engine" / "core.py"
    return source is not None and source.is_file() and "def preprocess_add_request(" in source.read_text()


def frees_behind_steps() -> bool:
    """Whether a scheduler that runs ahead gives blocks back only behind the steps in flight, which may use them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return hasattr(Scheduler, "_request_blocks_can_be_freed")


def computed_anew(spec: Any) -> bool:
    """Whether a layer's KV is outside the prefix cache, and vLLM computes after a hit what a request needs of it."""
    name = type(spec).__name__
    return name == "CircularBufferSpec" or (name == "SlidingWindowMLASpec" and getattr(spec, "bounded_replay", False))


def replayed_tokens(kv_cache_config: Any) -> int:
    """Return how many tokens at the end of each hit vLLM computes again, for the groups outside the prefix cache."""
    specs = (each.kv_cache_spec for each in kv_cache_config.kv_cache_groups)
    return max((getattr(spec, "prefix_replay_tokens", 0) for spec in specs), default=0)


def changes_blocks(output: Any) -> bool:
    """Whether the workers clear or copy blocks at the begin of this step: what is loaded before that would be lost."""
    return any(getattr(output, name, None) for name in ("new_block_ids_to_zero", "kv_cache_block_copies"))


def ray_reports_all_stages() -> bool:
    """Whether Ray's executor gives the reports of every pipeline stage: vLLM 0.33 dropped the one that does not."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True))


def running_version() -> str:
    import vllm

    return str(vllm.__version__)
