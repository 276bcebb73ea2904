"""Asking a running daemon over its control socket, for the commands that look at it or steer it."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from ...shmring.wire import admin, records
from ...shmring.wire.attach import Refused
from ...shmring.wire.codec import Message, receive_message, send_message

TIMEOUT_S = 5.0
EX_UNAVAILABLE = 69

Answer = TypeVar("Answer", bound=BaseModel)


_START = "start it (kvprefetchd serve, systemctl start kvprefetchd), or name its socket with --socket"
_ADVICE = {
    errno.ENOENT: _START,
    errno.ECONNREFUSED: _START,
    errno.EACCES: "its socket is for root, the daemon's user and members of the socket's group",
}


class Unavailable(Exception):
    """A daemon, a store or a file that the command needs does not answer; one line. The exit status is 69.

    `what` is that line without the `advice` on what to do, where there is any.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what}; {advice}" if advice else what)
        self.what, self.advice = what, advice


class Conversation:
    """A connection to the daemon behind the socket, for questions one after the other; use as a context manager."""

    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._path, self._timeout_s = path, timeout_s
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connected = False

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()

    def ask(self, query: Message, wanted: type[Answer]) -> Answer:
        """One question and its answer, of this kind. Raises Unavailable."""
        try:
            if not self._connected:
                self._sock.settimeout(self._timeout_s)
                self._sock.connect(str(self._path))
                self._connected = True
            send_message(self._sock, query)
            received = receive_message(self._sock, max_fds=0)
        except (OSError, records.ProtocolError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            advice = _ADVICE.get(error.errno or 0, "") if isinstance(error, OSError) else ""
            raise Unavailable(f"no daemon answers: socket={str(self._path)!r}: {why}", advice) from None
        if received is None:
            raise Unavailable(f"no daemon answers: socket={str(self._path)!r}: it hung up")
        answer = received[0]
        if isinstance(answer, wanted):
            return answer
        if isinstance(answer, Refused):
            raise Unavailable(f"the daemon refused: socket={str(self._path)!r}: {answer.error}")
        if isinstance(answer, admin.Report):
            raise Unavailable(answer.text)
        raise Unavailable(f"the daemon answered with something else: type={answer.type}")


def ask(path: Path, query: Message, wanted: type[Answer], timeout_s: float = TIMEOUT_S) -> Answer:
    """One question to the daemon behind the socket. Raises Unavailable."""
    with Conversation(path, timeout_s) as daemon:
        return daemon.ask(query, wanted)
