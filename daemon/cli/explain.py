"""`kvprefetchd explain`: one request's timeline in the terminal, and where its time went."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterable

from ..telemetry.pretty import printable
from ..telemetry.reader import Record, records
from ..telemetry.trace_picture import explain
from .client import Unavailable
from .common import Commands, declare
from .help_page import HelpPage
from .log_source import LOG_FILE, add_log_source, lines, log_source_name

PAGE = HelpPage(
    "draw one request's timeline from the log, and say where its time went",
    details="The log has one request.done line for each hinted request, written at its end. A request that was hinted "
    "twice is shown twice. vLLM adds to the id that its client knows: a part of it is enough.",
    examples=(
        ("kvprefetchd explain cmpl-7 kvprefetchd.log", "from a file"),
        ("kvprefetchd explain cmpl-7 --journal", "from the service's journal"),
        ("kvprefetchd tail --slow 20 kvprefetchd.log", "which requests are worth it"),
    ),
    exits={0: "found", 69: "no such request, several of them, or no log"},
    files=LOG_FILE,
    also="kvprefetchd tail; docs/EVENTS.md has the fields of the line",
)

NAMED = 5  # ids in the error, when a part of one fits several


def add(commands: Commands) -> None:
    parser = declare(commands, "explain", run, PAGE)
    parser.add_argument("request", metavar="REQUEST_ID", help="its id, or a part of it that no other request has")
    add_log_source(parser)


def run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt), lines(arguments) as log:
        spelt = json.dumps(arguments.request)[1:-1].encode()  # a line without it needs no parsing
        found = records(line for line in log if spelt in line)
        for record in find(found, arguments.request, log_source_name(arguments)):
            print(explain(record), end="\n\n")
    return 0


def find(log: Iterable[Record], wanted: str, where: str) -> list[Record]:
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
