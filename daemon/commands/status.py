"""`kvprefetchd status`: the daemon's own account of what it holds."""

from __future__ import annotations

import argparse

from ...shmring import protocol
from ..client import ask
from .common import Commands, add_socket, declare


def add(commands: Commands) -> None:
    add_socket(declare(commands, "status", "print what the daemon says it holds, as JSON", run))


def run(arguments: argparse.Namespace) -> int:
    answer, _ = ask(arguments.socket, protocol.StatusQuery())
    print(answer.model_dump_json(indent=2))
    return 0
