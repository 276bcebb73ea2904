"""The documents hold together: links, the records of decisions and their index, and the words that we use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("systemd/*.md"), *(ROOT / "docs").rglob("*.md")])
}
RECORDS = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
MAX_RECORDS = 50
MAX_WORDS = 48_430  # of prose and tables, without code, the days' pages of figures and what tests write
# Retired words (docs/glossary.md has ours).  Code in backticks and fences is exempt: users know names as they are.
RETIRED = re.compile(
    r"\b(tiers?|told|untold|whoever|widths?|stor(?:y|ies)|seats?|(?:staged?|staging) ahead|put_(?:factor|turn))\b",
    re.IGNORECASE,
)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to a document's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(name: str, text: str) -> Iterator[str]:
    """Yield the relative links that name no file of the checkout, or no heading of it where they have an anchor."""
    for file, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        target = (ROOT / name).parent / file if file else ROOT / name
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield f"{name}: {file}#{anchor}"


def retired_words(name: str, text: str) -> Iterator[str]:
    """Yield the retired words of the prose, each with its line."""
    prose = re.sub(r"```.*?```|`[^`]*`", lambda code: "\n" * code[0].count("\n"), text, flags=re.DOTALL)
    for number, line in enumerate(prose.splitlines(), 1):
        yield from (f"{name}:{number}: {word}" for word in RETIRED.findall(line))


def absent_files(name: str, text: str) -> Iterator[str]:
    """Yield the paths of ours in backticks, and the test files, that the checkout lacks; `*` stands for several."""
    paths = re.findall(
        r"`((?:daemon|shmring|connector|tests|benchmarks|charts|docs|systemd)/[\w/.*-]*[\w*])(?:/|::\w+)?`", text
    )
    names = [f"tests/**/{each}" for each in re.findall(r"`(test_[\w*]+\.py)`", text)]
    yield from (f"{name}: {path}" for path in paths + names if not any(ROOT.glob(path)))


def wrong_figures(name: str, text: str) -> Iterator[str]:
    """Yield the figures with a link to a day's page whose section there, which is made from the results, lacks them."""
    for figure, page, piece in re.findall(r"\[([\d.]+ [×%])\]\(([\w./-]*benchmarks/[\d-]+/README\.md)#(\w+)\)", text):
        section = ((ROOT / name).parent / page).read_text().partition(f"\n## {piece}\n")[2].partition("\n## ")[0]
        if figure not in section:
            yield f"{name}: {figure} is not in {page}#{piece}"


def test_links_words_files_and_figures_of_documents_are_right() -> None:
    """A check that finds nothing anywhere would be none: each has its example."""
    checks = (dead_links, retired_words, absent_files, wrong_figures)
    bad = "[a](docs/none.md) [b](README.md#none) a tier, `a tier`, `tests/none.py` and `test_none_at_all.py`"
    bad += " [7.1 ×](docs/benchmarks/2026-11-23/README.md#open)"
    found = [each for check in checks for each in check("README.md", bad)]
    assert found == [
        *("README.md: docs/none.md#", "README.md: README.md#none", "README.md:1: tier"),
        *("README.md: tests/none.py", "README.md: tests/**/test_none_at_all.py"),
        "README.md: 7.1 × is not in docs/benchmarks/2026-11-23/README.md#open",
    ]
    assert [each for name, text in DOCUMENTS.items() for check in checks for each in check(name, text)] == []


def words(name: str, text: str) -> int:
    """Return how many words a reader meets on this page."""
    written = {
        "docs/reference/compatibility.md": r"|^\| feature \|([^\n]+\n)+",
        "docs/reference/models.md": r"|^\| models \|([^\n]+\n)+",
        "docs/RELIABILITY.md": "|<!-- begin: make faults -->.*<!-- end -->",
    }.get(name, "|<!-- begin: python -m benchmarks.report.*?<!-- end -->")
    prose = re.sub("```.*?```" + written, "", text, flags=re.M | re.S)
    return 0 if name.startswith("docs/benchmarks/") else len(prose.split())


def test_the_documents_are_short() -> None:
    """What two pages say, one of them says less."""
    assert words("a.md", "three short words\n```sh\nno word\n```\n") == 3
    counts = {name: words(name, text) for name, text in DOCUMENTS.items()}
    longest = sorted(counts.items(), key=lambda count: -count[1])[:9]
    assert sum(counts.values()) <= MAX_WORDS, f"cut what repeats; the longest pages: {longest}"


def faults(name: str, text: str) -> Iterator[str]:
    """Yield what a decision record lacks: number, date, status, supersedes, three sections, about a dozen lines."""
    if not text.startswith(f"# {name[:4]}. "):
        yield f"{name}: its number"
    if not re.search(r"^Date: \d{4}-\d\d-\d\d\. Status: (accepted|proposed)\. Supersedes: ", text, re.MULTILINE):
        yield f"{name}: date, status and supersedes"
    if re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)[:3] != ["Context", "Decision", "Consequences"]:
        yield f"{name}: its sections"
    if len(text.splitlines()) > 30:
        yield f"{name}: it is too long"


def test_decision_records_are_complete_and_few() -> None:
    assert len(list(faults("0001-a.md", "# 0002. A\n" + "\n" * 30))) == 4
    assert [each for path in RECORDS for each in faults(path.name, path.read_text())] == []
    assert len(RECORDS) <= MAX_RECORDS


def test_the_index_has_each_decision_record_once() -> None:
    """docs/adr/README.md links each record exactly once, with the record's title."""
    rows = re.findall(r"^\* \[(\d{4})\]\((.*?)\) (.*)$", (ROOT / "docs/adr/README.md").read_text(), re.MULTILINE)
    titles = [(path.name[:4], path.name, path.read_text().splitlines()[0][8:]) for path in RECORDS]
    assert sorted(rows) == titles
