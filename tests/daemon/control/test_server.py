"""The handshake where an engine's memory cannot be made, or where its ranks do not come."""

from __future__ import annotations

import os
import select
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.control.group import INCOMPLETE_NS
from kvprefetch.daemon.control.listener import listen
from kvprefetch.daemon.control.refusals import Refusals
from kvprefetch.daemon.control.server import Control
from kvprefetch.daemon.engine.reservations import Reserved
from kvprefetch.daemon.store.errors import StoreError
from kvprefetch.shmring.wire.admin import Report
from kvprefetch.shmring.wire.attach import Notice, Refused
from kvprefetch.shmring.wire.codec import receive_message
from tests.support.fake_engine import FakeEngine, answer
from tests.support.ordinary import effective_user


class RefusedEpochs:
    """The store refuses the memory that was reserved."""

    def __init__(self) -> None:
        self.reservations = self
        self.done: list[Reserved] = []

    def attached(self) -> list[Any]:
        return []

    def want(self, number: int, config: Any, engine: Any) -> None:
        self.done.append(Reserved(number, StoreError("registering 4096 bytes failed with code -1")))

    def next_done(self) -> Reserved | None:
        return self.done.pop() if self.done else None

    def withdraw(self, number: int) -> None: ...


class SlowEpochs(RefusedEpochs):
    """Memory is a long time in the making."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[int] = []
        self.freed: list[Any] = []

    def want(self, number: int, config: Any, engine: Any) -> None:
        self.wanted.append(number)

    def free(self, memory: Any) -> None:
        self.freed.append(memory)


class Served:
    """A control socket at `path` without a daemon around it."""

    def __init__(self, path: Path, epochs: RefusedEpochs, **settings: Any) -> None:
        config = DaemonConfig.model_validate({"socket": str(path), "max_engines": 1, **settings})
        log = structlog.get_logger()
        self.shared = shared = SimpleNamespace(config=config, log=log, refusals=Refusals(), waiting=[])
        self.path, self.epoll, self.epochs, self.now_ns = path, select.epoll(), epochs, 0
        self.control = Control(listen(config), shared, epochs, self.epoll)  # type: ignore[arg-type]

    def turn(self) -> None:
        """Accept waiting connections, and read their messages."""
        waits = True
        while waits:
            self.now_ns += 1_000_000_000  # nobody asked for too much
            self.control.ready([fd for fd, _ in self.epoll.poll(0)], self.now_ns)
            waits = self.control.carry_on(self.now_ns) or bool(self.epoll.poll(0))

    def close(self) -> None:
        self.control.close()
        self.epoll.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "d.sock", RefusedEpochs())
    yield served
    served.close()


def test_an_engine_whose_memory_the_store_refuses_is_refused_and_the_daemon_goes_on(served: Served) -> None:
    """RDMA registers staging, and may not be allowed to lock so much."""
    for _ in range(2):  # the place of the first is free again
        engine = FakeEngine(served.path, attach=False)
        peers = engine.greet_all()
        served.turn()
        for sock in peers:
            assert "registering 4096 bytes failed" in answer(sock, Refused).error
            assert sock.recv(1) == b""
        assert served.epoll.poll(0) == []
        engine.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_engine_whose_user_may_attach_no_more_when_its_memory_comes_gets_none() -> None:
    other, memory, epochs = 4242, object(), SlowEpochs()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        served = Served(Path(folder, "d.sock"), epochs, socket_mode="0666", allow_uids=[other])
        with effective_user(other):
            engine = FakeEngine(served.path, attach=False)
            peers = engine.greet_all()
        served.turn()
        os.chown(served.path, -1, other + 1)  # a group that the engine's processes do not have
        config = DaemonConfig.model_validate({"socket": str(served.path), "socket_mode": "0666"})
        served.control.reload(config, Report(ok=True, text=""))
        epochs.done = [Reserved(epochs.wanted[0], memory)]  # type: ignore[arg-type]
        served.turn()
        for sock in peers:
            assert f"uid={other} may not attach" in answer(sock, Refused).error
        assert epochs.freed == [memory]
        engine.close()
        served.close()


@pytest.mark.parametrize(("ranks", "missing"), [(1, "0"), (3, "0, 2"), (40, "0, 2, 3, 4, 5, 6, 7, 8, …")])
def test_ranks_that_do_not_come_are_one_warning_in_both_logs(served: Served, ranks: int, missing: str) -> None:
    """They run on another node, or look for another socket; without a report the scheduler would wait in silence."""
    engine = FakeEngine(served.path, attach=False, ranks=ranks)

    def join(role: str, rank: int) -> socket.socket:
        sock = engine.greet(role, rank)
        served.turn()
        sock.settimeout(0.1)
        return sock

    with capture_logs() as logs:
        workers = [join("worker", 1)] if ranks > 1 else []
        served.control.tick(INCOMPLETE_NS)
        assert [log["event"] for log in logs if log["log_level"] == "warning"] == [], "no scheduler: it may start"
        scheduler = join("scheduler", 0)
        for now_ns in range(INCOMPLETE_NS - 1, 4 * INCOMPLETE_NS, INCOMPLETE_NS):
            served.control.tick(now_ns)
    (log,) = [log for log in logs if log["log_level"] == "warning"]
    assert (log["event"], log["come"], log["ranks"]) == ("engine.incomplete", len(workers), ranks)
    assert log["missing"] == missing
    text = answer(scheduler, Notice).text
    assert f"{len(workers)} of {ranks} ranks have attached to this daemon, missing: rank {missing}." in text
    for sock in (scheduler, *workers):
        with pytest.raises(TimeoutError):
            receive_message(sock)
