"""`make bench-served`: its points keep the proportions of their machine, its figures and pages say what a pass gave."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.bench import figures, pieces
from benchmarks.bench.pieces import Piece
from benchmarks.bench.served import Requests, Served
from benchmarks.bench.setting import MODEL, Setting, prompts
from benchmarks.served import page
from benchmarks.served.lab import counted, pace_of
from benchmarks.served.pieces import LOADS, PIECES, small
from tests.lab.bed.timeline import PRESETS

PASSED = {"between_s": 0.05, "between_p99_s": 0.06, "recomputed_tokens": 0.0, "steps_waited": 1.0, "late_launches": 0.0}


def result(name: str, ttft_s: dict[str, list[float]], between_s: float = 0.05) -> dict[str, Any]:
    """A piece with one point and one round, and by variant the time to first token of each request."""
    passes = []
    for variant, times in ttft_s.items():
        count = len(times)
        columns = Requests([*range(count)], [0.0] * count, times, [each + 1 for each in times], [64] * count, [])
        kept = Served(columns, 2.0, counts={**PASSED, "between_s": between_s if "kv" in variant else 0.05}).kept()
        passes.append({"variant": variant, "round": 0, "set": 0, **kept})
    paced = {"fetch_s": 0.02, "proportions": "fetch : prefill : step = 25 : 20 : 50 ms"}
    point = {"at": 0.3, "setting": asdict(Setting()), "pace": paced, "passes": passes}
    return {"piece": name, "axis": LOADS, "block_bytes": 1000, "points": [point]}


@pytest.mark.parametrize("piece", PIECES.values(), ids=lambda each: each.name)
def test_a_piece_s_points_keep_the_proportions_of_its_machine(piece: Piece) -> None:
    """400 requests or more, whose KV the store has room for; the times of a fetch and of a step are the preset's."""
    points = piece.settings(quick=False)
    assert piece.name not in pieces.PIECES, "results of both benchmarks lie in one folder"
    assert len({setting.preset for _, setting in points}) == 1, "engines are started once"
    assert min(setting.requests for _, setting in points) >= 400
    stored = {(setting.prompt_tokens, setting.hit): setting.requests * setting.fetched_bytes for _, setting in points}
    assert sum(stored.values()) < 2.5e9
    for at, setting in points:
        preset, pace = PRESETS[setting.preset], pace_of(setting)
        fetch_ms = 1e3 * pace.fetch_s
        by_steps = dict.fromkeys(("load", "http", "common", "users", "burst", "output"), preset.base_ms / 2)
        by_steps["fetch"] = at * preset.base_ms
        expected = by_steps.get(piece.name.split("-")[0], preset.fetch_ms(setting.hit_tokens))
        if piece.name != "part":
            assert fetch_ms == pytest.approx(expected, rel=1e-6)
        assert pace.proportions.endswith(f": {preset.base_ms:g} ms")
        assert 0.9 < pace.place_s / (setting.output_tokens[0] * preset.base_ms / 1e3) < 4


def test_a_short_run_has_an_eighth_of_the_requests() -> None:
    assert {setting.requests for _, setting in PIECES["8b-h100"].settings(quick=True)} == {50}


def test_the_store_s_part_of_a_prompt_is_fetched_in_its_share_of_the_time() -> None:
    half, most = (setting for _, setting in PIECES["part"].settings(quick=False))
    assert (half.hit_tokens, most.hit_tokens) == (960, 1792)
    assert prompts(half, 0) != prompts(most, 0)
    assert small(PRESETS["25-35"]).kv_bytes_per_token == MODEL.kv_bytes_per_token


def test_a_pass_says_how_many_steps_a_request_waited() -> None:
    """Steps begin at 10.0, 10.05 …; the first request comes at 10.01, and the step after the next is its own."""
    begun_ns = [10_000_000_000 + 50_000_000 * number for number in range(6)]
    timeline = {"begun_ns": begun_ns, "admitted": {"pass3-0-ab": 2, "cmpl-pass3-1-0-cd": 5, "other": 4}, "steps": 6}
    columns = Requests([0, 1], [0.01, 0.06], [0.15, 0.3], [1, 1], [1984, 1000], [])
    served = Served(columns, 1.0, gaps_s=[0.05, 0.07], begun_s=10.0, engine_cpu_s=2.0)
    found = {"timeline": {**timeline, "late_launches": 3, "idle_ns": 2_000_000}, "faults": [], "oracle_ns": 100_000_000}
    counts = counted(found, Setting(prompt_tokens=2000), served)
    assert counts == {
        "between_s": pytest.approx(0.06),
        "between_p99_s": pytest.approx(0.0698),
        "recomputed_tokens": 492.0,
        "steps_waited": 2.0,
        "late_launches": 50.0,
        "idle_s": 0.002,
        "wrong_blocks": 0,
        "oracle_share": 0.05,
    }


def test_pairs_are_compared_request_by_request_with_an_interval() -> None:
    """The median's 95 % interval, by order statistics: of 100 ratios the 40th to the 61st."""
    some = result("p", {"a": [1.0 + each / 100 for each in range(100)], "b": [1.0] * 100})
    found = figures.paired_ratio(some["points"][0], "a", "b")
    assert found is not None
    assert (found.middle, found.low, found.high) == pytest.approx((1.495, 1.39, 1.6))
    assert figures.paired_ratio(some["points"][0], "a", "c") is None


def test_the_ratio_of_means_has_an_interval_over_pairs() -> None:
    """Pairs that are alike leave no doubt, however unlike the requests are."""
    some = result("p", {"a": [1.2, 2.4, 3.6], "b": [1.0, 2.0, 3.0], "c": [1.0, 2.0, 4.0]})["points"][0]
    equal, found = (figures.mean_ratio(some, mine, "b") for mine in ("a", "c"))
    assert equal is not None
    assert found is not None
    assert (equal.low, equal.middle, equal.high) == pytest.approx((1.2, 1.2, 1.2))
    # Squares of what c has more than 7/6 of b: 1/36 + 1/9 + 1/4 = 14/36.
    assert found.high - found.middle == pytest.approx(1.96 * (14 / 36 / 6) ** 0.5 / 2)
    assert figures.mean_ratio(some, "a", "d") is None


def test_a_piece_s_pages_compare_each_variant_with_local_and_ours_with_all() -> None:
    times = {"local": [0.1], "upstream-async": [0.25], "kvprefetch-on-demand": [0.16], "kvprefetch": [0.12]}
    some = result("8b-h100", times, between_s=0.051)
    table, shown = page.details(some)
    assert table[-1].startswith(
        "| 0.3 | 25 : 20 : 50 ms | kvprefetch | 120 | 120, 1.200 × | 120, 1.200 × | 51, 1.020 × | 60, 1.000 × | "
        "1.20 (1.20–1.20) | 0.48 (0.48–0.48) | 0.75 (0.75–0.75) | 64 | 0 | 1 | 0 |"
    )
    assert "cached_tokens" in shown
    ours = "| 1.20 (1.20–1.20) | 0.48 (0.48–0.48) | 0.75 (0.75–0.75) | 1.00 | 1.20 | 1.02 | 1.00 | 0.0 |"
    assert page.overview([("day", some)])[-1].endswith(f"| 0.3 | 25 : 20 : 50 ms {ours}")
    days = {"2026-01-01": [some]}
    row = "| An 8B model on an H100 | 0.3 | 25 : 20 : 50 ms | 100 |  | 250 | 160 | 120 | 1.20 (1.20–1.20) | 0.48"
    assert row in report.front(days)
    assert "[8b-h100](benchmarks/2026-01-01/README.md#8b-h100)" in report.paced(days)
    assert "8b-h100" not in report.generated(days)


def test_the_site_lists_a_new_day_first(tmp_path: Path) -> None:
    for each in ("2026-01-01/README.md", "2026-01-01/gpu.md", "2026-01-02/README.md"):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).touch()
    text = "a\n      - benchmarks/2026-01-01/README.md\n      - b.md\n"
    pages = [f"      - benchmarks/2026-01-0{each}" for each in ("2/README.md", "1/README.md", "1/gpu.md")]
    assert report.navigation(text, tmp_path).splitlines() == ["a", *pages, "      - b.md"]
