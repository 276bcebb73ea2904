"""`kvprefetchd top`: engines, queues, staging, link rate, hidden fraction and the slowest requests, live."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace

from kvprefetch.client.control import look

from ..telemetry import overview
from .common import EX_UNAVAILABLE, NO_COLOR, Arguments, Real, SocketPage, declare, flag, option, show, socket_option
from .help_page import CommandGroup

PAGE = SocketPage(
    "show the daemon's work, live",
    details="Engines with their queues, staging and hits, the rates since the last look, the hidden fraction (the "
    "share of look-up and transfer that no scheduler waited for), how fast the store was, what made requests slow, and "
    "the requests that waited longest. Where the output is no terminal it looks twice and ends, as with --once.",
    examples=(
        ("kvprefetchd top", "until q or Ctrl-C; h: legend, s and r: sort, /: filter"),
        ("kvprefetchd top --interval 5", "a calmer one"),
        ("kvprefetchd top --once", "one look, for a report"),
        ("kvprefetchd top --json", "one look, for a program"),
    ),
    exits={0: "interrupted, or --once", 69: "no daemon answers, or it died"},
    also="kvprefetchd status, stat; docs/METRICS.md",
)
PAGE = replace(PAGE, environment={**PAGE.environment, **NO_COLOR})


def add(commands: CommandGroup) -> None:
    interval = Real(0.1, 3600)
    declare(
        commands,
        "top",
        run,
        PAGE,
        socket_option(),
        option("--interval", metavar="S", type=interval, default=1.0, help="seconds between looks"),
        flag("--once", "look twice, an interval apart, print that, and end"),
        flag("--json", "as --once, as JSON: the status, and `now` with the rates"),
    )


def run(arguments: Arguments) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        if arguments.once or arguments.json or not sys.stdout.isatty():
            before, since = look(arguments.socket, ids=True), time.monotonic()
            time.sleep(arguments.interval)
            now = look(arguments.socket, ids=True)
            rates = overview.rates(before, now, time.monotonic() - since)
            if arguments.json:
                show(now.model_dump() | {"now": rates._asdict()}, ok=now.alive, problems=now.problems)
            else:
                print("\n".join(overview.describe(now, rates)))
            return 0 if now.alive else EX_UNAVAILABLE
        else:
            from . import top_view  # rich is slow to import, and only this needs it

            top_view.live(arguments.socket, arguments.interval)
    return 0
