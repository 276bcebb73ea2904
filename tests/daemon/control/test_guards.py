"""What a process may not say on the control socket is refused in one line, and engines that are attached go on."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.control.connections import MAX_STRANGERS
from kvprefetch.shmring.wire.admin import Announce, AnnounceStep, Caller, EngineQuery, Report, StatusQuery
from kvprefetch.shmring.wire.attach import Mapped, Refused, Reset
from kvprefetch.shmring.wire.codec import Message, encode_message, send_message
from tests.daemon.control.test_server import Served, SlowEpochs
from tests.daemon.stores import blocks
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import FakeEngine, answer
from tests.support.ordinary import effective_user
from tests.support.waiting import eventually

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may connect as another user")


@pytest.fixture
def engine(shared_daemon: Daemon) -> FakeEngine:
    return FakeEngine(shared_daemon.socket, engine_id="attached")


def refused(sock: socket.socket, message: Message, fds: list[int] | None = None) -> str:
    """Send a message that is refused, and ends the connection; return why."""
    socket.send_fds(sock, [encode_message(message)], fds or [])
    error = answer(sock, Refused).error
    assert sock.recv(1) == b""
    return error


def test_a_process_that_comes_back_while_its_engine_s_memory_is_made_comes_again_later(tmp_path: Path) -> None:
    """Its engine has its place still; as one of its processes it would be given memory that was made for another."""
    served = Served(tmp_path / "d.sock", SlowEpochs())
    engine = FakeEngine(served.path, attach=False)
    worker, _ = engine.greet_all()
    served.turn()
    worker.close()
    served.turn()
    again = engine.greet("worker")
    served.turn()
    told = answer(again, Refused)
    assert (told.error, told.final) == ("already attached: role=worker rank=0", False)
    engine.close()
    served.close()


def test_an_engine_s_process_asks_nothing_on_its_connection(engine: FakeEngine) -> None:
    """Its messages do not count against the time that its user's questions may take."""
    error = refused(engine.scheduler, StatusQuery())
    assert error == "an engine's process asks nothing on its connection: type=status_query"


def test_a_process_maps_its_own_epoch_alone(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, attach=False)
    worker, scheduler = engine.greet_all()
    attached, fds = engine.receive(worker)
    for fd in fds:
        os.close(fd)
    other = attached.epoch + 1
    assert refused(worker, Mapped(epoch=other)) == f"mapped an epoch that is not current: epoch={other}"
    scheduler.close()


def test_a_worker_resets_nothing(shared_daemon: Daemon, engine: FakeEngine) -> None:
    worker, values = engine.sockets[0], blocks("kept", 2)
    engine.save(values)
    eventually(lambda: engine.load(list(values)), what="a hit")
    assert refused(worker, Reset(reset_generation=1, weights="1" * 32)) == (
        "only the scheduler of an attached engine may reset it"
    )
    assert shared_daemon.records("engine.reset") == []


@contextlib.contextmanager
def announcing(daemon: Daemon) -> Iterator[socket.socket]:
    """The connection of root, as the HTTP door has one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect(str(daemon.socket))
        yield sock


def announcement(engine: FakeEngine, epoch: int, digests: int = 1) -> Announce:
    caller = Caller(uid=os.geteuid(), groups=[])
    named = engine.spec.engine_id
    return Announce(caller=caller, number=5, name="m", engine=named, epoch=epoch, hashes=digests, hash_bytes=32)


def memfd(content: bytes) -> int:
    fd = os.memfd_create("digests", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


@needs_root
def test_an_announcement_for_an_earlier_epoch_is_rejected(shared_daemon: Daemon, engine: FakeEngine) -> None:
    """Its digests were made for that epoch's groups and weights."""
    with announcing(shared_daemon) as sock:
        fd = memfd(bytes(32))
        send_message(sock, announcement(engine, engine.epoch - 1), [fd])
        os.close(fd)
        told = answer(sock, AnnounceStep)
    assert (told.number, told.outcome) == (5, "rejected")
    assert told.reason.startswith("this engine is not attached any more: engine='attached' epoch=")


@needs_root
@pytest.mark.parametrize("kind", ["pipe", "short", "long"])
def test_the_digests_of_an_announcement_come_in_a_memfd_of_their_size(
    shared_daemon: Daemon, engine: FakeEngine, kind: str
) -> None:
    """A read of anything else might wait, and the loop with it."""
    sizes, fds = {"short": 31, "long": 33}, list(os.pipe()) if kind == "pipe" else []
    sent = fds[0] if fds else memfd(bytes(sizes[kind]))
    with announcing(shared_daemon) as sock:
        error = refused(sock, announcement(engine, engine.epoch), [sent])
    for fd in {sent, *fds}:
        os.close(fd)
    assert "the digests of an announcement " in error
    assert ask_daemon(shared_daemon.socket).engine_count >= 1


@pytest.mark.parametrize("count", [1, 2])
def test_descriptors_that_no_message_has_are_refused_and_closed(
    shared_daemon: Daemon, engine: FakeEngine, count: int
) -> None:
    """The door's process alone sends one; an engine's process sends none."""
    before = len(os.listdir(f"/proc/{shared_daemon.pid}/fd"))
    fds = [memfd(bytes(32)) for _ in range(count)]
    if count == 1:
        error = refused(engine.scheduler, Mapped(epoch=engine.epoch), fds)
    else:
        with announcing(shared_daemon) as sock:
            error = refused(sock, EngineQuery(caller=Caller(uid=0, groups=[])), fds)
    for fd in fds:
        os.close(fd)
    assert error.startswith("control message is too large: max_bytes=65536 max_fds=")
    eventually(lambda: len(os.listdir(f"/proc/{shared_daemon.pid}/fd")) <= before, what="no descriptor more")


@needs_root
def test_connections_of_users_who_may_not_attach_are_bounded() -> None:
    """They are silent, so nothing refuses them; each would keep one of the daemon's descriptors."""
    made, other = list[socket.socket](), 54322
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        settings = {"socket_mode": "0666"}
        served = Served(Path(folder, "d.sock"), SlowEpochs(), **settings)
        os.chown(served.path, -1, other + 1)  # a group that the connections do not have
        config = DaemonConfig.model_validate({"socket": str(served.path), **settings})
        served.control.reload(config, Report(ok=True, text=""))
        for _ in range(MAX_STRANGERS + 20):
            made.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            with effective_user(other):
                made[-1].connect(str(served.path))
            served.turn()
        assert len(select.select(made, [], [], 0)[0]) == 20, "the end of those beyond the bound"
        for sock in made:
            sock.close()
        served.close()
