"""Recorded traces: scaled alike, with what an endless cache has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve import trace
from benchmarks.serve.trace import Call, Slice


def call(at_s: float, tokens: int, *hashes: int) -> Call:
    return Call(at_s, tokens, 40, hashes)


# Hashes of 64 tokens. The second shares two whole parts with the first; 3 was the first's part of a part.
CALLS = [
    call(0, 170, 1, 2, 3), call(10, 200, 1, 2, 3, 4), call(20, 256, 1, 2, 3, 4), call(30, 64, 9), call(40, 192, 1, 7, 3)
]  # fmt: skip


def some(**changes: Any) -> Slice:
    options = {"k": 4, "tokens_per_hash": 64, "start_s": 10.0, "count": 10, "longest": 1000, **changes}
    return trace.scaled(CALLS, **options)


def test_all_tokens_shrink_alike_and_whole_parts_seen_before_are_known() -> None:
    made = some()
    assert made.chunk == 16
    assert [(each.at_s, each.input_tokens, each.output_tokens) for each in made.calls] == [
        (0.0, 50, 10), (10.0, 64, 10), (20.0, 16, 10), (30.0, 48, 10)
    ]  # fmt: skip
    assert made.known == [(1, 2), (1, 2, 3), (), (1,)], (
        "what the call before the slice had counts, its last part does not"
    )
    assert made.before == [(1, 2), (1, 2), (), (1,)]
    assert made.hit_share == 6 * 16 / 178


def test_each_block_that_is_known_is_stored_once() -> None:
    made = some()
    assert made.stored() == [(1, 2, 3)]
    assert [made.stored_blocks(tokens) for tokens in (16, 32, 48, 64)] == [3, 1, 1, 0]
    assert Slice(16, [], [(1, 2), (1, 3)], [], 0).stored_blocks(16) == 3, "the first is in both"


def test_requests_that_are_too_long_are_left_out_and_counted() -> None:
    made = some(longest=58)
    assert (len(made.calls), made.dropped) == (2, 2)
    assert made.known[1] == (1,), "nor does the store have them"


@pytest.mark.parametrize(("changes", "words"), [({"k": 5}, "k must divide"), ({"start_s": 99.0}, "no request")])
def test_a_bad_scale_is_an_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        some(**changes)


def test_calls_of_one_tick_are_spread_over_it_in_their_order() -> None:
    calls = [call(0, 1), call(0, 2), call(0.001, 3), call(5.999, 4), call(6, 5)]
    assert [(each.at_s, each.input_tokens) for each in trace.spread(calls)] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (6, 4),
        (7.5, 5),
    ]


def test_sessions_share_no_hash_and_long_pauses_are_cut(tmp_path: Path) -> None:
    for number, times in enumerate(([5, 6, 1000], [0, 10, 20])):
        requests = [{"t": at, "in": 128, "out": 0, "hash_ids": [1, 2]} for at in times]
        (tmp_path / f"trace_{number}.json").write_text(json.dumps({"requests": requests}))
    calls = trace.agents(tmp_path)
    first, second = ([each.at_s for each in calls if each.hashes[0] // trace.SESSION_HASHES == n] for n in (0, 1))
    assert [at - first[0] for at in first] == pytest.approx([0, 1, 61])
    assert [at - second[0] for at in second] == pytest.approx([0, 10, 20])
    assert [each.at_s for each in calls] == sorted(first + second)
    assert all(each.output_tokens == 1 for each in calls)


def test_what_is_written_is_what_the_client_reads(tmp_path: Path) -> None:
    path = trace.write_timed(some().calls, tmp_path / "t.jsonl")
    first = json.loads(path.read_text().splitlines()[0])
    assert first == {"timestamp": 0.0, "input_length": 50, "output_length": 10, "hash_ids": [1, 2, 3, 4]}
