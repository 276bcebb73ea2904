"""`kvprefetchd stat`: the numbers in the attached engines' control segments."""

from __future__ import annotations

import argparse
import json

from ...shmring.wire.admin import Segments, StatQuery
from .client import ask
from .common import Commands, SocketPage, add_socket, declare

PAGE = SocketPage(
    "print the numbers in the attached engines' shared memory as JSON",
    details="The daemon reads ring positions, flags by state, credits and heartbeats, and changes none of them. It "
    "shows the engines that status names. For a daemon that may be stuck, status and /healthz say more.",
    examples=(("kvprefetchd stat", "every engine's ring, flags, credits and heartbeats"),),
    exits={69: "no daemon answers, or it refused"},
    also="kvprefetchd status; docs/SHMRING.md has the layout",
)


def add(commands: Commands) -> None:
    add_socket(declare(commands, "stat", run, PAGE))


def run(arguments: argparse.Namespace) -> int:
    print(json.dumps(ask(arguments.socket, StatQuery(), Segments).engines, indent=2))
    return 0
