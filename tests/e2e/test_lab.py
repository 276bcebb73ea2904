"""The lab measures what it says: requests come and end as a test wants, and tokens depend on every block."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.e2e.conftest import BLOCK
from tests.lab.engine import Engine, EngineError
from tests.lab.passes import Abort
from tests.lab.prompts import make_prompts


def cached_blocks(engine: Any) -> int:
    """Runs in the scheduler's process: hashed blocks of its pool."""
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return len(pool.cached_block_hash_to_block)


def test_the_end_of_the_answer_depends_on_the_first_block(plain: Engine) -> None:
    """Prompts that differ in their first block only: else a wrong block could go unseen."""
    [prompt] = make_prompts(1, 300, seed=2)
    [other] = make_prompts(1, BLOCK, seed=3)
    tokens = plain.run([prompt, other + prompt[BLOCK:]]).tokens
    assert tokens[0] != tokens[1]


def test_a_closed_loop_keeps_so_many_requests_outstanding(plain: Engine) -> None:
    result = plain.run(make_prompts(6, 64, seed=4), max_tokens=4, concurrency=2)
    for each in result.requests:
        assert each.finished_s is not None
        others = [
            other
            for other in result.requests
            if other.arrival_s <= each.arrival_s and (other.finished_s or 0.0) > each.arrival_s
        ]
        assert len(others) <= 2
    assert [len(tokens) for tokens in result.tokens] == [4] * 6


def test_a_user_pauses_between_an_answer_and_the_next_request(plain: Engine) -> None:
    result = plain.run(make_prompts(4, 64, seed=7), max_tokens=4, concurrency=1, pauses_s=[0.0, 0.3, 0.0, 0.0])
    ends = [each.finished_s or 0.0 for each in result.requests]
    gaps = [each.arrival_s - end for each, end in zip(result.requests[1:], ends, strict=False)]
    assert gaps[1] >= 0.3
    assert min(gaps) >= 0.0


def test_arrivals_and_aborts_are_followed(plain: Engine) -> None:
    prompts = make_prompts(3, 64, seed=5)
    aborts = [Abort(1, after_tokens=3), Abort(2, after_steps=1)]
    heard: list[dict[str, Any]] = []
    result = plain.run(prompts, max_tokens=16, arrivals_s=[0.0, 0.0, 0.3], aborts=aborts, on_event=heard.append)
    assert [each.finish_reason for each in result.requests] == ["length", "abort", "abort"]
    assert len(result.tokens[1]) == 3
    assert result.requests[2].arrival_s >= 0.3
    assert {"event": "finished", "index": 0} in heard


def test_functions_run_in_the_schedulers_process(plain: Engine) -> None:
    plain.reset_prefix_cache()
    assert plain.call("tests.e2e.test_lab:cached_blocks") == 0
    plain.run(make_prompts(1, 300, seed=6), max_tokens=1)
    assert plain.call("tests.e2e.test_lab:cached_blocks") == 300 // BLOCK
    assert plain.scheduler_pid != os.getpid()
    with pytest.raises(EngineError, match="AttributeError"):
        plain.call("tests.e2e.test_lab:no_such_function")
