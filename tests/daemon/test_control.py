"""The handshake, where what is to be made for an engine cannot be made."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import structlog

from kvprefetch.daemon.access import Access
from kvprefetch.daemon.control import Control
from kvprefetch.daemon.store.client import StoreError
from kvprefetch.shmring import messages
from tests.daemon.fake_engine import FakeEngine


def test_an_engine_whose_memory_the_store_refuses_is_refused_and_the_daemon_goes_on(tmp_path: Path) -> None:
    """RDMA registers staging, and may not be allowed to lock so much."""
    path = tmp_path / "d.sock"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(path))
    listening.listen()
    watched: list[int] = []

    def refuses(*_: Any) -> Any:
        raise StoreError("registering 4096 bytes failed with code -1")

    nothing: Any = None
    control = Control(
        listening, lambda _epoch, _engine, done: done(nothing), refuses, structlog.get_logger(),
        access=Access(-1, frozenset()), status=nothing, steer=nothing, max_engines=1,
        max_engines_per_uid=1, watch=watched.append, unwatch=watched.remove,
    )  # fmt: skip
    for _ in range(2):  # the place of the first is free again
        engine = FakeEngine(path, attach=False)
        peers = [engine.connect(), engine.connect()]
        messages.send_message(peers[0], engine.hello("worker"))
        messages.send_message(peers[1], engine.hello("scheduler"))
        control.ready(listening.fileno())
        control.ready(*watched)
        for sock in peers:
            received = messages.receive_message(sock)
            assert received is not None
            assert isinstance(received[0], messages.Refused)
            assert "registering 4096 bytes failed" in received[0].error
            assert sock.recv(1) == b""
        assert watched == []
        assert control.sessions() == control.ended == []
        engine.close()
    listening.close()
