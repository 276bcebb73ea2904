"""Figures that are made from raw requests: by hand-made passes with known answers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.bench.figures import Figure, per_round, point_figures, token_differences
from benchmarks.bench.hiding import hiding, least_mean_s
from benchmarks.bench.served import Daemon, Requests, Served, merged
from benchmarks.bench.setting import Plan, Setting
from tests.lab.passes import Pass, RequestResult

BLOCK_BYTES = 1000


def passed(variant: str, *requests: tuple[float, float, float], waited: tuple[float, ...] = (), **more: Any) -> Any:
    """A pass whose requests arrived, had a first token, and ended at these times."""
    columns = Requests(
        prompt=list(range(len(requests))),
        arrival_s=[each[0] for each in requests],
        first_token_s=[each[1] for each in requests],
        finished_s=[each[2] for each in requests],
        cached_tokens=[100] * len(requests),
        waited_s=list(waited),
    )
    return {"variant": variant, **Served(columns, total_s=2.0, **more).kept()}


def point(*passes: Any, **setting: Any) -> dict[str, Any]:
    return {"at": 1, "setting": asdict(Setting(**setting)), "pace": {"fetch_s": 0.25}, "passes": list(passes)}


def test_a_figure_is_the_median_over_rounds() -> None:
    rounds = [passed("a", (0, ttft, 1)) for ttft in (0.3, 0.1, 0.2)]
    assert point_figures(point(*rounds), BLOCK_BYTES)["a"]["mean_s"] == Figure(0.2, 0.1, 0.3)


def test_wasted_is_what_a_request_did_not_load() -> None:
    daemon = Daemon()
    for blocks, loaded in ((4, 4), (4, 1), (0, 3)):  # the last one loaded what was fetched for others
        daemon.add(
            {
                "outcome": "loaded",
                "bytes": blocks * BLOCK_BYTES,
                "loaded_blocks": loaded,
                "exposed_ms": 10.0,
                "hidden_fraction": 0.5 if blocks else None,
                "hint_seen_ms": 1.0,
                "last_byte_ms": 21.0 if blocks else None,
            }
        )
    found = per_round(passed("a", (0, 1, 2), (0, 1, 2), (0, 1, 2), daemon=daemon), asdict(Setting()), BLOCK_BYTES)
    assert found["wasted_bytes"] == 1000
    assert found["hidden"] == 0.5
    assert found["transfer_s"] == pytest.approx(0.02)


def test_what_is_noticed_of_a_fetch_is_beyond_the_ideal() -> None:
    """W 0.1 s, F 0.25 s: prefetched at best 0.15 s are left, on demand all of it; the ideal computes for 0.02 s."""
    some = point(
        passed("local", (0.0, 0.12, 1), waited=(0.1,)),
        passed("kvprefetch", (0.0, 0.30, 1), waited=(0.1,)),
        passed("kvprefetch-on-demand", (0.0, 0.37, 1), waited=(0.1,)),
    )
    found = hiding(some, BLOCK_BYTES)
    assert found["kvprefetch"].exposed.middle == pytest.approx(0.18)
    assert found["kvprefetch-on-demand"].exposed.middle == pytest.approx(0.25)
    assert found["kvprefetch"].bound_s == pytest.approx(0.15)
    assert found["kvprefetch"].over_bound == pytest.approx(0.30 / 0.27)
    assert hiding(point(passed("local", (0, 1, 2))), BLOCK_BYTES) == {}


def test_the_least_mean_waits_for_place_or_link() -> None:
    """F 0.25 s. The first waits for the link alone, the second for the first's KV as well, the third for its place."""
    ideal = passed("local", (0.0, 0.02, 1), (0.1, 0.2, 1), (0.2, 1.2, 2))
    some = point(ideal, passed("kvprefetch", (0, 9, 9)))
    assert least_mean_s(some) == Figure.of([(0.27 + 0.42 + 1.0) / 3])
    half = least_mean_s(point(ideal, hit=0.5))
    assert half is not None
    assert half.middle == pytest.approx((0.145 + 0.17 + 1.0) / 3)


def test_other_tokens_are_found_as_far_as_both_answers_go() -> None:
    first = ("local", "a", {0: [1, 2, 3], 1: [4, 5]})
    assert token_differences([first, ("x", "a", {0: [1, 2], 1: [4, 5, 6]})]) == (2, {})
    assert token_differences([first, ("x", "a", {0: [1, 9], 1: [4]})]) == (2, {"x": 1})
    assert token_differences([first, ("x", "b", {0: [7]})]) == (0, {}), "another set has other prompts"
    later = ("local", "b", {0: [8]})
    assert token_differences([first, ("x", "b", {0: [7]}), later]) == (1, {"x": 1}), "whichever came first"


def result(index: int, arrival: float, first: float, end: float) -> RequestResult:
    return RequestResult(index, str(index), [index], 64, arrival, first, end, "length")


def test_passes_of_several_engines_become_one() -> None:
    """Requests that only held the place are not measured; how long the next one waited for them is."""
    asked = Plan([[1], [2]], [-1, 0], [9, 1], arrivals_s=[0.0, 0.5])
    other = Plan([[3]], [1], [1], arrivals_s=[0.0])
    one = merged(
        [
            (asked, Pass([result(0, 0.0, 0.1, 0.75), result(1, 0.5, 1.0, 1.5)], 1.5, 10)),
            (other, Pass([result(0, 0.0, 0.2, 0.3)], 0.3, 3)),
        ]
    )
    assert one.requests.prompt == [0, 1]
    assert one.requests.waited_s == [0.25]
    assert one.requests.ttft_s == pytest.approx([0.5, 0.2])
    assert (one.total_s, one.steps, one.tokens) == (1.5, 13, {0: [1], 1: [0]})
