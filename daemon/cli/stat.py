"""`kvprefetchd stat`: print what the attached engines' control segments say."""

from __future__ import annotations

import argparse
import json

from ...shmring.wire import admin
from .client import ask
from .common import SOCKET_ENVIRONMENT, SOCKET_FILE, Commands, add_socket, declare
from .help_page import Page

DETAILS = (
    "The daemon reads ring positions, flags by state, credits and heartbeats, and changes none of them. It shows the "
    "engines that status names. For a daemon that may be stuck, status and /healthz say more."
)
PAGE = Page(
    examples=(("kvprefetchd stat", "every engine's ring, flags, credits and heartbeats"),),
    exits={69: "no daemon answers, or it refused"},
    files=SOCKET_FILE,
    environment=SOCKET_ENVIRONMENT,
    also="kvprefetchd status; docs/SHMRING.md has the layout",
)


def add(commands: Commands) -> None:
    text = "print what the shared memory of the attached engines says, read-only, as JSON"
    add_socket(declare(commands, "stat", text, run, PAGE, details=DETAILS))


def run(arguments: argparse.Namespace) -> int:
    print(json.dumps(ask(arguments.socket, admin.StatQuery(), admin.Segments).engines, indent=2))
    return 0
