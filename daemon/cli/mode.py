"""`kvprefetchd mode on|shadow|off`: switch what a running daemon does for every engine."""

from __future__ import annotations

import argparse
from typing import get_args

from ...shmring.wire import admin
from ..config.model import Mode
from .common import SOCKET_ENVIRONMENT, SOCKET_FILE, Commands, add_socket, declare, give
from .help_page import Page

DETAILS = (
    "shadow: requests are looked up and counted in the log, but nothing is loaded or saved. off: every request is "
    "answered with a miss and the store is not asked. Holds until it is switched again or the daemon restarts; the key "
    "`mode` of the configuration says what a start begins with. Requests in flight end as they began. Only root and "
    "the daemon's own user may."
)
PAGE = Page(
    examples=(
        ("kvprefetchd mode off", "take it out of the way without a restart"),
        ("kvprefetchd mode shadow", "see in the log what would be found"),
        ("kvprefetchd mode on", "back to work"),
    ),
    exits={0: "switched", 1: "the daemon could not", 69: "no daemon answers, or it refused"},
    files=SOCKET_FILE,
    environment=SOCKET_ENVIRONMENT,
    also="kvprefetchd status",
)


def add(commands: Commands) -> None:
    parser = declare(commands, "mode", "switch a running daemon on, to shadow or off", run, PAGE, details=DETAILS)
    parser.add_argument("mode", metavar="{on,shadow,off}", choices=get_args(Mode), help="what it is to do from now on")
    add_socket(parser)


def run(arguments: argparse.Namespace) -> int:
    return give(admin.SetMode(mode=arguments.mode), arguments.socket)
