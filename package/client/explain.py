"""One request of the daemon's log, explained: its times, where they went, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvprefetch.daemon.telemetry import reader, trace_picture
from kvprefetch.daemon.telemetry.pretty import printable
from kvprefetch.daemon.telemetry.reader import Record
from kvprefetch.daemon.telemetry.trace_picture import Span

from .control import Unavailable

NAMED = 5  # ids in the error, when a part of one fits several


class Explanation(NamedTuple):
    """One life of a request: its `request.done` line (docs/EVENTS.md), the parts of its time, and sentences."""

    record: Record
    spans: list[Span]
    said: list[str]

    @property
    def text(self) -> str:
        """The same, drawn for people."""
        return trace_picture.explain(self.record)


def explain(request_id: str, log: str | os.PathLike[str] | Iterable[bytes], *, where: str = "") -> list[Explanation]:
    """Return the lives of the request with this id, or with this part of an id that no other has, oldest first.

    `log`: the daemon's log, as a file or as lines.  `where`: its name in the error.  Raises Unavailable when no request
    or more than one has `request_id` in its id, and OSError.
    """
    if isinstance(log, (str, os.PathLike)):
        with Path(log).open("rb") as file:
            return explain(request_id, reader.stream(file), where=where or os.fspath(log))
    spelt = json.dumps(request_id)[1:-1].encode()  # a line without it needs no parsing
    found = _find(reader.records(line for line in log if spelt in line), request_id, where or "the log")
    return [Explanation(each, trace_picture.spans(each), trace_picture.said(each)) for each in found]


def _find(log: Iterable[Record], wanted: str, where: str) -> list[Record]:
    """Return the request.done lines of one request, oldest first. Raises Unavailable, with the log's name `where`, when
    no request or more than one has `wanted` in its id."""
    found: dict[str, list[Record]] = {}
    for record in log:
        name = str(record.get("request_id", ""))
        if record["event"] != "request.done" or wanted not in name:
            continue
        if name in found or name == wanted or len(found) <= NAMED:  # a large log may have any number of them
            found.setdefault(name, []).append(record)
    if wanted in found:
        return found[wanted]
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        some = printable(", ".join(list(found)[:NAMED]))
        if len(found) > NAMED:
            raise Unavailable(f"more than {NAMED} requests have {wanted!r} in their id: {some}, …")
        raise Unavailable(f"{len(found)} requests have {wanted!r} in their id: {some}")
    raise Unavailable(
        f"no request.done line in {where} has {wanted!r} in its id: it has not ended, was not hinted, or is older than "
        "this log"
    )
