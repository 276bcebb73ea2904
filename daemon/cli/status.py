"""`kvprefetchd status`: the daemon's mode, store and engines, for people or as JSON."""

from __future__ import annotations

import argparse

from ...shmring.wire.admin import Status, StatusQuery
from ..telemetry.overview import describe
from .client import ask
from .common import Commands, SocketPage, add_socket, declare

PAGE = SocketPage(
    "print the daemon's mode, store and engines",
    details="Any user who may attach an engine may ask over the control socket, and sees the engines of this user; "
    "root and the daemon's own user see all. /healthz and /readyz of the metrics port say whether the daemon is well.",
    examples=(
        ("kvprefetchd status", "a few lines: mode, store, engines"),
        ("kvprefetchd status --json", "every number, for a program"),
        ("kvprefetchd status --socket /run/kvprefetch/kvprefetchd.sock", "of a certain daemon"),
    ),
    exits={0: "a daemon answered, even with bad news", 69: "no daemon answers, or it refused"},
    also="kvprefetchd top, doctor",
)


def add(commands: Commands) -> None:
    parser = declare(commands, "status", run, PAGE)
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")
    add_socket(parser)


def run(arguments: argparse.Namespace) -> int:
    status = ask(arguments.socket, StatusQuery(), Status)
    print(status.model_dump_json(indent=2) if arguments.json else "\n".join(describe(status)))
    return 0
