"""Functions for Engine.call: requests of prefill/decode, each with `kv_transfer_params` of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any


def run(
    engine: Any, name: str, prompts: Sequence[list[int]], params: Sequence[dict[str, Any] | None], max_tokens: int
) -> list[dict[str, Any]]:
    """Serve the prompts; return for each its tokens, the prompt tokens computed here, and the answer's params."""
    from vllm import SamplingParams

    for index, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if given is None else {"kv_transfer_params": given},
        )
        engine.add_request(f"{name}-{index}", {"prompt_token_ids": prompt}, sampling)
    scheduler = engine.engine_core.engine_core.scheduler
    schedule, computed = scheduler.schedule, Counter[str]()

    def counted(*arguments: Any) -> Any:
        output = schedule(*arguments)
        for request_id, tokens in output.num_scheduled_tokens.items():
            computed[request_id.rpartition("-")[0]] += tokens  # vLLM adds a part of its own
        return output

    scheduler.schedule = counted
    found: dict[str, dict[str, Any]] = {}
    while len(found) < len(prompts):
        for output in engine.step():
            if output.finished:
                found[output.request_id] = {
                    "tokens": list(output.outputs[0].token_ids),
                    "params": output.kv_transfer_params,
                }
    scheduler.schedule = schedule
    for request_id, each in found.items():
        each["computed"] = computed[request_id] - (max_tokens - 1)
    return [found[f"{name}-{index}"] for index in range(len(prompts))]


def step_until_idle(engine: Any, timeout_s: float = 30.0) -> bool:
    """Step until nothing is left: blocks that a decode engine fetched are free then."""
    scheduler = engine.engine_core.engine_core.scheduler
    deadline = time.monotonic() + timeout_s
    while scheduler.has_requests() and time.monotonic() < deadline:
        engine.step()
    return not scheduler.has_requests()


def abort(engine: Any, name: str, prompt: list[int], params: dict[str, Any], steps: int) -> None:
    """Begin a request, and abort it after so many steps."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=9, detokenize=False, extra_args={"kv_transfer_params": params})
    engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    for _ in range(steps):
        engine.step()
    engine.abort_request([name])
