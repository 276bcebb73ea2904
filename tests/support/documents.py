"""Prints the tables of the documents from the catalogues and configuration models in the code.

`.venv-check/bin/python -m tests.support.documents TABLE`, with `endings` (docs/EVENTS.md), `metrics` (docs/METRICS.md),
`connector` or `daemon` (docs/reference/configuration.md), `exits` (docs/reference/command-line.md), `openapi`
(docs/reference/openapi.json), or `chart`
(charts/kvprefetchd/values.schema.json).
`.venv/bin/python` does it, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from kvprefetch.connector.words.config import ConnectorConfig
from kvprefetch.daemon.cli.common import default_text, kind_of
from kvprefetch.daemon.cli.help_page import EXITS, CommandGroup
from kvprefetch.daemon.cli.main import build
from kvprefetch.daemon.config.model import NEXT_ATTACH, RELOADABLE, SIZES, DaemonConfig
from kvprefetch.daemon.telemetry.causes import Cause
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.daemon.telemetry.metrics import CATALOGUE, PREFIX
from tests.support.openapi import describe

ROOT = Path(__file__).resolve().parents[2]


def endings() -> str:
    """The tables of outcomes and causes in docs/EVENTS.md."""
    lines = ["## Outcomes", "", "| `outcome` | meaning |", "| --- | --- |"]
    lines += [f"| `{ending.value}` | {ending.meaning} |" for ending in Ending]
    lines += ["", "## Causes", "", "| `cause` | in `top` | in `explain`, with its values |", "| --- | --- | --- |"]
    lines += [f"| `{each.value}` | {each.label} | {each.text.replace('{', '').replace('}', '')} |" for each in Cause]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """The table of docs/METRICS.md."""
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for name, (kind, meaning, labels, *_) in CATALOGUE.items():
        shown = PREFIX + name + ("_total" if kind == "counter" else "")
        lines.append(f"| `{shown}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |")
    return "\n".join(lines) + "\n"


def connector() -> str:
    """The table of the connector's keys in docs/reference/configuration.md."""
    lines = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in ConnectorConfig.model_fields.items():
        default = COMPUTED.get(name) or f"`{json.dumps(field.default)}`"
        lines.append(f"| `{name}` | {_choices(kind_of(field))} | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


def daemon() -> str:
    """The table of the daemon's options in docs/reference/configuration.md."""
    lines = ["| option | value | default | reload | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, field in DaemonConfig.model_fields.items():
        kind = "size" if name in SIZES else _choices(kind_of(field))
        unset = field.get_default(call_default_factory=True) in (None, ())
        default = COMPUTED.get(name) or (default_text(name, field) if unset else f"`{default_text(name, field)}`")
        reload = "next attach" if name in NEXT_ATTACH else "at once" if name in RELOADABLE else "restart"
        lines.append(f"| `--{name.replace('_', '-')}` | {kind} | {default} | {reload} | {field.description} |")
    return "\n".join(lines) + "\n"


def exits() -> str:
    """The table of docs/reference/command-line.md."""
    lines = ["| status | command | meaning |", "| --- | --- | --- |"]
    pages = {name: each.page for name, each in build().all_commands().items() if not isinstance(each, CommandGroup)}
    rows = [(status, name, said) for name, page in pages.items() for status, said in page.exits.items()]
    rows += [(status, "", said) for status, said in EXITS.items()] + [(130, "", "interrupted, where no row says else")]
    for status, name, said in sorted(rows, key=lambda row: row[:2]):
        lines.append(f"| {status} | {f'`{name}`' if name else 'any'} | {said} |")
    return "\n".join(lines) + "\n"


def chart() -> str:
    """The schema of the chart's values: Helm refuses unknown keys before anything is installed."""
    values = yaml.safe_load((ROOT / "charts/kvprefetchd/values.yaml").read_text())
    values |= {name: {} for name in ("resources", "updateStrategy", "global")}  # Kubernetes' own, and Helm's
    schema: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#", **_schema(values)}
    schema["properties"]["config"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {} for name in DaemonConfig.model_fields if name not in OF_THE_CHART},
    }
    return json.dumps(schema, indent=2) + "\n"


def _schema(value: Any) -> dict[str, Any]:
    """Return the schema of values like this one. An empty object may have any keys."""
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    schema: dict[str, Any] = {"type": kinds[type(value)]}
    if isinstance(value, dict) and value:
        schema["additionalProperties"] = False
        schema["properties"] = {name: _schema(each) for name, each in value.items()}
    return schema


# Keys of the configuration that the chart sets.
OF_THE_CHART = {"socket", "metrics_address", "metrics_port", "disk", "mooncake_config"}

# Defaults that are computed when the process starts.
COMPUTED = {"socket": "see below", "fetch_threads": "half the cores, 2 to 4", "reset_timeout_ms": "5000 or more"}


def _choices(kind: str) -> str:
    """Name the choices of a key, else the kind of its value."""
    if kind.startswith("{"):
        return ", ".join(f"`{choice}`" for choice in kind[1:-1].split(","))
    return {"N": "number", "X": "number", "PATH": "path"}.get(kind, "")


def command(table: str) -> str:
    """Return the failure text for a document that lacks this table: the command that prints it."""
    return f"the table differs from the code; print it: {sys.executable} -m tests.support.documents {table}"


TABLES = {
    "endings": endings,
    "metrics": metrics,
    "connector": connector,
    "daemon": daemon,
    "exits": exits,
    "openapi": lambda: json.dumps(describe(), indent=1) + "\n",
    "chart": chart,
}

if __name__ == "__main__":
    print(TABLES[sys.argv[1]](), end="")
