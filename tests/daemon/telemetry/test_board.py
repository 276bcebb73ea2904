"""The daemon's picture in shared memory: seen from other processes while the daemon works, hangs, and is dead."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import posix_ipc
import pytest

from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.telemetry import board
from kvprefetch.daemon.telemetry.board import STATUS_BYTES, Board
from tests.lab.daemon import Daemon
from tests.lab.process import free_ports
from tests.support.command import kvprefetchd, run
from tests.support.fake_engine import FakeEngine
from tests.support.telemetry import get
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]


def health(path: Path) -> str:
    """What `health` prints. It runs in this process: whoever waits for another answer asks often."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(["health", "--socket", str(path)])
    return said.getvalue()


def status_in_picture(daemon: Daemon) -> dict[str, Any]:
    """The status in the daemon's picture."""
    seen = board.read(daemon.socket)
    return dict(seen.status) if seen is not None else {}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Board]:
    made = Board(str(tmp_path / "s.sock"))
    yield made
    made.close()


def test_only_the_daemon_s_user_writes_and_its_group_reads(made: Board, tmp_path: Path) -> None:
    """Whatever the umask is: `serve` sets 077."""
    before = os.umask(0o077)
    try:
        Board(str(tmp_path / "other.sock"), os.getgid()).close()
        again = Board(str(tmp_path / "s.sock"))
    finally:
        os.umask(before)
    assert Path(f"/dev/shm{board.name_of(tmp_path / 's.sock')}").stat().st_mode & 0o777 == 0o640
    again.close()
    assert board.read(tmp_path / "s.sock") is None


def test_a_reader_never_sees_half_of_a_picture(made: Board, tmp_path: Path) -> None:
    """However fast the writer is, a status is of one second."""
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            made.write({"number": number, "more": "x" * (number % 5000), "again": number})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set[int]()
        until = time.monotonic() + 30
        while len(seen) <= 10 and time.monotonic() < until:
            for picture in (made.look(), board.read(tmp_path / "s.sock")):
                if picture is not None and picture.status:
                    number = picture.status["number"]
                    assert picture.status["again"] == number
                    seen.add(number)
    finally:
        over.set()
        writer.join()
    assert len(seen) > 10


def test_a_status_beyond_its_bound_is_left_out(made: Board) -> None:
    made.write({"a": "x" * STATUS_BYTES})
    assert made.look().status == {}
    made.write({"a": "x" * (STATUS_BYTES - 10)})
    assert len(made.look().status["a"]) == STATUS_BYTES - 10


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's segment")
def test_another_user_s_segment_is_not_believed(made: Board, tmp_path: Path) -> None:
    path = Path(f"/dev/shm{board.name_of(tmp_path / 's.sock')}")
    os.chown(path, 12345, -1)
    assert board.read(tmp_path / "s.sock") is None
    os.chown(path, 0, -1)
    path.chmod(0o660)
    assert board.read(tmp_path / "s.sock") is None, "others may have written it"
    path.chmod(0o640)
    os.truncate(path, 100)
    assert board.read(tmp_path / "s.sock") is None
    os.truncate(path, board.SIZE)


def refused(*_args: object, **_options: object) -> None:
    raise posix_ipc.PermissionsError("No permission")


def full(_fd: int, _offset: int, _length: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("module", "name", "fault", "words"),
    [
        (posix_ipc, "SharedMemory", refused, "No permission"),  # no /dev/shm, or another user has the name
        (os, "posix_fallocate", full, "No space left"),
    ],
    ids=["no name", "no room"],
)
def test_a_daemon_without_a_segment_says_so_and_shows_itself_to_its_own_server(
    module: Any, name: str, fault: Callable[..., None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends a process (SIGBUS) that writes to a mapped page which has no memory."""
    monkeypatch.setattr(module, name, fault)
    made = Board(str(tmp_path / "s.sock"))
    assert words in made.fault
    made.write({"phase": "serving"})
    assert made.look().status == {"phase": "serving"}
    assert not Path(f"/dev/shm{board.name_of(tmp_path / 's.sock')}").exists()
    made.close()


def test_a_daemon_that_ends_leaves_the_name_to_its_successor(tmp_path: Path) -> None:
    first, second = Board(str(tmp_path / "s.sock")), Board(str(tmp_path / "s.sock"))
    first.close()
    assert board.read(tmp_path / "s.sock") is not None
    second.close()
    assert board.read(tmp_path / "s.sock") is None


def test_where_a_dead_daemon_s_picture_stays_the_one_that_serves_is_described(serve: Serve) -> None:
    """Another user's successor cannot take the name."""
    daemon = serve()
    left = Path(f"/dev/shm{board.name_of(daemon.socket)}")
    left.unlink()
    script = "import os, sys; from kvprefetch.daemon.telemetry.board import Board; Board(sys.argv[1]); os._exit(0)"
    run([sys.executable, "-c", script, str(daemon.socket)])
    try:
        said = kvprefetchd("status", "--socket", daemon.socket, "--json")
        assert (said.returncode, json.loads(said.stdout)["pid"]) == (0, daemon.pid), said
    finally:
        left.unlink()


def test_a_killed_daemon_is_described_and_its_successor_takes_the_name(serve: Serve) -> None:
    """`status` and `health` say when it was there last, and with what; a clean stop leaves nothing."""
    daemon = serve()
    engine = FakeEngine(daemon.socket, engine_id="left")
    at = ("--socket", str(daemon.socket))
    eventually(lambda: status_in_picture(daemon).get("engines"), 30, "the engine")
    pid = daemon.pid
    daemon.sigkill()
    engine.close()
    seen = kvprefetchd("status", *at)
    assert seen.returncode == 69
    assert seen.stdout.startswith(f"the daemon is gone: pid {pid}, last beat 20")
    assert seen.stdout.splitlines()[0].endswith(" UTC, 1 engine")
    assert seen.stdout.splitlines()[1].startswith("it showed last: kvprefetchd ")
    assert "\nlog: a pipe\n" in seen.stdout
    top = kvprefetchd("top", "--once", "--interval", "0.1", *at)
    assert (top.returncode, top.stdout.splitlines()[0]) == (69, seen.stdout.splitlines()[0])
    gone = kvprefetchd("health", *at)
    assert (gone.returncode, gone.stdout.startswith("not ready: ")) == (1, True)
    assert "the daemon is gone" in gone.stdout
    assert daemon.picture.exists()
    daemon.start()
    eventually(lambda: health(daemon.socket).startswith("ready"), 30, "the next one")
    assert daemon.sigterm() == 0
    assert not daemon.picture.exists()
    assert kvprefetchd("status", *at).returncode == 69


# A signal handler of Python runs on the main thread, which is the loop: it plants a loop that hangs, nothing else.
STALL = "import signal, time\nsignal.signal(signal.SIGUSR2, lambda *_: time.sleep(600))\n"


def test_commands_and_the_http_server_answer_while_the_loop_hangs(patched: Serve) -> None:
    """From the last picture, within seconds, with the engine that is attached."""
    (port,) = free_ports(1)
    daemon = patched(STALL, extra=("--metrics-port", str(port)))
    FakeEngine(daemon.socket, engine_id="attached")
    at = ("--socket", str(daemon.socket))
    eventually(lambda: status_in_picture(daemon).get("engines"), 30, "the engine")
    os.kill(daemon.pid, signal.SIGUSR2)
    eventually(lambda: "the main loop hangs" in health(daemon.socket), 30, "a late heartbeat")
    for command in (("status",), ("top", "--once", "--interval", "0.1")):
        shown = kvprefetchd(*command, *at)
        assert shown.returncode == 0
        assert "the main loop hangs: loop_age_s=" in shown.stdout
        assert "attached" in shown.stdout
    status, said = get(port, "/readyz")
    assert (status, "main loop hangs" in said) == (503, True)
    assert "kvprefetchd_ready 0.0" in get(port, "/metrics")[1], "of this moment"
    daemon.sigkill()


def test_it_has_no_request_ids(serve: Serve) -> None:
    """The socket's group may read it, and ids are of the users' clients."""
    daemon = serve()
    engine = FakeEngine(daemon.socket, engine_id="named")
    engine.cancel(engine.hint([b"\x01" * 32], name="a-secret-request"))
    eventually(lambda: daemon.records("request.done"), what="the request's end")
    eventually(lambda: status_in_picture(daemon).get("outcomes", {}).get("aborted"), what="its count")
    content = daemon.picture.read_bytes()
    assert b"named" in content
    assert b"a-secret-request" not in content
    assert json.loads(kvprefetchd("status", "--json", "--socket", daemon.socket).stdout)["outcomes"]["aborted"] == 1
