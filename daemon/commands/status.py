"""`kvprefetchd status`: the daemon's own account of what it holds, for people or as JSON."""

from __future__ import annotations

import argparse

from ...shmring import messages
from ..client import ask
from ..overview import describe
from .common import Commands, add_socket, declare


def add(commands: Commands) -> None:
    parser = declare(commands, "status", "print what the daemon says it holds", run)
    parser.add_argument("--json", action="store_true", help="all of it, as JSON")
    add_socket(parser)


def run(arguments: argparse.Namespace) -> int:
    answer, _ = ask(arguments.socket, messages.StatusQuery())
    if arguments.json or not isinstance(answer, messages.Status):
        print(answer.model_dump_json(indent=2))
    else:
        print("\n".join(describe(answer)))
    return 0
