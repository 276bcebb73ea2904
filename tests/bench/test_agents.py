"""Sessions of agents in engines of one process: what ranks wait policies."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bench import variants
from benchmarks.serve.agents import (
    BLOCK,
    least_wait_s,
    over_least,
    pairs,
    recomputed_tokens,
    summary,
)
from benchmarks.serve.sessions import of_requests, returning, staged_share
from benchmarks.serve.trace import SESSION_HASHES, Call, Slice


def a_pass(variant: str, admission_s: float, mean_s: float, *, recomputed: int = 0) -> dict[str, Any]:
    times = {"arrival_s": [0.0, 1.0], "first_token_s": [mean_s, 1.0 + mean_s]}
    counts = {"admission_s": admission_s, "recomputed_tokens": recomputed}
    waits = {"waits_s": [0.5, 0.5], "fetches": [125_000, 0]}
    return {"variant": variant, "requests": times, "counts": counts, "daemon": {"unused_bytes": 7}, **waits}


def test_passes_are_compared_in_pairs_of_like_speed() -> None:
    passes = [a_pass(variants.OURS, *each) for each in ((0.0128, 2.0), (0.011, 0.5), (0.011, 7.0))]
    passes += [a_pass(variants.ON_DEMAND, *each) for each in ((0.0112, 1.0), (0.013, 8.0), (0.0105, 9.0))]
    assert pairs(passes, variants.OURS, variants.ON_DEMAND) == [pytest.approx(0.25), pytest.approx(0.5)]
    assert pairs(passes[:3], variants.OURS, variants.ON_DEMAND) == []


def test_the_least_wait_is_the_later_of_the_place_and_the_bytes() -> None:
    """The link is busy with the first request's bytes when the second one comes; the third one fetches nothing."""
    assert least_wait_s([0.1, 0.1, 0.7], [(0.0, 400), (1.0, 100), (2.0, 0)], 200.0) == pytest.approx(2.0 + 1.5 + 0.7)
    passes = [a_pass(variants.OURS, 0.01, 0.5), a_pass(variants.LOCAL, 0.01, 0.5)]
    point = {"at": 0.7, "setting": {"link_mbit": 0.5}, "passes": passes}  # two seconds for the first one's bytes
    assert over_least(point, variants.OURS) == [pytest.approx(1.0 / 2.5)]


def test_requests_that_came_back_are_compared_by_themselves() -> None:
    calls = [Call(float(number), 2 * BLOCK, 8, (SESSION_HASHES * session,)) for number, session in enumerate((0, 1, 0))]
    assert returning(Slice(BLOCK, calls, [], [], 0)) == [2]
    passes = [a_pass(variants.SESSIONS, 0.01, 2.0), a_pass(variants.LOCAL, 0.01, 1.0)]
    for each, mean_s in zip(passes, (0.3, 0.2), strict=True):
        each["counts"]["returning_s"] = mean_s
    lines = list(summary({"points": [{"at": 0.1, "setting": {"link_mbit": 1000.0}, "passes": passes}]}))
    assert ["of returning requests" in line for line in lines[:2]] == [False, True]
    assert ["median 2.00" in lines[0], "median 1.50" in lines[1]] == [True, True]


def test_tokens_that_the_store_had_and_the_engine_computed_are_recomputed() -> None:
    lines = [
        {"request_id": "pass1-1-4f", "found_blocks": 2},
        {"request_id": "pass1-12-5e", "found_blocks": 3},
        {"request_id": "pass1-3-6d", "found_blocks": 1},
        {"request_id": "another", "found_blocks": 9},
    ]
    names = [f"pass1-{number}" for number in (1, 12, 3)]
    assert recomputed_tokens([2 * BLOCK, 0, 4 * BLOCK], of_requests(names, lines)) == 3 * BLOCK


def test_of_returning_turns_that_is_there_which_they_do_not_fetch() -> None:
    calls = [Call(float(number), 2 * BLOCK, 8, (SESSION_HASHES * session,)) for number, session in enumerate((0, 1, 0))]
    lines = [
        (0, {"found_blocks": 9, "local_blocks": 0, "bytes": 9 * 64}),
        (2, {"found_blocks": 12, "local_blocks": 2, "bytes": 4 * 64}),
    ]
    some = Slice(BLOCK, calls, [(), (), tuple(range(10))], [], 0)
    assert staged_share(lines, some, BLOCK, 64) == 0.75, "two blocks are of this turn alone"
    assert staged_share(lines[:1], some, BLOCK, 64) is None
