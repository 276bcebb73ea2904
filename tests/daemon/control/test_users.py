"""Two users on one daemon: an engine reaches the keys of its own user only, and so do questions and commands."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.control.access import NOT_ALLOWED
from kvprefetch.shmring.wire import admin, control_socket
from kvprefetch.shmring.wire.attach import Attached, Refused
from kvprefetch.shmring.wire.codec import Message, send_message
from tests.daemon.stores import blocks, stored
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.engine_side import BLOCK_BYTES
from tests.support.fake_engine import FakeEngine, answer
from tests.support.ordinary import effective_user
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]
OTHER = 4242
OPEN = ("--socket-mode", "0666", "--allow-uids", str(OTHER))
M = TypeVar("M")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def attach(path: Path, prefix: str, engine_id: str = "theirs") -> FakeEngine:
    """Attach an engine of the other user."""
    with effective_user(OTHER):
        return FakeEngine(path, engine_id=engine_id, prefix=prefix)


def ask(
    path: Path, query: Message, kind: type[M], *, uid: int = OTHER, gid: int = OTHER, groups: Sequence[int] = ()
) -> M:
    """Return the daemon's answer, of this kind, to a question or command of the other user, or of this one."""
    with connected(path, uid, gid, groups) as sock:
        send_message(sock, query)
        return answer(sock, kind)


@contextmanager
def connected(path: Path, uid: int = OTHER, gid: int = OTHER, groups: Sequence[int] = ()) -> Iterator[socket.socket]:
    ours = os.getgroups()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(30)
        try:
            os.setgroups(groups)
            os.setegid(gid)
            with effective_user(uid):
                sock.connect(str(path))
        finally:
            os.setegid(0)
            os.setgroups(ours)
        yield sock


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command of `kvprefetchd` as this user, and returns its output."""

    def run(*arguments: object, uid: int = 0) -> str:
        with effective_user(uid):
            main([str(argument) for argument in arguments])
        return capsys.readouterr().out

    return run


@pytest.fixture
def both(serve: Serve) -> Callable[..., Daemon]:
    """Starts a daemon that the other user may attach to as well."""

    def start(*extra: str, **options: Any) -> Daemon:
        daemon = serve(extra=(*OPEN, *extra), **options)
        os.chmod(daemon.socket.parent, 0o755)
        return daemon

    return start


def test_a_user_whom_one_daemon_refuses_finds_the_next_and_of_a_busy_one_none(
    serve: Serve, both: Callable[..., Daemon]
) -> None:
    """As at the system's place and the user's own. One that does not answer comes back: nothing stands in for it."""
    refusing, own = serve(extra=("--socket-mode", "0666")), both()
    os.chmod(refusing.socket.parent, 0o755)
    paths = [str(refusing.socket), str(own.socket)]
    os.setegid(OTHER)  # root's group may attach
    try:
        with effective_user(OTHER):
            found = control_socket.find(paths)
            alone = control_socket.find(paths[:1], ask=True)
    finally:
        os.setegid(0)
    assert found.path == paths[1]
    assert found.sock is not None
    found.sock.close()
    assert alone.sock is None
    [(passed, error)] = found.passed
    assert (passed, error.strerror) == (paths[0], f"it refuses this user: uid={OTHER} {NOT_ALLOWED}")
    os.kill(own.pid, signal.SIGSTOP)
    try:
        with effective_user(OTHER):
            found = control_socket.find(paths[::-1], timeout_s=0.2)
    finally:
        os.kill(own.pid, signal.SIGCONT)
    assert (found.sock, found.path, found.startable) == (None, paths[1], False)
    for path in (*paths, *paths[::-1]):  # root may use each of them
        found = control_socket.find([path, paths[1]])
        assert found.path == path
        assert found.sock is not None
        found.sock.close()


def test_a_daemon_of_another_release_is_asked_what_it_answers_and_the_connection_lives() -> None:
    """Its status may have other fields; it is for the hello to say that the protocols differ."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        os.chmod(folder, 0o755)
        listener.bind(path := f"{folder}/s")
        os.chmod(path, 0o666)
        listener.listen()

        def played() -> bytes:
            with listener.accept()[0] as theirs:
                assert json.loads(theirs.recv(1 << 16)) == {"type": "status_query"}, "all that version 0.1.0 knows"
                theirs.send(b'{"type": "status", "of_another_release": 1}')
                return theirs.recv(1 << 16)

        with ThreadPoolExecutor(1) as pool:
            heard = pool.submit(played)
            with effective_user(OTHER):
                found = control_socket.find([path, f"{folder}/none"])
            assert found.sock is not None
            with found.sock as sock:
                sock.send(b"hello")
                assert heard.result(10) == b"hello"


def victim_of(daemon: Daemon, **options: Any) -> tuple[FakeEngine, dict[bytes, bytes]]:
    """Return an engine of root's, and two blocks that it has stored and loaded."""
    engine = FakeEngine(daemon.socket, engine_id="victim", prefix="llama", **options)
    values = blocks("secret", 2)
    engine.save(values)
    stored(daemon, 2)
    assert engine.load(list(values), name="victims-request") == list(values.values())
    return engine, values


def test_an_engine_of_another_user_has_other_keys(both: Serve) -> None:
    """Whatever its key prefix: the same one, one that begins with the other user's part, or one without an end."""
    daemon = both()
    victim, values = victim_of(daemon)
    for prefix in ("llama", "u0@llama"):
        thief = attach(daemon.socket, prefix)
        assert thief.load(list(values)) is None
        thief.save(dict.fromkeys(values, b"\0" * BLOCK_BYTES))
        thief.close()
    hello = victim.spec.hello("worker", engine_id="thief", incarnation=uuid.uuid4().hex).model_copy(
        update={"worker": victim.spec.worker().model_copy(update={"key_prefixes": ["llama@tp_rank:0"]})}
    )
    assert "end with '@': hello.worker.key_prefixes.0=" in ask(daemon.socket, hello, Refused).error
    assert victim.load(list(values)) == list(values.values())
    neighbour = FakeEngine(daemon.socket, engine_id="neighbour", prefix="llama")
    assert neighbour.load(list(values)) == list(values.values()), "of the same user"


def test_a_process_of_another_user_joins_no_engine(both: Serve) -> None:
    """Although it knows the engine's id and incarnation: it would be handed all that the engine loads and saves."""
    daemon = both()
    half = FakeEngine(daemon.socket, engine_id="victim", ranks=2, attach=False)
    half.greet("worker", 0)
    refused = ask(daemon.socket, half.spec.hello("worker", 1), Refused)
    assert "differs from its engine's other processes" in refused.error
    assert "uid=4242 expected=0" in refused.error


def test_users_that_may_share_have_the_same_keys(both: Serve, tmp_path: Path) -> None:
    """From the start, or from a reload on; and only then an engine with upstream's keys is served."""
    configuration = tmp_path / "kvprefetchd.toml"
    configuration.write_text("")
    daemon = both("--config", str(configuration))

    def upstream(kind: type[M], engine_id: str) -> M:
        engine = FakeEngine(daemon.socket, engine_id=engine_id, prefix="upstream", attach=False)
        info = engine.spec.scheduler().model_copy(update={"upstream_keys": True})
        return answer(engine.greet_all(scheduler=info)[-1], kind)

    with effective_user(OTHER):
        refused = upstream(Refused, "theirs")
    assert refused.final
    assert 'key_format="vllm" has keys that name no user: uid=4242 namespaces="per_user"' in refused.error
    assert upstream(Attached, "an operator's").epoch
    configuration.write_text('namespaces = "shared"')
    os.kill(daemon.pid, signal.SIGHUP)
    assert daemon.wait_record("config.changed")
    with effective_user(OTHER):
        assert upstream(Attached, "theirs").epoch
    _, values = victim_of(daemon)
    assert attach(daemon.socket, "llama", "last").load(list(values)) == list(values.values())
    configuration.write_text("")
    os.kill(daemon.pid, signal.SIGHUP)
    ended = {"victim", "last"}
    eventually(lambda: ended <= {each["engine"] for each in daemon.records("engine.detached")}, 10, "new keys")


def test_who_may_attach_is_asked_at_each_message(serve: Serve, tmp_path: Path) -> None:
    """A connection from before a reload has no rights of before."""
    configuration = tmp_path / "kvprefetchd.toml"
    configuration.write_text(f'socket_mode = "0666"\nallow_uids = [{OTHER}]\n')
    daemon = serve(extra=("--config", str(configuration)))
    os.chmod(daemon.socket.parent, 0o755)
    hello = FakeEngine(daemon.socket, engine_id="theirs", attach=False).spec.hello("worker", 0)
    with connected(daemon.socket) as sock:
        configuration.write_text('socket_mode = "0666"\n')
        os.kill(daemon.pid, signal.SIGHUP)
        assert daemon.wait_record("config.changed")
        send_message(sock, hello)
        assert f"uid={OTHER} may not attach" in answer(sock, Refused).error


def test_each_user_sees_and_commands_its_own_engines(both: Serve, command: Callable[..., str]) -> None:
    daemon = both()
    path = daemon.socket
    victim_of(daemon)
    seen = ask(path, admin.StatusQuery(), admin.Status)
    assert (seen.engines, seen.engine_count, seen.slowest) == ([], 1, [])
    assert ask(path, admin.StatQuery(), admin.Segments).engines == []
    for request in (
        admin.Remove(keys=["u0@llama@tp_rank:0@00"]),
        admin.EngineQuery(engine="victim"),
    ):
        assert not ask(path, request, admin.Report).ok
    ask(path, admin.SetMode(mode="off"), Refused)

    def shown(*arguments: str) -> str:
        return command(*arguments, "--socket", path, uid=OTHER)

    everywhere = [shown("status"), shown("top", "--once"), shown("stat")]
    assert not any(secret in text for text in everywhere for secret in ("victim", "llama"))
    assert "and 1 more engine, of other users" in everywhere[0]

    attach(path, "mistral", "mine")
    assert "mine: mistral, " in (text := shown("status"))
    assert "victim" not in text
    assert ask(path, admin.EngineQuery(), admin.Engine).engine == "mine"
    for_another = admin.EngineQuery(caller=admin.Caller(uid=0, groups=[]))
    assert "only root and the daemon's user ask for others" in ask(path, for_another, Refused).error
    assert ask(path, admin.Remove(keys=[f"u{OTHER}@mistral@tp_rank:0@00"]), admin.Removed).removed == 0
    assert {each["engine"] for each in ask_daemon(path).engines} == {"victim", "mine"}


def test_only_root_and_the_daemon_s_user_may_switch_the_mode(serve: Serve) -> None:
    """A user whom the socket's group or allow_uids lets in may attach and ask, but not switch it for everybody."""
    group, stranger = 54321, 40002
    daemon = serve(extra=("--socket-group", str(group), *OPEN))
    daemon.socket.parent.chmod(0o755)
    assert daemon.socket.stat().st_gid == group
    look, switch = admin.StatusQuery(), admin.SetMode(mode="off")
    ask(daemon.socket, look, Refused, uid=stranger, gid=stranger)
    ask(daemon.socket, look, admin.Status, uid=stranger, gid=stranger, groups=[group])
    ask(daemon.socket, look, admin.Status, uid=stranger, gid=group)
    ask(daemon.socket, look, admin.Status)
    ask(daemon.socket, switch, Refused, uid=stranger, gid=group)
    ask(daemon.socket, switch, admin.Report, uid=0, gid=0)
