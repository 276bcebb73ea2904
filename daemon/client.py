"""Asking a running daemon over its control socket, for the commands that look at it or steer it."""

from __future__ import annotations

import socket
from pathlib import Path

from ..shmring import messages, protocol

MAX_SEGMENTS = 64  # descriptors in one answer
TIMEOUT_S = 5.0


class Unavailable(Exception):
    """A daemon, a store or a file that the command needs does not answer; one line. The exit status is 69."""


def ask(path: Path, query: messages.Message, timeout_s: float = TIMEOUT_S) -> tuple[messages.Message, list[int]]:
    """One question to the daemon behind the socket; the caller owns the descriptors. Raises Unavailable."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
            messages.send_message(sock, query)
            received = messages.receive_message(sock, max_fds=MAX_SEGMENTS)
    except (OSError, protocol.ProtocolError) as error:
        raise Unavailable(f"no daemon answers: socket={str(path)!r}: {error}") from None
    if received is None:
        raise Unavailable(f"no daemon answers: socket={str(path)!r}: it hung up")
    if isinstance(received[0], messages.Refused):
        raise Unavailable(f"the daemon refused: socket={str(path)!r}: {received[0].error}")
    return received
