"""The door's connection to the daemon: asks for engines, announces prompts, and hears what becomes of them."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from ...shmring.wire.admin import Announce, AnnounceStep, Engine, EngineQuery, Report
from ...shmring.wire.codec import Message, receive_message, send_message
from ...shmring.wire.records import ProtocolError
from .envelope import Bad

TIMEOUT_S = 2.0


class DaemonConnection:
    """One connection for all threads. `gone` is called, once, when the daemon hangs up. Raises OSError."""

    def __init__(self, path: Path, hear: Callable[[AnnounceStep], None], gone: Callable[[], None]) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # For a daemon that stands still; a timeout of Python's would be one for `_listen`, too.
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(TIMEOUT_S), 0))
        self._sock.connect(os.fspath(path))
        self._sending, self._asking = threading.Lock(), threading.Lock()
        self._answers: queue.SimpleQueue[Engine | Report] = queue.SimpleQueue()
        self._number = 0  # of the last question
        self._hear, self._gone = hear, gone
        threading.Thread(target=self._listen, name="daemon", daemon=True).start()

    def engine(self, query: EngineQuery) -> Engine:
        """Return the engine that the query is about. Raises Bad."""
        with self._asking:
            self._number += 1
            self._send(query.model_copy(update={"number": self._number}))
            try:
                while (answer := self._answers.get(timeout=TIMEOUT_S)).number != self._number:
                    pass  # it came too late for the one that asked
            except queue.Empty:
                raise Bad(503, f"the daemon did not answer: timeout_s={TIMEOUT_S:g}; try again") from None
        if isinstance(answer, Engine):
            return answer
        raise Bad(403 if answer.forbidden else 404, answer.text)

    def announce(self, order: Announce, hashes: bytes) -> None:
        """Announce a prompt with these digests, joined. Raises Bad."""
        with os.fdopen(os.memfd_create("announced"), "wb") as file:
            file.write(hashes)
            file.flush()
            self._send(order, [file.fileno()])

    def _send(self, message: Message, fds: list[int] | None = None) -> None:
        try:
            with self._sending:
                send_message(self._sock, message, fds or [])
        except OSError as error:
            raise Bad(503, f"the daemon cannot be asked: {error.strerror}; try again") from None

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ProtocolError), self._sock:
            while (received := receive_message(self._sock, max_fds=0)) is not None:
                message, _ = received
                if isinstance(message, AnnounceStep):
                    self._hear(message)
                elif isinstance(message, Engine | Report):
                    self._answers.put(message)
        self._gone()
