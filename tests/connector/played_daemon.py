"""A control socket on which a test plays the daemon, for tests of the link."""

from __future__ import annotations

import socket
from pathlib import Path

from kvprefetch.shmring.doorbell import Doorbell
from kvprefetch.shmring.wire.attach import Attached, Hello, Mapped
from kvprefetch.shmring.wire.codec import Message, receive_message, send_message
from tests.support.clock import Clock
from tests.support.engine_side import EngineSpec

from .fakes import FakeDaemon

hello = EngineSpec(max_blocks=64, block_bytes=16).hello


class Server:
    """A listening control socket; the test plays its connections."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.bind(str(path))
        self.sock.listen(4)
        self.sock.settimeout(30)
        self.fake = FakeDaemon(Clock())
        self._accepted: list[socket.socket] = []

    def close(self) -> None:
        for sock in (self.sock, *self._accepted):
            sock.close()

    def accept(self) -> tuple[socket.socket, Hello]:
        sock, _ = self.sock.accept()
        self._accepted.append(sock)
        sock.settimeout(30)
        message = self.receive(sock)
        assert isinstance(message, Hello)
        return sock, message

    @staticmethod
    def receive(sock: socket.socket) -> Message:
        received = receive_message(sock)
        assert received is not None
        return received[0]

    def attached(self, fake: FakeDaemon | None = None) -> socket.socket:
        """Accept a scheduler and attach it."""
        sock, _ = self.accept()
        self.attach(sock, fake or self.fake)
        return sock

    def attach(self, sock: socket.socket, fake: FakeDaemon) -> None:
        bell = Doorbell.create()
        layout = fake.layout
        send_message(
            sock,
            Attached(epoch=layout.epoch, segment_bytes=layout.total_bytes, slot_count=layout.slot_count, slot_bytes=0),
            [fake.segment.fd, bell.fd],
        )
        bell.close()
        assert self.receive(sock) == Mapped(epoch=layout.epoch)
