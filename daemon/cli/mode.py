"""`kvprefetchd mode on|shadow|off`: switch a running daemon for every engine."""

from __future__ import annotations

import argparse
from typing import get_args

from ...shmring.wire.admin import SetMode
from ..config.model import Mode
from .common import Commands, SocketPage, add_socket, command_daemon, declare

PAGE = SocketPage(
    "switch a running daemon on, to shadow or off",
    details="shadow: the daemon looks requests up and counts them in the log, but loads and saves nothing. off: it "
    "answers every request with a miss and asks no store. The mode holds until the next switch or restart; a start "
    "takes it from the key `mode` of the configuration. Requests in flight end as they began. Only root and the "
    "daemon's own user may switch.",
    examples=(
        ("kvprefetchd mode off", "take it out of the way without a restart"),
        ("kvprefetchd mode shadow", "see in the log what it would find"),
        ("kvprefetchd mode on", "back to work"),
    ),
    exits={0: "switched", 1: "the daemon could not", 69: "no daemon answers, or it refused"},
    also="kvprefetchd status",
)


def add(commands: Commands) -> None:
    parser = declare(commands, "mode", run, PAGE)
    parser.add_argument("mode", metavar="{on,shadow,off}", choices=get_args(Mode), help="the mode from now on")
    add_socket(parser)


def run(arguments: argparse.Namespace) -> int:
    return command_daemon(SetMode(mode=arguments.mode), arguments.socket)
