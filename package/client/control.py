"""Asks a running daemon over its control socket, or looks at its picture."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from kvprefetch.daemon.telemetry import board, overview
from kvprefetch.shmring.wire.admin import Report, Status, StatusQuery
from kvprefetch.shmring.wire.attach import Refused
from kvprefetch.shmring.wire.codec import Message, receive_message, send_message
from kvprefetch.shmring.wire.control_socket import find, own_socket, sockets
from kvprefetch.shmring.wire.records import ProtocolError

TIMEOUT_S = 5.0
IDS_S = 1.0

A = TypeVar("A", bound=BaseModel)

_START = "start it (kvprefetchd serve, systemctl start kvprefetchd), or name its socket with --socket"
_ADVICE = {
    errno.ENOENT: _START,
    errno.ECONNREFUSED: _START,
    errno.EACCES: "its socket is for root, the daemon's user and members of the socket's group",
}


class Unavailable(Exception):
    """A daemon, store or file that the command needs does not answer. The text is one line, the exit status 69.

    `what` is that line without `advice`, which tells the user what to do.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what}; {advice}" if advice else what)
        self.what, self.advice = what, advice


class Busy(Unavailable):
    """The HTTP door takes no more prompts of this user for a moment: ask again in a second."""


class Conversation:
    """A connection to the daemon for questions one after the other; use it as a context manager."""

    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connected = False

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()

    def ask(self, query: Message, wanted: type[A]) -> A:
        """Send a question and return its answer of the wanted kind. Raises Unavailable."""
        where = f"socket={str(self._path)!r}"
        try:
            if not self._connected:
                self._sock.settimeout(self._timeout_s)
                self._sock.connect(str(self._path))
                self._connected = True
            send_message(self._sock, query)
            received = receive_message(self._sock, max_fds=0)
        except ProtocolError as error:
            raise Unavailable(f"no daemon answers: {where}: {error}") from None
        except OSError as error:
            advice = _ADVICE.get(error.errno or 0, "")
            raise Unavailable(f"no daemon answers: {where}: {error.strerror or error}", advice) from None
        if received is None:
            raise Unavailable(f"no daemon answers: {where}: it hung up")
        answer = received[0]
        if isinstance(answer, wanted):
            return answer
        if isinstance(answer, Refused):
            raise Unavailable(f"the daemon refused: {where}: {answer.error}")
        if isinstance(answer, Report):
            raise Unavailable(answer.text)
        raise Unavailable(f"the daemon answered with something else: type={answer.type}")


def look(path: Path, *, ids: bool = False, timeout_s: float = TIMEOUT_S) -> Status:
    """Return the status of the daemon behind the socket. Raises Unavailable.

    Root and the daemon's own user read it in the daemon's picture, which is there while the daemon hangs and after it
    died; other users ask the socket, which shows each its own engines.  `ids`: with the requests that waited longest,
    which the picture does not name.
    """
    picture = board.read(path)
    ours = picture is not None and os.geteuid() in (0, picture.uid)
    if picture is None or not ours or not picture.alive:  # where that daemon died, another user's may serve
        try:
            return ask(path, StatusQuery(), Status, timeout_s)
        except Unavailable as error:
            if picture is None or not (problems := picture.health().problems):
                raise
            if not ours:
                raise Unavailable(f"{error.what}: {problems[0]}", error.advice) from None
    slowest, health = None, picture.health()
    if ids and health.healthy:
        with contextlib.suppress(Unavailable):
            slowest = ask(path, StatusQuery(), Status, IDS_S).slowest
    now_ns = None if picture.alive else picture.beat_ns
    try:
        return overview.as_status(picture.status, health, now_ns, slowest)
    except ValueError as error:
        raise Unavailable(f"the daemon's picture cannot be read: socket={str(path)!r}: {error}") from None


def find_socket(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the socket of the daemon that an engine of this user finds; of one that died, where none answers."""
    found = find(paths := sockets(environ))
    if found.sock is not None:
        found.sock.close()
        return Path(found.path)
    return Path(next(filter(os.path.lexists, reversed(paths)), own_socket(environ)))


def ask(path: Path, query: Message, wanted: type[A], timeout_s: float = TIMEOUT_S) -> A:
    """Ask the daemon behind the socket one question. Raises Unavailable."""
    with Conversation(path, timeout_s) as daemon:
        return daemon.ask(query, wanted)
