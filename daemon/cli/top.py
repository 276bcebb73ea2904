"""`kvprefetchd top`: engines, queues, staging, link rate, hidden fraction and the slowest requests, live."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from functools import partial
from pathlib import Path

from ...shmring.wire.admin import Status, StatusQuery
from ..telemetry import overview
from .client import ask
from .common import Commands, SocketPage, add_socket, declare, seconds

PAGE = SocketPage(
    "show the daemon's work, live",
    details="Engines with their queues, staging and hits, the rates since the last look, the hidden fraction (the "
    "share of look-up and transfer that no scheduler waited for), how fast the store was, what made requests slow, and "
    "the requests that waited longest. Where the output is no terminal it looks twice and ends, as with --once.",
    examples=(
        ("kvprefetchd top", "until q or Ctrl-C; h: legend, s and r: sort, /: filter"),
        ("kvprefetchd top --interval 5", "a calmer one"),
        ("kvprefetchd top --once", "one look, for a report or a script"),
    ),
    exits={0: "interrupted, or --once", 69: "no daemon answers"},
    also="kvprefetchd status, stat; docs/METRICS.md",
)


def add(commands: Commands) -> None:
    parser = declare(commands, "top", run, PAGE)
    add_socket(parser)
    interval = partial(seconds, least=0.1)
    parser.add_argument("--interval", metavar="S", type=interval, default=1.0, help="seconds between looks")
    parser.add_argument("--once", action="store_true", help="look twice, an interval apart, print that, and end")


def run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        if arguments.once or not sys.stdout.isatty():
            print("\n".join(looked_twice(arguments.socket, arguments.interval)))
        else:
            from . import top_view  # rich is slow to import, and only this needs it

            top_view.live(arguments.socket, arguments.interval)
    return 0


def looked_twice(socket: Path, interval_s: float) -> list[str]:
    """Return the lines of `status` with the rates between two looks. Raises Unavailable."""
    before, since = ask(socket, StatusQuery(), Status), time.monotonic()
    time.sleep(interval_s)
    now = ask(socket, StatusQuery(), Status)
    return overview.describe(now, overview.rates(before, now, time.monotonic() - since))
