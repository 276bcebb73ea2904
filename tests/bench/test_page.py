"""The page and the pictures come from the published JSONs alone."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.bench import page, plots
from benchmarks.bench.served import Requests, Served
from benchmarks.bench.setting import Setting

DAYS = report.published(report.PUBLISHED)
RESULTS = [(day, each) for day, results in DAYS.items() for each in results]


def result(name: str = "open", **ttft: tuple[float, ...]) -> dict[str, Any]:
    """A result with one point; by variant (`_` for `-`) the time to first token of each round."""
    passes = []
    for variant, times in ttft.items():
        for number, each in enumerate(times):
            columns = Requests([0], [0.0], [each], [each + 1], [64], [])
            kept = Served(columns, total_s=2.0, link_bytes=2_500_000).kept()
            passes.append({"variant": variant.replace("_", "-"), "round": number, "set": 0, **kept})
    machine = {
        "cpu": "C",
        "cores": 2,
        "memory_gib": 24,
        "python": "3",
        "kernel": "6",
        "load_at_start": 0.1,
        "versions": {},
    }
    return {
        "piece": name,
        "question": "Why?",
        "axis": "x",
        "logarithmic": False,
        "quick": False,
        "command": "c",
        "begun": "2026-11-23T00:00:00+00:00",
        "seconds": 60,
        "load_at_end": 1,
        "machine": machine,
        "failed": None,
        "rounds": {"wanted": 2, "done": 1},
        "left_out": {"lmcache": {"0.5": "no reason"}},
        "block_bytes": 1000,
        "tokens": {"compared": 4, "different": {}},
        "problems": ["a problem"],
        "points": [{"at": 0.5, "setting": asdict(Setting()), "pace": {"fetch_s": 0.2}, "passes": passes}],
    }


def test_the_page_is_what_the_published_results_say() -> None:
    """Run `python -m benchmarks.report` after publishing."""
    for page_, part, begin in (
        (report.PAGE, report.generated(DAYS), report.BEGIN),
        (report.PAGE, report.paced(DAYS), report.PACED),
        (report.PAGE, report.thread(), report.THREAD),
        (report.README, report.front(DAYS), report.BEGIN),
    ):
        text = page_.read_text()
        assert text == report.replaced(text, part, begin)
    site = report.SITE.read_text()
    assert site == report.navigation(site)


@pytest.mark.parametrize("day", DAYS)
def test_a_day_s_page_is_what_its_results_say(day: str) -> None:
    assert (report.PUBLISHED / day / "README.md").read_text() == report.details(DAYS[day], day)


@pytest.mark.parametrize(("day", "each"), RESULTS, ids=lambda each: each if isinstance(each, str) else each["piece"])
def test_a_published_result_is_whole_and_its_picture_shows_it(day: str, each: dict[str, Any]) -> None:
    assert each["failed"] is None
    assert each["tokens"]["different"] == {}
    assert plots.drawing(each).digest in (report.PUBLISHED / day / f"{each['piece']}.svg").read_text()


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ((0.1, 0.2), "0.38 × its mean; ahead at 0.5"),
        ((0.7, 0.8), "1.88 × its mean; **behind** at 0.5"),
        ((0.2, 0.4), "0.75 × its mean; within the spread at 0.5"),
        ((0.1,), "0.25 × its mean; measured once at 0.5"),
    ],
)
def test_the_reading_says_who_is_ahead(mine: tuple[float, ...], said: str) -> None:
    some = result(local=(0.1, 0.1), upstream_async=(0.3, 0.5), kvprefetch=mine, kvprefetch_wait=(9.0, 9.0))
    ideal, peer = page.reading(some)
    ratios = r"\d\.\d\d ×"  # of one point
    assert re.fullmatch(rf"\* kvprefetch: {ratios} the ideal's mean, {ratios} the mean of max\(W, F\)\.", ideal)
    assert peer == f"* kvprefetch against upstream-async: {said}."


def test_details_name_all_that_a_reader_should_know() -> None:
    text = "\n".join(page.details([result(local=(0.1,))], "2026-11-23"))
    for part in ("1 of 2 rounds", "Problem: a problem.", "Left out: lmcache (no reason) at 0.5.", "| 2.5 |", "`c`"):
        assert part in text


def test_each_piece_s_newest_result_is_on_the_page(tmp_path: Path) -> None:
    for day, name in [("2026-01-01", name) for name in ("pool", "retired", "hide", "agents")] + [
        ("2026-01-02", "pool")
    ]:
        (tmp_path / day).mkdir(exist_ok=True)
        (tmp_path / day / f"{name}.json").write_text(json.dumps(result(name, local=(0.1,))))
    text = report.generated(report.published(tmp_path))
    assert re.findall(r"^\| \[(\w+)\]", text, re.MULTILINE) == ["hide", "pool", "agents"]
    assert "benchmarks/2026-01-02/README.md#pool" in text
    assert "benchmarks/2026-01-01/README.md#pool" not in text


def test_the_hooks_of_a_request_are_a_table(tmp_path: Path) -> None:
    """The newest run; a hook that takes less than a microsecond a request is left out."""
    assert "No run" in report.thread(tmp_path)
    variants: dict[str, dict[str, Any]] = {
        "kvprefetch": {"hooks": {"a": [1, 20.0, 30.0], "b": [4, 1.5, 2.0], "c": [1, 0.5, 1.0]}, "passes_us": [30, 40]},
        "upstream-async": {"hooks": {"b": [2, 3.0, 4.0]}, "passes_us": [8, 8]},
    }
    some: dict[str, Any] = {"machine": {"versions": {"kvprefetch": "1"}}}
    some["variants"] = {name: {**each, "others_cores": [0.12]} for name, each in variants.items()}
    for day in ("2026-01-01", "2026-01-02"):
        (tmp_path / day).mkdir()
        (tmp_path / day / "engine-thread.json").write_text(json.dumps(some))
    assert report.published(tmp_path) == {}
    assert report.thread(tmp_path).splitlines() == [
        *("| hook | kvprefetch | upstream-async |", "| --- | --- | --- |"),
        *("| `a` | 20.0 (1.0) |  |", "| `b` | 1.5 (4.0) | 3.0 (2.0) |", "| all, calls × median | 26 | 6 |"),
        "| all, median of passes | 35 (30–40) | 8 |",
        *("", "[Raw](benchmarks/2026-01-02/engine-thread.json), 1; other programs used up to 0.1 cores."),
    ]


def test_another_figure_is_another_digest() -> None:
    digests = {plots.drawing(result(local=(ttft,))).digest for ttft in (0.1, 0.2)}
    assert len(digests) == 2


def test_a_picture_names_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = plots.drawing(result(local=(0.1, 0.2), kvprefetch=(0.4, 0.5)))
    plots.draw(made, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert made.digest in text
    assert "kvprefetch" in text
    assert len(text) < 40_000
