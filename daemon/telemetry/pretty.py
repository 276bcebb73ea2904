"""Formats one log line for human eyes: on a terminal, and for `kvprefetchd tail`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import IO, Any

from ..config.sizes import size

_COLOURS = {"debug": "2", "info": "", "warning": "33", "error": "31;1"}
_MOST = 1e18  # a number beyond it, or not finite, is none of ours
_MOST_SHOWN = 1200
_HIDDEN = {"ts", "level", "event", "run_id", "engine", "epoch"}


def wants_colour(stream: IO[str]) -> bool:
    """Tell whether to write colours: to a terminal, unless $NO_COLOR has a value (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def line(record: Mapping[str, Any], *, colour: bool = False) -> str:
    """Return `month-day time level event engine field=value …`, UTC; request.done has a sentence of its own."""
    level, event = str(record.get("level", "")), str(record.get("event", ""))
    time = str(record.get("ts", ""))[5:23].replace("T", " ")
    engine = str(record.get("engine", ""))
    head = f"{time:18} {level:7} {event:16} {engine[:12]:12}"
    body = _request(record) if event == "request.done" else _fields(record)
    text = printable(f"{head} {body}".rstrip())
    code = _COLOURS.get(level, "")
    return f"\x1b[{code}m{text}\x1b[0m" if colour and code else text


def _fields(record: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in record.items() if name not in _HIDDEN)


def _request(record: Mapping[str, Any]) -> str:
    get = record.get
    parts = [
        f"{get('request_id', '')} {get('outcome', '')}:",
        f"{get('loaded_blocks', 0)} of {get('hint_blocks', 0)} blocks",
    ]
    if get("local_blocks"):
        parts.append(f"({get('local_blocks')} local)")
    if get("store_unavailable"):
        parts.append("(store unavailable)")
    if fetched := figure(record, "bytes"):
        start, end = (figure(record, name) for name in ("hint_seen_ms", "last_byte_ms"))
        took = "–" if start is None or end is None else f"{number(end - start)} ms"
        parts.append(f"fetched {size(fetched)} in {took}")
    parts.append(f"waited {number(figure(record, 'exposed_ms'))} ms")
    if (hidden := figure(record, "hidden_fraction")) is not None:
        parts.append(f"hidden {100 * hidden:.0f} %")
    return " ".join(parts)


def figure(record: Mapping[str, Any], name: str) -> float | None:
    """Return a field that should be a number; None when it is absent, null or (in a foreign line) anything else."""
    return figures(record, (name,)).get(name)


def figures(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """Return those of these fields that are such numbers."""
    found = dict[str, float]()
    for name in names:
        value = record.get(name)
        if isinstance(value, (int, float)) and -_MOST < value < _MOST:
            found[name] = value
    return found


def amount(record: Mapping[str, Any], name: str) -> float:
    """Return the same, 0 for None."""
    return figure(record, name) or 0.0


def count(record: Mapping[str, Any], name: str) -> int:
    return int(amount(record, name))


def number(value: Any) -> str:
    """Format with about three digits: 0.42, 7.31, 118."""
    if not isinstance(value, (int, float)):
        return "–"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{round(value, digits) + 0.0:.{digits}f}"  # never -0.00


def printable(text: str) -> str:
    """Replace control characters: ids and errors come from elsewhere, and a terminal obeys what it gets."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def fitting(text: str) -> str:
    """Return one printable line of an error, without its middle where it is long: it may quote anything."""
    text = printable(text)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN // 2]} … {text[-_MOST_SHOWN // 2 :]}"
