"""Traces through the HTTP server: the client's figures as the result has them."""

from __future__ import annotations

from benchmarks.bench.figures import per_round
from benchmarks.bench.served import Served
from benchmarks.serve import __main__ as serve
from benchmarks.serve.server import columns


def test_the_clients_times_become_columns_that_begin_at_the_first_request() -> None:
    told = {
        "start_times": [100.0, 101.5], "ttfts": [0.5, 0.25], "itls": [[0.1, 0.1], []], "generated_texts": ["ab", "c"]
    }  # fmt: skip
    requests, answers = columns(told)
    assert (requests.arrival_s, requests.first_token_s, requests.finished_s) == ([0.0, 1.5], [0.5, 1.75], [0.7, 1.75])
    assert answers == {0: [97, 98], 1: [99]}
    kept = Served(requests, total_s=2.0, daemon=serve.Columns(["loaded"], [640], [5])).kept()
    setting = {"places": 1, "engines": 1}
    assert per_round(kept, setting, 64)["wasted_bytes"] == 160, "a bound, of two requests"
    kept["daemon"]["unused_bytes"] = 64
    assert per_round(kept, setting, 64)["wasted_bytes"] == 32, "as the daemon counted"
