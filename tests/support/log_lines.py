"""Checks a line of the daemon's log against the catalogue of events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvprefetch.daemon.telemetry.events import COMMON, EVENTS, FIELDS, Ending

_KINDS: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
_DIGEST = re.compile(r"[0-9a-fA-F]{40}")


def problems(record: Mapping[str, Any]) -> list[str]:
    """Return where a parsed log line differs from the catalogue; empty when it does not."""
    name = record.get("event")
    event = EVENTS.get(str(name))
    if event is None:
        return [f"{name}: not in the catalogue"]
    found = []
    if record.get("level") != event.level:
        found.append(f"{name}: level={record.get('level')!r} expected={event.level!r}")
    wanted = {field for field in (*COMMON, *event.fields) if not field.endswith("?")}
    allowed = {field.rstrip("?") for field in (*COMMON, *event.fields)}
    found += [f"{name}: no field {field}" for field in sorted(wanted - set(record))]
    found += [f"{name}: field {field} is not of this event" for field in sorted(set(record) - allowed)]
    for field, value in record.items():
        known = FIELDS.get(field) or COMMON.get(field) or COMMON.get(field + "?")
        if known is not None and not _fits(known.kind, value):
            found.append(f"{name}: {field}={value!r} is not of type {known.kind}")
    if name == "request.done" and record.get("outcome") not in {ending.value for ending in Ending}:
        found.append(f"{name}: outcome={record.get('outcome')!r} is not in the vocabulary")
    if event.level != "debug":
        found += [
            f"{name}: {field} holds what looks like a key"
            for field, value in record.items()
            if isinstance(value, str) and field not in ("request_id", "engine") and _DIGEST.search(value)
        ]
    return found


def _fits(kind: str, value: object) -> bool:
    if value is None:
        return kind.endswith("?")
    kind = kind.rstrip("?")
    return isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
