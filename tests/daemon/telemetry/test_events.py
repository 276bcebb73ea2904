"""docs/EVENTS.md is the log's catalogue: what the code logs, with its level and fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.client import Answered, Blocks
from kvprefetch.daemon.telemetry import events, metrics
from kvprefetch.daemon.telemetry.causes import Cause
from kvprefetch.daemon.telemetry.events import FLOODS, LEVELS, Ending
from kvprefetch.shmring.wire import admin
from kvprefetch.shmring.wire.records import Outcome
from tests.support import documents
from tests.support.catalogue import COMMON, DOCUMENT, EVENTS, Field
from tests.support.log_lines import problems

ROOT = Path(__file__).resolve().parents[3]
# Words that had two meanings and more, or none without the author.
WORDS = {"ahead", "asked", "evicted", "late", "lost", "part", "room", "seat", "story", "tell", "tier", "told", "untold"}
METHODS = {*LEVELS, "warn", "critical", "exception", "fatal", "log", "msg"}


def log_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Calls of a method of something whose name ends in `log`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base = node.func.value
            name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
            if name.endswith("log") and node.func.attr in {*METHODS, "bind"}:
                yield node, node.func.attr


def violations(source: str, name: str) -> list[str]:
    """Log calls whose event, level or fields are not the catalogue's."""
    found = []
    for call, method in log_calls(ast.parse(source)):
        where = f"{name}:{call.lineno}"
        given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        open_ended = any(keyword.arg is None for keyword in call.keywords)
        if method == "bind":
            found += [f"{where}: binds {field}, which is not a common field" for field in sorted(given - COMMON.keys())]
            continue
        first = call.args[0] if len(call.args) == 1 else None
        if not isinstance(first, ast.Constant) or first.value not in EVENTS:
            found.append(f"{where}: not an event of the catalogue: {ast.unparse(call.args[0]) if call.args else ''}")
            continue
        event = EVENTS[first.value]
        if method != event.level:
            found.append(f"{where}: {first.value} is logged as {method}, the catalogue says {event.level}")
        wanted = {field for field, known in event.fields.items() if not known.may_be_absent}
        allowed = event.fields.keys() | COMMON.keys()
        found += [f"{where}: {first.value} has no field {field}" for field in sorted(given - allowed)]
        if not open_ended:
            found += [f"{where}: {first.value} lacks {field}" for field in sorted(wanted - given)]
    return found


def test_every_log_call_keeps_to_the_catalogue() -> None:
    found = []
    for path in sorted((ROOT / "daemon").rglob("*.py")):
        found += violations(path.read_text(), path.relative_to(ROOT).as_posix())
    assert found == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('log.info("daemon.redy")', "not an event"),
        ('self._log.info("master.retried", port=1, attempt=2)', "logged as info"),
        ('self.log.warning("store.failed", call="get", code=1, pause_s=1, key="x")', "no field key"),
        ('log.info("daemon.stopping")', "lacks signal"),
        ('log.exception("job.failed", error="x")', "logged as exception"),
        ("log.bind(request=1)", "not a common field"),
    ],
)
def test_a_wrong_log_call_is_found(call: str, words: str) -> None:
    found = violations(call, "planted.py")
    assert len(found) == 1
    assert words in found[0]


def test_every_event_is_logged_somewhere() -> None:
    logged = set()
    for path in (ROOT / "daemon").rglob("*.py"):
        for call, _ in log_calls(ast.parse(path.read_text())):
            if call.args and isinstance(call.args[0], ast.Constant):
                logged.add(call.args[0].value)
    assert set(EVENTS) == logged


def test_the_code_knows_the_events_of_the_document() -> None:
    assert {name: event.level for name, event in EVENTS.items()} == events.EVENTS
    assert {name for name, event in EVENTS.items() if event.floods} == FLOODS
    assert tuple(COMMON) == events.COMMON
    assert documents.endings() in DOCUMENT.read_text(), documents.command("endings")


def strangers(glossary: str, names: set[str]) -> set[str]:
    """Return the names with a word that had several meanings, or is retired, where the word's row has not the name."""
    rows = {word: set(re.findall(r"`(\w+)`", row)) for word, row in re.findall(r"^\| \*(\w+)\* (.*)$", glossary, re.M)}
    return {
        name for name in names for word in re.split(r"[._]", name) if word in WORDS and name not in rows.get(word, ())
    }


def test_a_word_in_the_names_of_log_metrics_and_api_has_the_meaning_of_the_glossary() -> None:
    """The row of a word that could mean several things has all names with it."""
    statistics = (ROOT / "docs/METRICS.md").read_text().split("## The connector's statistics")[1]
    names = {*EVENTS, *COMMON, *metrics.CATALOGUE, *admin.ENDS, *metrics.ANNOUNCED_RESULTS}
    names |= {name for shown in (admin.AnnounceStep, admin.Status, Answered, Blocks) for name in shown.model_fields}
    names |= set(re.findall(r"^\| `(\w+)` \|", statistics, re.MULTILINE))
    names |= {each.value for each in (*Ending, *Cause)} | {use for uses in metrics.USES.values() for use in uses}
    names |= {label for metric in metrics.CATALOGUE.values() for label in metric.labels}
    names |= {field for event in EVENTS.values() for field in event.fields}
    glossary = (ROOT / "docs/glossary.md").read_text()
    assert strangers(glossary, names) == set()
    assert strangers(glossary, {"slots.lost", "late", "room_ms", "hit_tier"}) == {"slots.lost", "hit_tier"}


def test_the_catalogue_is_consistent() -> None:
    """A field means the same in every event; key material is at level debug only."""
    known: dict[str, Field] = {}
    for name, event in EVENTS.items():
        noun, _, verb = name.partition(".")
        assert noun.isalpha(), name
        assert verb.isalpha(), name
        assert event.level in LEVELS
        assert event.level == "debug" or "line" not in event.fields, f"{name}: the master's output may name keys"
        for field, described in event.fields.items():
            same = described._replace(may_be_absent=False)
            assert known.setdefault(field, same) == same, f"{name}: {field} has another type or meaning elsewhere"


def test_every_outcome_that_an_engine_can_say_has_a_word() -> None:
    assert {outcome.name for outcome in Outcome} <= set(Ending.__members__)


def test_a_line_is_held_against_the_catalogue() -> None:
    good: dict[str, Any] = {"ts": "2026-01-01T00:00:00Z", "level": "warning", "event": "store.failed", "run_id": "r"}
    good |= {"call": "get", "code": -800, "pause_s": 0.5}
    assert problems(good) == []
    assert problems({**good, "event": "store.fainted"}) == ["store.fainted: not in the catalogue"]
    assert "level" in problems({**good, "level": "info"})[0]
    assert "not of this event" in problems({**good, "key": "k"})[0]
    assert "not of type integer" in problems({**good, "code": True})[0]
    assert "not of type number" in problems({**good, "pause_s": None})[0]
    assert "looks like a key" in problems({**good, "call": "model@tp_rank:0@" + 64 * "a"})[0]
    del good["code"]
    assert problems(good) == ["store.failed: no field code"]
