"""The bed's worker has the order of vLLM's own model runners: their sources are compared with its own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm
BED = Path(__file__).resolve().parents[1] / "lab" / "bed" / "runner.py"

# What a runner does, by its names for it and by the bed's.
SECOND = {
    "finish_requests": "forget",
    "add_requests": "_take_in",
    "update_requests": "_blocks_changed",
    "no_forward": "no_forward",
    "pre_forward": "pre_forward",
    "model": "_forward",
    "finish_forward": "finish_forward",
}
SECOND_SAMPLES = {"sample": "sample", "propose": "_draft", "post_forward": "post_forward"}
FIRST = {
    "handle_preemptions": "handle_preemptions",
    "_update_states": "forget",
    "kv_connector_no_forward": "kv_connector_no_forward",
    "maybe_get_kv_connector_output": "maybe_get_kv_connector_output",
    "_model_forward": "_forward",
}
FIRST_STATES = {
    "remove_request": "forget",
    "copy_kv_cache_blocks_inplace": "_blocks_changed",
    "CachedRequestState": "_take_in",
}


def calls(source: Path, function: str, names: Mapping[str, str], one: Callable[[list[int]], int]) -> list[str]:
    """Return which of these names a function calls, as what the names stand for; `one` chooses among a name's lines."""
    found = [
        each
        for each in ast.walk(ast.parse(source.read_text()))
        if isinstance(each, ast.FunctionDef) and each.name == function
    ]
    lines: dict[str, list[int]] = {}
    for call in ast.walk(found[-1]):
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in names:
                lines.setdefault(name, []).append(call.lineno)
    return [names[name] for name in sorted(lines, key=lambda name: one(lines[name]))]


@pytest.mark.parametrize(
    ("runner", "function", "ours", "names"),
    [
        ("gpu/model_runner.py", "execute_model", "_execute_second", SECOND),
        ("gpu/model_runner.py", "sample_tokens", "sample_tokens", SECOND_SAMPLES),
        ("gpu_model_runner.py", "execute_model", "_execute_first", FIRST),
        ("gpu_model_runner.py", "_update_states", "_execute_first", FIRST_STATES),
    ],
    ids=["V2", "V2, sampling", "V1", "V1, states"],
)
def test_the_worker_calls_in_the_order_of_vllms_runner(
    runner: str, function: str, ours: str, names: dict[str, str]
) -> None:
    package = find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    one = max if function == "sample_tokens" else min  # it returns early on all pipeline stages but the last
    theirs = calls(Path(package.origin).parent / "v1" / "worker" / runner, function, names, one)
    assert theirs == list(names.values())
    assert calls(BED, ours, {each: each for each in theirs}, one) == theirs
