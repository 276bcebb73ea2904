"""Writes the results' pages and pictures from the published JSONs: `python -m benchmarks.report`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks import engine_thread
from benchmarks.bench import page, plots
from benchmarks.bench.pieces import PIECES
from benchmarks.serve.trace import QUESTIONS
from benchmarks.served import page as served_page
from benchmarks.served.pieces import PIECES as SERVED
from tests.lab.process import REPO

PAGE = REPO / "docs" / "BENCHMARKS.md"
README = REPO / "README.md"
PUBLISHED = REPO / "docs" / "benchmarks"
SITE = REPO / "mkdocs.yml"
BEGIN, END = "<!-- begin: python -m benchmarks.report -->", "<!-- end -->"
THREAD = "<!-- begin: python -m benchmarks.report, thread -->"
PACED = "<!-- begin: python -m benchmarks.report, paced -->"


def published(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All results under `folder`, by date, in the order of the pieces."""
    order = {name: at for at, name in enumerate([*SERVED, *PIECES])}
    found = {}
    for day in sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else ():
        paths = [path for path in sorted(day.glob("*.json")) if path.name != engine_thread.NAME]
        if results := [json.loads(path.read_text()) for path in paths]:
            found[day.name] = sorted(results, key=lambda each: order.get(each["piece"], len(order)))
    return found


def newest(days: dict[str, list[dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Each piece's newest result, with its date."""
    last = {result["piece"]: (day, result) for day, results in sorted(days.items()) for result in results}
    known = [*SERVED, *PIECES]
    return [last[name] for name in [*known, *sorted(set(last) - set(known))] if name in last]


def paced(days: dict[str, list[dict[str, Any]]]) -> str:
    """The part of docs/BENCHMARKS.md about engines with a modelled device."""
    results = [each for each in newest(days) if each[1]["piece"] in SERVED]
    lines = served_page.overview(results) if results else ["No run of `make bench-served` has been published yet."]
    return "\n".join([*lines, ""])


def thread(folder: Path = PUBLISHED) -> str:
    """The part of docs/BENCHMARKS.md about the engine's thread."""
    if not (found := sorted(folder.glob(f"*/{engine_thread.NAME}"))):
        return "No run of `make bench-engine-thread` has been published yet.\n"
    return "\n".join([*engine_thread.table(json.loads(found[-1].read_text()), found[-1].parent.name), ""])


def front(days: dict[str, list[dict[str, Any]]]) -> str:
    """README's table: machines whose time is modelled."""
    return "\n".join([*served_page.front([result for _, result in newest(days)]), ""])


def navigation(text: str, folder: Path = PUBLISHED) -> str:
    """mkdocs.yml with the days' pages and those beside them, the newest first."""
    pages = sorted(folder.glob("*/*.md"), key=lambda each: each.name)
    pages.sort(key=lambda each: each.parent.name, reverse=True)
    lines = "".join(f"      - benchmarks/{each.parent.name}/{each.name}\n" for each in pages)
    return re.sub(r"(?: +- benchmarks/[\w./-]+\n)+", lines, text, count=1)


def details(results: list[dict[str, Any]], day: str) -> str:
    """The page of a day."""
    return "\n".join(
        page.details(results, day, lambda each: served_page.details(each) if each["piece"] in SERVED else None)
    )


def generated(days: dict[str, list[dict[str, Any]]]) -> str:
    """The part of docs/BENCHMARKS.md about engines that compute."""
    results = [each for each in newest(days) if each[1]["piece"] in (*PIECES, *QUESTIONS)]
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
        print(details(results, results[0]["begun"][:10]))
        return 0
    days = published(PUBLISHED)
    for day, results in days.items():
        (PUBLISHED / day / "README.md").write_text(details(results, day))
        for result in results:
            plots.draw(plots.drawing(result), PUBLISHED / day / f"{result['piece']}.svg")
    text = replaced(replaced(PAGE.read_text(), generated(days)), paced(days), PACED)
    PAGE.write_text(replaced(text, thread(), THREAD))
    README.write_text(replaced(README.read_text(), front(days)))
    SITE.write_text(navigation(SITE.read_text()))
    print(f"{PAGE.relative_to(REPO)}: {len(newest(days))} pieces of {len(days)} days")
    return 0


if __name__ == "__main__":
    sys.exit(main())
