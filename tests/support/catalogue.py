"""The log's catalogue, as docs/EVENTS.md has it: every event, its level, and its fields with their types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/EVENTS.md"
_EVENT = re.compile(r"### `(.+)`\n\n(.+) \((\w+)(; summed once a second)?\)\n")
_FIELD = re.compile(r"\| `(\w+)` \| (\w+)( or null)?(, may be absent)? \| (.+) \|")
_NAME = re.compile(r"`(\w+)(\?)?`")


class Field(NamedTuple):
    """One field of an event. `kind`: the JSON type."""

    kind: str
    null: bool
    may_be_absent: bool
    meaning: str


class Event(NamedTuple):
    """One event. `floods`: summed once a second for each engine."""

    level: str
    meaning: str
    floods: bool
    fields: dict[str, Field]


def section(title: str) -> str:
    """Return the text below a headline of the second level."""
    return DOCUMENT.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _fields(text: str) -> dict[str, Field]:
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    found = [_FIELD.fullmatch(row) for row in rows]
    assert all(found), [row for row, match in zip(rows, found, strict=True) if match is None]
    return {each[1]: Field(each[2], bool(each[3]), bool(each[4]), each[5]) for each in found if each is not None}


def _events() -> Iterator[tuple[str, Event]]:
    """Yield each event; a field that it names with `?` may be absent."""
    for text in re.split(r"(?=^### )", section("Events"), flags=re.MULTILINE)[1:]:
        match = _EVENT.match(text)
        assert match is not None, text
        names = _NAME.findall(text[match.end() :])
        fields = {name: FIELDS[name]._replace(may_be_absent=bool(absent)) for name, absent in names}
        yield match[1], Event(match[3], match[2], bool(match[4]), fields)


COMMON = _fields(section("Fields of every line"))
FIELDS = _fields(section("Fields"))
EVENTS = dict(_events())
