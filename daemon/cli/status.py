"""`kvprefetchd status`: the daemon's own account of what it holds, for people or as JSON."""

from __future__ import annotations

import argparse

from ...shmring.wire import admin
from ..telemetry.overview import describe
from .client import ask
from .common import SOCKET_ENVIRONMENT, SOCKET_FILE, Commands, add_socket, declare
from .help_page import Page

DETAILS = (
    "Asks over the control socket: whoever may attach an engine may ask, and sees the engines of this user; root and "
    "the daemon's own user see all. Whether the daemon is well is what /healthz and /readyz of its metrics port judge."
)
PAGE = Page(
    examples=(
        ("kvprefetchd status", "a few lines: mode, store, engines"),
        ("kvprefetchd status --json", "every number, for a program"),
        ("kvprefetchd status --socket /run/kvprefetch/kvprefetchd.sock", "of a certain daemon"),
    ),
    exits={0: "a daemon answered, whatever it said", 69: "no daemon answers, or it refused"},
    files=SOCKET_FILE,
    environment=SOCKET_ENVIRONMENT,
    also="kvprefetchd top, doctor",
)


def add(commands: Commands) -> None:
    parser = declare(commands, "status", "print what the daemon says it holds", run, PAGE, details=DETAILS)
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")
    add_socket(parser)


def run(arguments: argparse.Namespace) -> int:
    status = ask(arguments.socket, admin.StatusQuery(), admin.Status)
    print(status.model_dump_json(indent=2) if arguments.json else "\n".join(describe(status)))
    return 0
