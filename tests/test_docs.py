"""The documents hold together: links, the records of decisions and their index, and the words that we use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("systemd/*.md"), *(ROOT / "docs").rglob("*.md")])
RECORDS = sorted((ROOT / "docs/adr").glob("[0-9]*.md"))
# Retired words (docs/glossary.md has ours).  Code in backticks and fences is exempt: users know names as they are.
RETIRED = re.compile(
    r"\b(tiers?|told|untold|whoever|widths?|stor(?:y|ies)|seats?|(?:staged?|staging) ahead|put_(?:factor|turn))\b",
    re.IGNORECASE,
)
# A scenario is called so.
QUOTED = {"docs/SIMULATION.md": {"tiers"}}


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to a document's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document: Path) -> None:
    """Each relative link names a file of the checkout, and a heading of it where it has an anchor."""
    for file, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", document.read_text()):
        target = document.parent / file if file else document
        assert target.exists(), file
        if anchor:
            assert anchor in anchors(target.read_text()), f"{file}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_document_has_a_retired_word(document: Path) -> None:
    """Prose uses the glossary's words; a retired word is found with its line."""
    text = re.sub(r"```.*?```|`[^`]*`", lambda code: "\n" * code[0].count("\n"), document.read_text(), flags=re.DOTALL)
    allowed = QUOTED.get(document.relative_to(ROOT).as_posix(), set())
    found = [
        f"{number}: {word}"
        for number, line in enumerate(text.splitlines(), 1)
        for word in RETIRED.findall(line)
        if word not in allowed
    ]
    assert found == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_a_decision_record_is_complete(record: Path) -> None:
    """A record has number, date, status, supersedes, and the three sections, in about a dozen lines."""
    text = record.read_text()
    assert text.startswith(f"# {record.name[:4]}. ")
    assert re.search(r"^Date: \d{4}-\d\d-\d\d\. Status: (accepted|proposed)\. Supersedes: ", text, re.MULTILINE)
    assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)[:3] == ["Context", "Decision", "Consequences"]
    assert len(text.splitlines()) <= 30


def test_the_index_has_each_decision_record_once() -> None:
    """docs/adr/README.md links each record exactly once, with the record's title."""
    rows = re.findall(r"^\* \[(\d{4})\]\((.*?)\) (.*)$", (ROOT / "docs/adr/README.md").read_text(), re.MULTILINE)
    titles = [(path.name[:4], path.name, path.read_text().splitlines()[0][8:]) for path in RECORDS]
    assert sorted(rows) == titles


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_files_that_a_document_names_exist(document: Path) -> None:
    """Each path of ours in backticks, and each test file, is one of the checkout; `*` stands for several."""
    text = document.read_text()
    paths = re.findall(
        r"`((?:daemon|shmring|connector|tests|benchmarks|charts|docs|systemd)/[\w/.*-]*[\w*])(?:/|::\w+)?`", text
    )
    names = [f"tests/**/{name}" for name in re.findall(r"`(test_[\w*]+\.py)`", text)]
    assert [path for path in paths + names if not any(ROOT.glob(path))] == []
