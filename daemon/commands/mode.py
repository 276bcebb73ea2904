"""`kvprefetchd mode on|shadow|off`: switch what a running daemon does for every engine."""

from __future__ import annotations

import argparse
from typing import get_args

from ...shmring import messages
from ..client import ask
from ..config import Mode
from .common import Commands, add_socket, declare, report

DETAILS = (
    "shadow: requests are looked up and counted in the log, but nothing is loaded or saved. off: every request is "
    "answered with a miss and the store is not asked. Holds until it is switched again or the daemon restarts; the key "
    "`mode` of the configuration says what a start begins with. Requests in flight end as they began."
)


def add(commands: Commands) -> None:
    parser = declare(commands, "mode", "switch a running daemon on, to shadow or off", run, details=DETAILS)
    parser.add_argument("mode", choices=get_args(Mode))
    add_socket(parser)


def run(arguments: argparse.Namespace) -> int:
    return report(ask(arguments.socket, messages.SetMode(mode=arguments.mode)))
