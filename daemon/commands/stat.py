"""`kvprefetchd stat`: what the attached engines' control segments say, read here and not by the daemon."""

from __future__ import annotations

import argparse
import json
import os
import time

from ...shmring import messages, protocol
from ...shmring.errors import SegmentCorrupt, SegmentError
from ..client import Conversation, Unavailable
from .common import SOCKET_ENVIRONMENT, SOCKET_FILE, Commands, add_socket, declare
from .page import Page

DETAILS = (
    "The daemon only hands out read-only descriptors; ring positions, flags by state, credits and heartbeats are read "
    "here. For a daemon that may be stuck, status and /healthz say more."
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
    from ...shmring import view  # imported late, with NumPy

    with Conversation(arguments.socket) as daemon:
        answer, fds = daemon.ask(messages.StatQuery(), messages.Segments)
    names = {state.value: state.name.lower() for state in protocol.FlagState}
    shown = []
    for fd, engine in zip(fds, answer.engines, strict=False):
        try:
            shown.append({"engine": engine, **view.read(fd, time.monotonic_ns(), names)})
        except (SegmentCorrupt, SegmentError) as error:  # of another release, or spoiled
            raise Unavailable(f"the segment cannot be read: engine={engine!r}: {error}") from None
        finally:
            os.close(fd)
    print(json.dumps(shown, indent=2))
    return 0
