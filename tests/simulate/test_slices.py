"""Slices of the agents' trace: what the store has of each prompt, the ideal's bound, and the printed lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serve.trace import Call, Slice
from benchmarks.simulate.slices import (
    BLOCK,
    BLOCK_BYTES,
    REST_S,
    WARM_UP,
    Outcome,
    Point,
    least_s,
    main,
    requests,
    run,
)

LONG = tuple(range(1, 10 * BLOCK + 1))
CALLS = [Call(0.0, 3 * BLOCK + 5, 4, LONG[: 3 * BLOCK + 5]), Call(1.0, 6 * BLOCK, 4, LONG[: 6 * BLOCK])]
SLICE = Slice(1, CALLS, [LONG[:BLOCK], LONG[: 3 * BLOCK + 5]], [], 0)


def test_the_store_has_from_the_start_what_any_request_of_the_slice_finds() -> None:
    """The first prompt's own blocks are stored for the second one, as in the benchmark."""
    warm_up, made = requests(SLICE, 2.0)[:WARM_UP], requests(SLICE, 2.0)[WARM_UP:]
    assert [each.found for each in warm_up] == [0] * WARM_UP
    assert [(each.blocks, each.found) for each in made] == [(3, 3), (5, 3)]
    assert made[0].hashes == made[1].hashes[: len(made[0].hashes)]
    assert [round((each.arrival_ns - made[0].arrival_ns) / 1e9, 6) for each in made] == [0.0, 0.5]
    assert made[0].arrival_ns >= REST_S * 1e9


def test_every_request_is_served_and_the_warm_up_does_not_count() -> None:
    outcome = run(SLICE, Point(0.0, 0.5), "wait")
    assert len(outcome.ttft_s) == 2
    assert ([len(each) for each in outcome.lacked], outcome.recomputed) == ([3, 0], 0)
    assert run(SLICE, Point(0.0, 0.5), "recompute").recomputed == 3


def test_the_bound_is_the_later_of_place_and_fetch() -> None:
    """A block each 0.1 s, once, in order of arrival; the third request lacks nothing, the last waits for a place."""
    lacked = [[b"a"], [b"a", b"b"], [], [b"b"], [b"c"]]
    arrivals = [0.0, 0.0, 0.0, 0.1, 0.1]
    local = Outcome([0.01, 0.01, 0.02, 0.01, 0.5], [[]] * 5, arrivals, 0, 0.0)
    loaded = Outcome([1.0] * 5, lacked, arrivals, 0, 0.0)
    assert least_s(local, loaded, 10 * BLOCK_BYTES) == pytest.approx((0.11 + 0.21 + 0.02 + 0.11 + 0.5) / 5)


def test_policies_are_printed_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A session of 600 calls, 0.1 s apart, each 64 tokens longer than the one before."""
    sessions = [
        {"t": at / 10, "in": 64 * 64 * (at % 40 + 2), "out": 300, "hash_ids": list(range(64 * (at % 40 + 2)))}
        for at in range(900)
    ]
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "trace_1.json").write_text(json.dumps({"requests": sessions}))
    arguments = ["--data", str(tmp_path), "--minutes", "1", "--loads", "0.5", "--jobs", "1"]
    assert main([*arguments, "--compare", "local,on-demand-wait,wait", "--json", str(tmp_path / "out.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-2:] == ["max(W,", "F)"]
    assert {"/ on-demand-wait", "/ max(W, F)"} <= {line[:22].strip() for line in lines}
    assert len(json.loads((tmp_path / "out.json").read_text())) == 3
