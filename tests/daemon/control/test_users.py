"""Two users on one daemon: an engine reaches the keys of its own user only, and so do questions and commands."""

from __future__ import annotations

import json
import os
import signal
import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.store.namespaces import FILE
from kvprefetch.shmring.wire import admin
from kvprefetch.shmring.wire.attach import Refused, Reset, ResetDone
from kvprefetch.shmring.wire.codec import Message, send_message
from tests.daemon.stores import blocks, stored
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import FakeEngine, answer
from tests.support.ordinary import effective_user
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]
OTHER = 4242
OPEN = ("--socket-mode", "0666", "--allow-uids", str(OTHER))
PREFIX = "llama@tp_rank:0@"
M = TypeVar("M")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def attach(path: Path, prefix: str, engine_id: str = "theirs", **fingerprint: str) -> FakeEngine:
    """Attach an engine of the other user."""
    with effective_user(OTHER):
        return FakeEngine(path, engine_id=engine_id, prefix=prefix, fingerprint=fingerprint)


def refusal(path: Path, prefix: str) -> str:
    """Return the refusal that an engine of the other user gets."""
    with pytest.raises(AssertionError) as caught:  # it gets something else than Attached
        attach(path, prefix)
    [[refused, _]] = caught.value.args
    return str(refused.error)


def ask(
    path: Path, query: Message, kind: type[M], *, uid: int = OTHER, gid: int = OTHER, groups: Sequence[int] = ()
) -> M:
    """Return the daemon's answer, of this kind, to a question or command of the other user, or of this one."""
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
        send_message(sock, query)
        return answer(sock, kind)


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


def victim_of(daemon: Daemon, **options: Any) -> tuple[FakeEngine, dict[bytes, bytes]]:
    """Return an engine of root's, and two blocks that it has stored and loaded."""
    engine = FakeEngine(daemon.socket, engine_id="victim", prefix="llama", **options)
    values = blocks("secret", 2)
    engine.save(values)
    stored(daemon, 2)
    assert engine.load(list(values), name="victims-request") == list(values.values())
    return engine, values


def test_an_engine_of_another_user_does_not_get_the_namespace(both: Serve) -> None:
    """Neither by its name, nor by one that has its keys in it, nor as one rank of two."""
    daemon = both()
    victim, values = victim_of(daemon)
    error = refusal(daemon.socket, "llama")
    assert "namespace='llama@tp_rank:*@' uid=4242 owner_uid=0" in error
    assert 'namespaces = "shared"' in error
    [refused] = eventually(lambda: daemon.records("engine.refused"), what="its line in the log")
    assert refused["error"] in error
    for prefix in ("llama", PREFIX + next(iter(values)).hex()[:8], "llama@tp_rank:0"):
        hello = victim.spec.hello("worker", engine_id="thief", incarnation=uuid.uuid4().hex).model_copy(
            update={"worker": victim.spec.worker().model_copy(update={"key_prefix": prefix})}
        )
        assert f"end with '@': hello.worker.key_prefix={prefix!r}" in ask(daemon.socket, hello, Refused).error
    assert victim.load(list(values)) == list(values.values())
    neighbour = attach(daemon.socket, "another")
    assert neighbour.load(list(values)[:1]) is None
    send_message(neighbour.scheduler, Reset(reset_generation=1, timeout_ms=5000))
    assert answer(neighbour.scheduler, ResetDone) == ResetDone(reset_generation=1, ok=True)
    assert victim.load(list(values)) == list(values.values())


def test_with_one_key_users_share_what_is_stored(both: Serve, tmp_path: Path) -> None:
    """From the start, or from a reload on."""
    configuration = tmp_path / "kvprefetchd.toml"
    configuration.write_text("")
    daemon = both("--config", str(configuration))
    _, values = victim_of(daemon)
    assert "owner_uid=0" in refusal(daemon.socket, "llama")
    configuration.write_text('namespaces = "shared"')
    os.kill(daemon.pid, signal.SIGHUP)
    assert daemon.wait_record("config.changed")
    assert attach(daemon.socket, "llama").load(list(values)) == list(values.values())


def test_a_restart_on_the_same_disk_does_not_forget_the_user(both: Serve, tmp_path: Path) -> None:
    daemon = both(disk=str(tmp_path / "disk"))
    attach(daemon.socket, "llama", weights="a")
    eventually((tmp_path / "disk" / FILE).exists, what="the file")
    daemon.sigkill()
    daemon.start()
    with pytest.raises(AssertionError, match="uid=0 owner_uid=4242"):
        FakeEngine(daemon.socket, prefix="llama")
    attach(daemon.socket, "llama")


@pytest.mark.store
def test_a_damaged_file_of_namespaces_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "disk" / FILE).write_text('{"version": 1, "namespaces": [{}]}')
    with closing(Daemon(memory="64MiB", staging="1MiB", disk=str(tmp_path / "disk"))) as daemon:
        daemon.launch()
        assert daemon.wait_exit() == 78
        assert "namespaces.0.name: field required: file=" in daemon.records("daemon.failed")[0]["error"]


def test_a_purge_frees_a_namespace_that_no_engine_uses(both: Serve, command: Callable[..., str]) -> None:
    daemon = both()
    victim, _ = victim_of(daemon)
    at = ("--yes", "--socket", daemon.socket)
    assert "2 removed" in command("store", "purge", "--engine", "victim", *at)
    assert "owner_uid=0" in refusal(daemon.socket, "llama"), "the engine stores there again"
    victim.save(blocks("again", 1))
    stored(daemon, 3)
    victim.close()
    eventually(lambda: daemon.records("engine.detached"), what="its end")
    assert "1 removed" in command("store", "purge", "--prefix", "llama@tp_rank:*@", *at)
    attach(daemon.socket, "llama")


def test_each_user_sees_and_commands_its_own_engines(both: Serve, command: Callable[..., str]) -> None:
    daemon, chains = both(), [["01" * 32]]
    path = daemon.socket
    victim_of(daemon, fingerprint={"weights": "secret-weights"})
    seen = ask(path, admin.StatusQuery(), admin.Status)
    assert (seen.engines, seen.engine_count, seen.slowest) == ([], 1, [])
    assert ask(path, admin.StatQuery(), admin.Segments).engines == []
    for request in (
        admin.Purge(engine="victim", timeout_ms=1000),
        admin.Purge(prefixes=[PREFIX], timeout_ms=1000),
        admin.Purge(prefixes=["nobody's@"], timeout_ms=1000),
        admin.Warm(run="0" * 32, engine="victim", chains=chains),
    ):
        assert not ask(path, request, admin.Report).ok
    ask(path, admin.SetMode(mode="off"), Refused)

    def shown(*arguments: str) -> str:
        return command(*arguments, "--socket", path, uid=OTHER)

    everywhere = [shown("status"), shown("top", "--once"), shown("stat")]
    assert not any(secret in text for text in everywhere for secret in ("victim", "llama"))
    assert "and 1 more engine, of other users" in everywhere[0]
    assert "secret-weights" not in shown("store", "stat")

    attach(path, "mistral", "mine", weights="my-weights")
    assert "mine: mistral, " in (text := shown("status"))
    assert "victim" not in text
    assert "my-weights" in shown("store", "stat")
    warmed = ask(path, admin.Warm(run="0" * 32, chains=chains), admin.Warmed)
    assert (warmed.engine, warmed.absent) == ("mine", 1)
    assert ask(path, admin.Purge(prefixes=["mistral@tp_rank:0@"], timeout_ms=5000), admin.Report).ok

    assert {each["engine"] for each in ask_daemon(path).engines} == {"victim", "mine"}
    text = command("store", "stat", "--socket", path)
    assert f"2  {PREFIX}\n            uid=0, last attached 20" in text
    assert "weights=secret-weights" in text
    assert "0  mistral@tp_rank:*@\n            uid=4242" in text
    known = json.loads(command("store", "stat", "--json", "--socket", path))["known"]
    assert known["llama@tp_rank:*@"]["fingerprint"] == {"weights": "secret-weights"}
    assert known["mistral@tp_rank:*@"]["uid"] == OTHER


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
