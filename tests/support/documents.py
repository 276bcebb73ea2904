"""Prints the tables of docs/EVENTS.md and docs/METRICS.md from the catalogues in the code.

`python -m tests.support.documents events`, or `metrics`.
"""

from __future__ import annotations

import sys

from kvprefetch.daemon.telemetry.events import COMMON, EVENTS, FIELDS, Ending, Field
from kvprefetch.daemon.telemetry.metrics import CATALOGUE, PREFIX


def events() -> str:
    """The tables of docs/EVENTS.md."""
    lines = ["## Fields of every line", "", "| field | type | meaning |", "| --- | --- | --- |"]
    lines += [_row(name, field) for name, field in COMMON.items()]
    lines += ["", "## Outcomes", "", "| `outcome` | meaning |", "| --- | --- |"]
    lines += [f"| `{ending.value}` | {ending.meaning} |" for ending in Ending]
    lines += ["", "## Events", ""]
    for name, event in EVENTS.items():
        floods = "; summed once a second" if event.floods else ""
        lines += [f"### `{name}`", "", f"{event.meaning} ({event.level}{floods})", ""]
        if event.fields:
            lines += ["| field | type | meaning |", "| --- | --- | --- |"]
            lines += [_row(field, FIELDS[field.rstrip("?")]) for field in event.fields]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(name: str, field: Field) -> str:
    kind = field.kind.rstrip("?") + (" or null" if field.kind.endswith("?") else "")
    return f"| `{name.rstrip('?')}` | {kind}{', may be absent' if name.endswith('?') else ''} | {field.meaning} |"


def metrics() -> str:
    """The table of docs/METRICS.md."""
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for name, (kind, meaning, labels) in CATALOGUE.items():
        shown = PREFIX + name + ("_total" if kind == "counter" else "")
        lines.append(f"| `{shown}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print({"events": events, "metrics": metrics}[sys.argv[1]](), end="")
