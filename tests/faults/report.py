"""docs/RELIABILITY.md: what the campaign of faults found, written by `make faults ARGS=--publish`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import versions
from benchmarks.report import replaced
from tests.faults.faults import FAULTS, Verdict
from tests.faults.points import POINTS
from tests.lab.process import REPO

PAGE = REPO / "docs" / "RELIABILITY.md"
BEGIN = "<!-- begin: make faults -->"


def table(title: str, groups: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Iterator[str]:
    yield f"| {title} | runs | reached | noticed, ms | longest step, ms more | broken |"
    yield "| --- |" + " ---: |" * 5
    for name, rows in groups:
        noticed = [row["noticed_ms"] for row in rows if row["noticed_ms"] is not None]
        step = max((row["longest_step_ms"] for row in rows), default=0.0)
        said = f"{max(noticed):.1f}" if noticed else "–"
        cells = [len(rows), sum(row["reached"] for row in rows), said, f"{step:.0f}", sum(map(broken, rows))]
        yield f"| {name} | {' | '.join(map(str, cells))} |"


def broken(row: Mapping[str, Any]) -> bool:
    """Whether the run broke a promise."""
    return bool(Verdict(**row).failures)


def lines(rows: Sequence[Mapping[str, Any]], seconds: float, commit: str, day: str) -> Iterator[str]:
    """The generated part of the page."""
    failed = [row for row in rows if broken(row)]
    outcome = f"in {len(failed)} of them a promise was broken, listed below" if failed else "no promise was broken"
    yield f"{len(rows)} runs in {seconds / 60:.0f} minutes, {day}, commit {commit}: {outcome}."
    yield ""
    kinds = [(victim, kind) for victim, kinds in FAULTS.items() for kind in kinds]
    said = {
        "kill": "is killed", "storm": "is killed three times", "stop": "stands still", "starve": "may open no file",
        "cut": "is cut", "crawl": "crawls", "lossy": "loses a tenth of its packets",
    }  # fmt: skip
    yield from table(
        "victim",
        [
            (f"{victim} {said[kind]}", [row for row in rows if (row["victim"], row["kind"]) == (victim, kind)])
            for victim, kind in kinds
        ],
    )
    yield ""
    names = [*(point.name for point in POINTS), "a random time"]
    yield from table("at", [(name, [row for row in rows if row["fault"] == name]) for name in names])
    if failed:
        yield ""
        for row in failed:
            yield f"* {row['victim']} {said[row['kind']]}, at {row['fault']}: {'; '.join(Verdict(**row).failures)}"


def write(rows: Sequence[Mapping[str, Any]], seconds: float, page: Path = PAGE) -> None:
    """Put the campaign's outcome into the page."""
    commit = versions()["commit"]
    made = "\n".join(lines(rows, seconds, commit, time.strftime("%Y-%m-%d")))
    page.write_text(replaced(page.read_text(), f"{made}\n", BEGIN))
