"""Run the HTTP door on sockets that listen already: `CONTROL_SOCKET TOKEN_FILE FD…`, until standard input ends."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from waitress.channel import HTTPChannel
from waitress.server import create_server
from waitress.task import ErrorTask, WSGITask
from waitress.utilities import Error

from ...shmring.wire.admin import Caller
from ..control.access import credentials_of
from .app import CALLER, MAX_BODY, WAITERS, App
from .envelope import Problem
from .link import DaemonConnection
from .messages import Messages
from .token import read_token

THREADS = 2 * WAITERS + 4
CONNECTIONS = 128  # of a socket at a time; one costs a descriptor, and a thread only once its request is whole
SLOW_S = 10  # without a byte, then a connection is closed
MAX_HEADER = 64 << 10
IN_MEMORY = 64 << 10  # of a body that comes; waitress keeps a longer one in a file until its turn
BODIES = 8 * MAX_BODY  # of all connections, also of those whose turn has not come
NICE = 10  # behind the daemon's fetches, FETCH_NICE


class _Task(WSGITask):  # type: ignore[misc]
    """Tells the application which user is on the other side of a Unix socket."""

    def get_environment(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environment()
        return environ | {CALLER: self.channel.caller}


class _Refusal(ErrorTask):  # type: ignore[misc]
    """Says in our words what no application has seen, such as a body that is too large."""

    def execute(self) -> None:
        error, size = self.request.error, max(self.request.content_length, self.request.body_bytes_received)
        text = f"{error.reason}: {error.body}: bytes={size}"
        said = Problem(error=" ".join(text.split())[:400]).model_dump_json().encode() + b"\n"
        self.status, self.content_length = f"{error.code} {error.reason}", len(said)
        self.response_headers.append(("Content-Type", "application/json"))
        self.set_close_on_finish()
        self.write(said)


class _Busy(Error):  # type: ignore[misc]
    code, reason = 503, "Service Unavailable"


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A caller. Where there are too many, the oldest one without a whole request goes, of the user who has most.

    So does the longest body that still comes, where all of them together are too long.
    """

    task_class, error_task_class = _Task, _Refusal
    request: Any  # that comes, or None

    def __init__(self, server: Any, *arguments: Any, **more: Any) -> None:
        super().__init__(server, *arguments, **more)
        self.uid, self.caller = -1, None
        if self.socket.family == socket.AF_UNIX:
            _, self.uid, groups = credentials_of(self.socket)
            self.caller = Caller(uid=self.uid, groups=sorted(groups)[:256])
        if len(server.active_channels) > CONNECTIONS:
            waiting = [each for each in server.active_channels.values() if not each.requests]
            [(most, _)] = Counter(each.uid for each in waiting).most_common(1)
            next(each for each in waiting if each.uid == most).handle_close()

    @property
    def body_bytes(self) -> int:
        """How much of its bodies is kept."""
        return sum(each.body_bytes_received for each in [*self.requests, self.request] if each is not None)

    def received(self, data: bytes) -> bool:
        taken: bool = super().received(data)
        if self.body_bytes > IN_MEMORY:
            kept = {each: each.body_bytes for each in self._map.values() if isinstance(each, _Channel)}
            if sum(kept.values()) > BODIES:
                users = Counter[int]()
                for each, count in kept.items():
                    users[each.uid] += count
                [(most, _)] = users.most_common(1)
                coming = [each for each in kept if each.request is not None]
                own = [each for each in coming if each.uid == most] or [each for each in coming if each is self]
                for each in sorted(own, key=kept.__getitem__)[-1:]:
                    each.refuse()
        return taken

    def refuse(self) -> None:
        """Answer before the body is there, and forget what came of it."""
        with self.requests_lock:
            request, self.request = self.request, None
            request.error = _Busy(f"the bodies of all callers are too long: max={BODIES}; try again")
            request.completed = True
            request.close()
            request.body_bytes_received = 0
            self.requests.append(request)
            if len(self.requests) == 1:
                self.server.add_task(self)


def _wait_for_the_end() -> None:
    """End with the daemon, which holds the other end of standard input."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def main(words: list[str]) -> None:
    os.setpgrp()  # Ctrl-C is for the daemon
    os.nice(NICE)
    logging.getLogger("waitress").setLevel(logging.CRITICAL)  # a caller that leaves, or waits, is no event
    control, token, *fds = words
    messages = Messages()
    link = DaemonConnection(Path(control), messages.note, lambda: os._exit(1))
    app = App(link, messages, read_token(Path(token)) if token else b"")
    shared: dict[int, Any] = {}  # one loop for all sockets
    for each in fds:
        server = create_server(
            app,
            map=shared,
            sockets=[socket.socket(fileno=int(each))],
            threads=THREADS,
            connection_limit=2 * CONNECTIONS * len(fds),  # of all sockets: a channel above CONNECTIONS goes before
            channel_timeout=SLOW_S,
            cleanup_interval=2,
            max_request_body_size=MAX_BODY,
            inbuf_overflow=IN_MEMORY,
            recv_bytes=IN_MEMORY,
            max_request_header_size=MAX_HEADER,
            ident="kvprefetchd",
            expose_tracebacks=False,
            asyncore_use_poll=True,
        )
        server.channel_class = _Channel
    threading.Thread(target=_wait_for_the_end, name="end", daemon=True).start()
    server.run()


if __name__ == "__main__":
    main(sys.argv[1:])
