"""Writes the results' pages and pictures from the published JSONs: `python -m benchmarks.report`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.bench import page, plots
from benchmarks.bench.pieces import PIECES
from tests.lab.process import REPO

PAGE = REPO / "docs" / "BENCHMARKS.md"
PUBLISHED = REPO / "docs" / "benchmarks"
BEGIN, END = "<!-- begin: python -m benchmarks.report -->", "<!-- end -->"


def published(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All results under `folder`, by date, in the order of the pieces."""
    order = {name: at for at, name in enumerate(PIECES)}
    found = {}
    for day in sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else ():
        results = [json.loads(path.read_text()) for path in sorted(day.glob("*.json"))]
        found[day.name] = sorted(results, key=lambda each: order.get(each["piece"], len(order)))
    return found


def newest(days: dict[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Each piece's newest result, with its date."""
    last = {result["piece"]: (day, result) for day, results in sorted(days.items()) for result in results}
    return [last[name] for name in [*PIECES, *sorted(set(last) - set(PIECES))] if name in last]


def generated(days: dict[str, list[dict[str, Any]]]) -> str:
    """The part of docs/BENCHMARKS.md between the marks."""
    results = newest(days)
    if not results:
        return "No run of `make bench` has been published yet.\n"
    return "\n".join([*page.overview(results), ""])


def replaced(text: str, part: str, begin: str = BEGIN) -> str:
    """`text` with `part` between the marks. Raises ValueError without exactly one pair of them."""
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the page needs one {begin} and one {END}")
    return pattern.sub(lambda _: f"{begin}\n{part}{END}", text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--show", type=Path, nargs="+", metavar="JSON", help="print these results' page instead")
    options = parser.parse_args(argv)
    if options.show:
        results = [json.loads(path.read_text()) for path in options.show]
        print("\n".join(page.details(results, results[0]["begun"][:10])))
        return 0
    days = published(PUBLISHED)
    for day, results in days.items():
        (PUBLISHED / day / "README.md").write_text("\n".join(page.details(results, day)))
        for result in results:
            plots.draw(plots.drawing(result), PUBLISHED / day / f"{result['piece']}.svg")
    PAGE.write_text(replaced(PAGE.read_text(), generated(days)))
    print(f"{PAGE.relative_to(REPO)}: {len(newest(days))} pieces of {len(days)} days")
    return 0


if __name__ == "__main__":
    sys.exit(main())
