"""The handshake, where an engine's memory cannot be made, or its ranks do not come."""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from kvprefetch.daemon.control import group
from kvprefetch.daemon.control.access import Access
from kvprefetch.daemon.control.server import Control
from kvprefetch.daemon.store.client import StoreError
from kvprefetch.daemon.store.namespaces import Namespaces
from kvprefetch.shmring.wire.attach import Notice, Refused
from kvprefetch.shmring.wire.codec import receive_message, send_message
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
        listening, lambda _epoch, _engine, done: done(nothing), lambda _: None, refuses, structlog.get_logger(),
        access=Access(-1, frozenset()), namespaces=Namespaces(None, nothing), status=nothing, steer=nothing,
        max_engines=1, max_engines_per_uid=1, watch=watched.append, unwatch=watched.remove,
    )  # fmt: skip
    for _ in range(2):  # the place of the first is free again
        engine = FakeEngine(path, attach=False)
        peers = [engine.connect(), engine.connect()]
        send_message(peers[0], engine.hello("worker"))
        send_message(peers[1], engine.hello("scheduler"))
        control.ready(listening.fileno())
        control.ready(*watched)
        for sock in peers:
            received = receive_message(sock)
            assert received is not None
            assert isinstance(received[0], Refused)
            assert "registering 4096 bytes failed" in received[0].error
            assert sock.recv(1) == b""
        assert watched == []
        assert control.epochs() == control.ended == []
        engine.close()
    listening.close()


@pytest.mark.parametrize(("ranks", "missing"), [(1, "0"), (3, "0, 2"), (40, "0, 2, 3, 4, 5, 6, 7, 8, …")])
def test_ranks_that_do_not_come_are_one_warning_in_both_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, missing: str
) -> None:
    """They run on another node, or look for another socket; the scheduler would wait for ever, and say nothing."""
    path = tmp_path / "d.sock"
    nothing: Any = None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen()
        control = Control(
            listening, nothing, nothing, nothing, structlog.get_logger(), access=Access(-1, frozenset()),
            namespaces=Namespaces(None, nothing), status=nothing, steer=nothing, max_engines=1, max_engines_per_uid=1,
            watch=lambda fd: None, unwatch=lambda fd: None,
        )  # fmt: skip
        engine = FakeEngine(path, attach=False, ranks=ranks)

        def join(role: str, rank: int) -> socket.socket:
            sock = engine.connect()
            send_message(sock, engine.hello(role, rank))
            control.ready(listening.fileno())
            control.ready(*control.connections._peers)
            sock.settimeout(0.1)
            return sock

        with capture_logs() as logs:
            workers = [join("worker", 1)] if ranks > 1 else []
            monkeypatch.setattr(group, "INCOMPLETE_S", 0.0)
            control.tick()
            assert [log["event"] for log in logs if log["log_level"] == "warning"] == [], "no scheduler: it may start"
            scheduler = join("scheduler", 0)
            for _ in range(3):
                control.tick()
        (log,) = [log for log in logs if log["log_level"] == "warning"]
        assert (log["event"], log["come"], log["ranks"], log["missing"]) == (
            "engine.incomplete", len(workers), ranks, missing,
        )  # fmt: skip
        received = receive_message(scheduler)
        assert received is not None
        assert isinstance(received[0], Notice)
        assert f"{len(workers)} of {ranks} ranks have attached to this daemon, missing: rank {missing}." in (
            received[0].text
        )
        for sock in (scheduler, *workers):
            with pytest.raises(TimeoutError):
                receive_message(sock)
        assert all(each.overdue_s == math.inf for each in control._groups.values())
        control.close()
        engine.close()
