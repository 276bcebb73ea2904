"""Names that others remove while the daemon runs: of the control socket, of the door's, and of its picture."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from kvprefetch.daemon.config.model import ConfigError, DaemonConfig, Taken
from kvprefetch.daemon.control.listener import Listener
from kvprefetch.daemon.runtime.names import PAUSE_NS, Name, Names
from tests.daemon.stores import engine_with
from tests.lab.daemon import Daemon
from tests.lab.process import free_ports
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import FakeEngine
from tests.support.telemetry import get
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]


def door_of(daemon: Daemon) -> Path:
    return daemon.socket.with_name(f"{daemon.socket.stem}-hints.sock")


def served_by_the_door(daemon: Daemon) -> bytes:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(20)
        caller.connect(str(door_of(daemon)))
        caller.sendall(b"GET / HTTP/1.0\r\n\r\n")
        return caller.recv(9)


def test_names_that_others_remove_are_made_anew_and_health_is_bad_until_then(serve: Serve) -> None:
    (port,) = free_ports(1)
    daemon = serve(extra=("--metrics-port", str(port)))
    engine, values = engine_with(daemon, "before", 4)
    assert served_by_the_door(daemon) == b"HTTP/1.0 "
    names = [daemon.socket, door_of(daemon), daemon.picture]
    began = time.monotonic()
    for name in names:
        name.unlink()
    eventually(lambda: get(port, "/readyz")[0] == 503, what="health that is bad", pause_s=0.1)
    assert get(port, "/healthz")[0] == 200, "a restart is not wanted"
    for name in names:
        eventually(name.exists, what=f"the name {name}")
    assert time.monotonic() - began < 10
    eventually(lambda: get(port, "/readyz")[0] == 200, what="health that is good", pause_s=0.1)
    gone, back = ([line["file"] for line in daemon.records(event)] for event in ("name.missing", "name.back"))
    assert sorted(gone) == sorted(back)
    assert {Path(each).name for each in gone} == {name.name for name in names}
    assert len(gone) == len(names)
    FakeEngine(daemon.socket, engine_id="after").close()
    assert ask_daemon(daemon.socket).ready
    assert served_by_the_door(daemon) == b"HTTP/1.0 "
    assert engine.load(list(values)) == list(values.values()), "the engine that was there notices nothing"
    engine.close()
    assert daemon.sigterm(30) == 0
    assert not any(name.exists() for name in names)


@pytest.mark.stress
def test_the_folder_may_go_too(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    daemon = serve(socket=folder / "s.sock")
    shutil.rmtree(folder)
    eventually(daemon.socket.exists, what="the socket")
    eventually(door_of(daemon).exists, what="the door's socket")
    FakeEngine(daemon.socket, engine_id="after").close()


def test_no_name_is_made_while_another_daemon_has_the_first_one() -> None:
    there, made = [True, True], list[int]()

    def refused() -> None:
        raise Taken("another daemon is serving")

    first = Name("/socket", lambda: there[0], refused)
    second = Name("/picture", lambda: there[1], lambda: made.append(0))
    names = Names([first, second], structlog.get_logger())
    there[:] = [False, False]
    for number in range(4):
        names.look(1 + number * PAUSE_NS)
    assert not made
    there[0] = True
    names.look(1 + 4 * PAUSE_NS)
    assert made


def test_a_name_that_cannot_be_made_is_tried_again_and_its_reason_is_logged_once() -> None:
    there, tries = [True], list[int]()

    def make() -> None:
        tries.append(0)
        if len(tries) < 3:
            raise ConfigError("no")
        there[0] = True

    names, now_ns = Names([Name("/a/name", lambda: there[0], make)], structlog.get_logger()), 1
    assert names.look(now_ns) == []
    there[0] = False
    with capture_logs() as log:
        assert names.look(now_ns) == ["others removed it: file='/a/name': it is made anew in some seconds"]
        assert names.look(now_ns + PAUSE_NS - 1) != []
        assert not tries
        for _ in range(2):
            now_ns += PAUSE_NS
            assert names.look(now_ns) == ["others removed it: file='/a/name': no"]
        assert names.look(now_ns + PAUSE_NS) == []
    assert [line["event"] for line in log] == ["name.missing", "name.missing", "name.back"]
    there[0] = False
    names.look(now_ns)
    there[0] = True
    assert names.look(now_ns) == [], "it came back by itself"


def test_a_daemon_that_stops_takes_no_successors_file_for_its_own(tmp_path: Path) -> None:
    """Its socket is closed already, so a file system may give the number of its file to the successor's."""
    config = DaemonConfig.model_validate({"socket": str(tmp_path / "s.sock")})
    stopping = Listener(config)
    stopping.sock.close()
    successor = Listener(config)
    stopping.close()
    assert successor.there
    successor.close()
    assert not config.socket.exists()
