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
from .help_page import Page
from .log_source import SOURCE_FILE, add_source, lines, searched

DETAILS = (
    "The log has one request.done line for each hinted request, written when it has ended. A request that was hinted "
    "more than once is shown as often. vLLM appends to the id that its client knows: a part of it is enough."
)
PAGE = Page(
    examples=(
        ("kvprefetchd explain cmpl-7 kvprefetchd.log", "from a file"),
        ("kvprefetchd explain cmpl-7 --journal", "from the service's journal"),
        ("kvprefetchd tail --slow 20 kvprefetchd.log", "which requests are worth it"),
    ),
    exits={0: "found", 69: "no such request, several of them, or no log"},
    files=SOURCE_FILE,
    also="kvprefetchd tail; docs/EVENTS.md has the fields of the line",
)

NAMED = 5  # ids that are told when a part of one fits several


def add(commands: Commands) -> None:
    parser = declare(
        commands, "explain", "draw one request's timeline from the log, and say where its time went", run, PAGE,
        details=DETAILS,
    )  # fmt: skip
    parser.add_argument("request", metavar="REQUEST_ID", help="its id, or a part of it that no other request has")
    add_source(parser)


def run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt), lines(arguments) as source:
        spelt = json.dumps(arguments.request)[1:-1].encode()  # a line without it is not worth parsing
        log = records(line for line in source if spelt in line)
        for record in find(log, arguments.request, searched(arguments)):
            print(explain(record), end="\n\n")
    return 0


def find(log: Iterable[Record], wanted: str, where: str) -> list[Record]:
    """The request.done lines of one request, oldest first. Raises Unavailable, which says `where` was searched, when
    there is none, or more than one.
    """
    exact: list[Record] = []
    partly: dict[str, list[Record]] = {}
    for record in log:
        name = str(record.get("request_id", ""))
        if record["event"] != "request.done":
            continue
        if name == wanted:
            exact.append(record)
        elif wanted in name and (name in partly or len(partly) <= NAMED):  # a large log may have any number of them
            partly.setdefault(name, []).append(record)
    if exact:
        return exact
    if len(partly) == 1:
        return next(iter(partly.values()))
    if partly:
        some = printable(", ".join(list(partly)[:NAMED]))
        if len(partly) > NAMED:
            raise Unavailable(f"more than {NAMED} requests have {wanted!r} in their id: {some}, …")
        raise Unavailable(f"{len(partly)} requests have {wanted!r} in their id: {some}")
    raise Unavailable(
        f"no request.done line in {where} has {wanted!r} in its id: it has not ended, was not hinted, or is older than "
        "this log"
    )
