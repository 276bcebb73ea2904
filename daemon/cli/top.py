"""`kvprefetchd top`: engines, queues, staging, link rate, hidden fraction and the slowest requests, live."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from ...shmring.wire.admin import Status, StatusQuery
from ..telemetry import overview
from .client import ask
from .common import SOCKET_ENVIRONMENT, SOCKET_FILE, Commands, add_socket, declare
from .help_page import Page

PAGE = Page(
    examples=(
        ("kvprefetchd top", "until Ctrl-C"),
        ("kvprefetchd top --interval 5", "a calmer one"),
        ("kvprefetchd top --once", "one look, for a report or a script"),
    ),
    exits={0: "interrupted, or --once", 69: "no daemon answers"},
    files=SOCKET_FILE,
    environment=SOCKET_ENVIRONMENT,
    also="kvprefetchd status, stat; docs/METRICS.md",
)
DETAILS = (
    "Engines with their queues, staging and hits, the rates since the last look, the hidden fraction (the share of "
    "look-up and transfer that no scheduler waited for), and the requests that waited longest. Where the output is no "
    "terminal it looks twice and ends, as with --once."
)


def add(commands: Commands) -> None:
    parser = declare(commands, "top", "show what the daemon does, live", run, PAGE, details=DETAILS)
    add_socket(parser)
    parser.add_argument("--interval", metavar="S", type=_seconds, default=1.0, help="seconds between looks")
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
    """As `status`, and what happened between two looks. Raises Unavailable."""
    before, since = ask(socket, StatusQuery(), Status), time.monotonic()
    time.sleep(interval_s)
    now = ask(socket, StatusQuery(), Status)
    return overview.describe(now, overview.rates(before, now, time.monotonic() - since))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"should be seconds from 0.1 to 3600: {text!r}")
    return value
