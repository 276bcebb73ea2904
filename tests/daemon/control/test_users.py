"""Two users on one daemon: an engine reaches the keys of its own user only, and so do questions and commands."""

from __future__ import annotations

import json
import os
import signal
import socket
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.store.namespaces import FILE
from kvprefetch.shmring.wire import admin
from kvprefetch.shmring.wire.attach import Refused, Reset, ResetDone
from kvprefetch.shmring.wire.codec import Message, receive_message, send_message
from tests.daemon.fake_engine import FakeEngine
from tests.daemon.stores import blocks, stored
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.ordinary import effective_user
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]
OTHER = 4242
OPEN = ("--socket-mode", "0666", "--allow-uids", str(OTHER))
PREFIX = "llama@tp_rank:0@"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class OtherUser:
    """Plays engines of another user, asks a daemon, and runs commands."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._engines: dict[str, FakeEngine] = {}

    def attach(self, path: Path, engine_id: str, prefix: str, **fingerprint: str) -> str:
        """Attach an engine; return "", or the daemon's refusal."""
        with effective_user(OTHER):
            try:
                engine = FakeEngine(path, engine_id=engine_id, prefix=prefix, fingerprint=fingerprint)
            except AssertionError as error:  # it got something else than Attached
                [[refused, _]] = error.args
                return str(refused.error)
        self._engines[engine_id] = engine
        return ""

    def load(self, engine_id: str, digest: bytes) -> bool:
        """Whether the engine finds this block."""
        return self._engines[engine_id].load([digest]) is not None

    def reset(self, engine_id: str) -> bool:
        """Whether the daemon confirmed a reset."""
        sock = self._engines[engine_id].scheduler
        send_message(sock, Reset(reset_generation=1, timeout_ms=5000))
        received = receive_message(sock)
        return received is not None and received[0] == ResetDone(reset_generation=1, ok=True)

    def close(self, engine_id: str) -> None:
        self._engines.pop(engine_id).close()

    def ask(self, path: Path, query: Message) -> Message:
        """Return the daemon's answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(30)
            with effective_user(OTHER):
                sock.connect(str(path))
            send_message(sock, query)
            received = receive_message(sock)
        assert received is not None
        return received[0]

    def command(self, *arguments: object) -> str:
        """Return the output of a command of `kvprefetchd`."""
        with effective_user(OTHER):
            return command(self._capsys, *arguments)


@pytest.fixture
def other(capsys: pytest.CaptureFixture[str]) -> OtherUser:
    return OtherUser(capsys)


@pytest.fixture
def both(serve: Serve) -> Callable[..., Daemon]:
    """Starts a daemon that the other user may attach to as well."""

    def start(*extra: str, **options: Any) -> Daemon:
        daemon = serve(extra=(*OPEN, *extra), **options)
        os.chmod(daemon.socket.parent, 0o755)
        return daemon

    return start


def victim_of(daemon: Daemon, **options: Any) -> tuple[FakeEngine, dict[bytes, bytes]]:
    """An engine of root's, and two blocks that it has stored, and loaded with a request of this name."""
    engine = FakeEngine(daemon.socket, engine_id="victim", prefix="llama", **options)
    values = blocks("secret", 2)
    engine.save(values)
    stored(daemon, 2)
    assert engine.load(list(values), name="victims-request") == list(values.values())
    return engine, values


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def test_an_engine_of_another_user_does_not_get_the_namespace(both: Serve, other: OtherUser) -> None:
    """Neither by its name, nor by one that has its keys in it, nor as one rank of two."""
    daemon = both()
    victim, values = victim_of(daemon)
    refusal = other.attach(daemon.socket, "thief", "llama")
    assert "namespace='llama@tp_rank:*@' uid=4242 owner_uid=0" in refusal
    assert 'namespaces = "shared"' in refusal
    [refused] = eventually(lambda: daemon.records("engine.refused"), what="its line in the log")
    assert refused["error"] in refusal
    shape = victim.hello("worker").worker
    assert shape is not None
    for prefix in ("llama", PREFIX + next(iter(values)).hex()[:8], "llama@tp_rank:0"):
        hello = victim.hello("worker", engine_id="thief", incarnation=uuid.uuid4().hex).model_copy(
            update={"worker": shape.model_copy(update={"key_prefix": prefix})}
        )
        answer = other.ask(daemon.socket, hello)
        assert isinstance(answer, Refused)
        assert f"end with '@': hello.worker.key_prefix={prefix!r}" in answer.error
    assert victim.load(list(values)) == list(values.values())
    assert other.attach(daemon.socket, "neighbour", "another") == ""
    assert not other.load("neighbour", next(iter(values)))
    assert other.reset("neighbour")
    assert victim.load(list(values)) == list(values.values())
    other.close("neighbour")


def test_with_one_key_users_share_what_is_stored(both: Serve, other: OtherUser, tmp_path: Path) -> None:
    """From the start, or from a reload on."""
    configuration = tmp_path / "kvprefetchd.toml"
    configuration.write_text("")
    daemon = both("--config", str(configuration))
    _, values = victim_of(daemon)
    assert "owner_uid=0" in other.attach(daemon.socket, "neighbour", "llama")
    configuration.write_text('namespaces = "shared"')
    os.kill(daemon.pid, signal.SIGHUP)
    assert daemon.wait_record("config.changed")
    assert other.attach(daemon.socket, "neighbour", "llama") == ""
    assert all(other.load("neighbour", digest) for digest in values)
    other.close("neighbour")


def test_a_restart_on_the_same_disk_does_not_forget_the_user(both: Serve, other: OtherUser, tmp_path: Path) -> None:
    daemon = both(disk=str(tmp_path / "disk"))
    assert other.attach(daemon.socket, "first", "llama", weights="a") == ""
    other.close("first")
    eventually((tmp_path / "disk" / FILE).exists, what="the file")
    daemon.sigkill()
    daemon.start()
    engine = FakeEngine(daemon.socket, engine_id="root's", prefix="llama", attach=False)
    with pytest.raises(AssertionError, match="uid=0 owner_uid=4242"):
        engine.attach()
    assert other.attach(daemon.socket, "again", "llama") == ""
    other.close("again")


def test_a_damaged_file_of_namespaces_ends_the_start(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "disk" / FILE).write_text('{"version": 1, "namespaces": [{}]}')
    with closing(Daemon(memory="64MiB", staging="1MiB", disk=str(tmp_path / "disk"))) as daemon:
        daemon.launch()
        assert daemon.wait_exit() == 78
        assert "namespaces.0.name: field required: file=" in daemon.records("daemon.failed")[0]["error"]


def test_a_purge_frees_a_namespace_that_no_engine_uses(
    both: Serve, other: OtherUser, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = both()
    victim, _ = victim_of(daemon)
    at = ("--yes", "--socket", daemon.socket)
    assert "2 removed" in command(capsys, "store", "purge", "--engine", "victim", *at)
    assert "owner_uid=0" in other.attach(daemon.socket, "thief", "llama"), "the engine stores there again"
    victim.save(blocks("again", 1))
    stored(daemon, 3)
    victim.close()
    eventually(lambda: daemon.records("engine.detached"), what="its end")
    assert "1 removed" in command(capsys, "store", "purge", "--prefix", "llama@tp_rank:*@", *at)
    assert other.attach(daemon.socket, "heir", "llama") == ""
    other.close("heir")


def test_each_user_sees_and_commands_its_own_engines(
    both: Serve, other: OtherUser, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = both()
    path, digest = daemon.socket, b"\1" * 32
    _, values = victim_of(daemon, fingerprint={"weights": "secret-weights"})
    seen = other.ask(path, admin.StatusQuery())
    assert isinstance(seen, admin.Status)
    assert (seen.engines, seen.engine_count, seen.slowest) == ([], 1, [])
    segments = other.ask(path, admin.StatQuery())
    assert isinstance(segments, admin.Segments)
    assert segments.engines == []
    for request in (
        admin.Purge(engine="victim", timeout_ms=1000),
        admin.Purge(prefixes=[PREFIX], timeout_ms=1000),
        admin.Purge(prefixes=["nobody's@"], timeout_ms=1000),
        admin.Warm(run="0" * 32, engine="victim", chains=[[digest.hex()]]),
    ):
        answer = other.ask(path, request)
        assert isinstance(answer, admin.Report)
        assert not answer.ok
    switched = other.ask(path, admin.SetMode(mode="off"))
    assert isinstance(switched, Refused)
    everywhere = [other.command(*each, "--socket", path) for each in (("status",), ("top", "--once"), ("stat",))]
    for text in everywhere:
        assert "victim" not in text
        assert "llama" not in text
    assert "and 1 more engine, of other users" in everywhere[0]
    assert "secret-weights" not in other.command("store", "stat", "--socket", path)

    assert other.attach(path, "mine", "mistral", weights="my-weights") == ""
    shown = other.command("status", "--socket", path)
    assert "mine stores under mistral@tp_rank:*@" in shown
    assert "victim" not in shown
    assert "my-weights" in other.command("store", "stat", "--socket", path)
    warmed = other.ask(path, admin.Warm(run="0" * 32, chains=[[digest.hex()]]))
    assert isinstance(warmed, admin.Warmed)
    assert (warmed.engine, warmed.absent) == ("mine", 1)
    purged = other.ask(path, admin.Purge(prefixes=["mistral@tp_rank:0@"], timeout_ms=5000))
    assert isinstance(purged, admin.Report)
    assert purged.ok

    assert {each["engine"] for each in ask_daemon(path).engines} == {"victim", "mine"}
    text = command(capsys, "store", "stat", "--socket", path)
    assert f"2  {PREFIX}\n            uid=0, last attached 20" in text
    assert "weights=secret-weights" in text
    assert "0  mistral@tp_rank:*@\n            uid=4242" in text
    known = json.loads(command(capsys, "store", "stat", "--json", "--socket", path))["known"]
    assert known["llama@tp_rank:*@"]["fingerprint"] == {"weights": "secret-weights"}
    assert known["mistral@tp_rank:*@"]["uid"] == OTHER
    assert len(values) == 2
    other.close("mine")
