"""Traces through the HTTP server: the figures of the client, and of sessions, as the result has them."""

from __future__ import annotations

from benchmarks.bench.figures import per_round
from benchmarks.bench.served import Served
from benchmarks.serve import __main__ as serve
from benchmarks.serve.server import columns
from benchmarks.serve.sessions import of_requests, returning, staged_share
from benchmarks.serve.trace import SESSION_HASHES, Call, Slice

BLOCK = serve.BLOCK


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


def test_of_returning_turns_that_is_there_which_they_do_not_fetch() -> None:
    calls = [Call(float(number), 2 * BLOCK, 8, (SESSION_HASHES * session,)) for number, session in enumerate((0, 1, 0))]
    lines = [
        (0, {"found_blocks": 9, "local_blocks": 0, "bytes": 9 * 64}),
        (2, {"found_blocks": 12, "local_blocks": 2, "bytes": 4 * 64}),
    ]
    some = Slice(BLOCK, calls, [(), (), tuple(range(10))], [], 0)
    assert returning(some) == [2]
    assert staged_share(lines, some, BLOCK, 64) == 0.75, "two blocks are of this turn alone"
    assert staged_share(lines[:1], some, BLOCK, 64) is None


def test_a_line_of_the_daemon_belongs_to_the_request_whose_name_it_begins_with() -> None:
    lines = [{"request_id": name} for name in ("pass1-12-5e", "pass1-1-4f", "another")]
    assert list(of_requests(["pass1-1", "pass1-12"], lines)) == [(1, lines[0]), (0, lines[1])]
