"""Checks a line of the daemon's log against the catalogue of events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvprefetch.daemon.telemetry.events import Ending
from tests.support.catalogue import COMMON, EVENTS, Field

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
    fields = {**COMMON, **event.fields}
    wanted = {field for field, known in fields.items() if not known.may_be_absent}
    found += [f"{name}: no field {field}" for field in sorted(wanted - set(record))]
    found += [f"{name}: field {field} is not of this event" for field in sorted(set(record) - set(fields))]
    for field, value in record.items():
        if field in fields and not _fits(fields[field], value):
            found.append(f"{name}: {field}={value!r} is not of type {fields[field].kind}")
    if name == "request.done" and record.get("outcome") not in {ending.value for ending in Ending}:
        found.append(f"{name}: outcome={record.get('outcome')!r} is not in the vocabulary")
    if event.level != "debug":
        found += [
            f"{name}: {field} holds what looks like a key"
            for field, value in record.items()
            if isinstance(value, str) and field not in ("request_id", "engine") and _DIGEST.search(value)
        ]
    return found


def _fits(field: Field, value: object) -> bool:
    if value is None:
        return field.null
    return isinstance(value, _KINDS[field.kind]) and (field.kind == "boolean" or not isinstance(value, bool))
