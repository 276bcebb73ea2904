"""The daemon under a service manager: its notifications, its silence when it hangs, and the socket it takes over."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvprefetch.daemon.control.listener import inherited_socket
from kvprefetch.daemon.runtime.notify import INDEX_US, VALUE_US, Notifier
from tests.daemon.stores import engine_with
from tests.lab.daemon import Daemon
from tests.support.command import COMMAND, listening, one_line, run
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

WATCHDOG_US = 900_000

# The loop runs on the main thread, and so do signal handlers: this one makes the loop hang and nothing else.
HANGING = (
    "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: time.sleep(60));"
    "from kvprefetch.daemon.cli.main import main; sys.exit(main())"
)


class Manager:
    """The datagram socket of a service manager."""

    def __init__(self, path: Path) -> None:
        self.env = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": str(WATCHDOG_US)}
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(str(path))
        self.heard: list[dict[str, str]] = []

    def listen(self, timeout_s: float) -> dict[str, str] | None:
        self.sock.settimeout(timeout_s)
        try:
            lines = self.sock.recv(4096).decode().split("\n")
        except (TimeoutError, BlockingIOError):
            return None
        self.heard.append(dict(line.split("=", 1) for line in lines))
        return self.heard[-1]

    def wait(self, name: str, timeout_s: float = 30.0) -> dict[str, str]:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self.listen(left)
            if message is not None and name in message:
                return message
        raise AssertionError(f"{name} was not sent: {self.heard}")

    def drain(self) -> None:
        while self.listen(0.01) is not None:
            pass


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="kvn-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def manager(folder: Path) -> Iterator[Manager]:
    manager = Manager(folder / "notify")
    yield manager
    manager.sock.close()


def test_systemd_is_notified_of_a_life_from_ready_to_stopping(
    serve: Callable[..., Daemon], manager: Manager, tmp_path: Path
) -> None:
    """READY and STATUS, WATCHDOG again and again, RELOADING then READY, STATUS of engines, STOPPING."""
    config = tmp_path / "kvprefetchd.toml"
    config.write_text("max_engines = 2\n")
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))  # as a container's, or a generous manager's
    daemon = serve(env=manager.env, extra=("--config", str(config)))
    resource.setrlimit(resource.RLIMIT_CORE, limits)
    assert "store open" in manager.wait("READY")["STATUS"]
    assert re.search(r"^Max core file size +0 ", Path(f"/proc/{daemon.pid}/limits").read_text(), re.MULTILINE)
    for _ in range(3):
        assert manager.wait("WATCHDOG", 10)["WATCHDOG"] == "1"

    config.write_text('max_engines = 1\nlog_level = "debug"\nmemory = "128MiB"\nmode = "shadow"\n')
    os.kill(daemon.pid, signal.SIGHUP)
    announced_us = int(manager.wait("RELOADING")["MONOTONIC_USEC"])
    assert 0 <= time.monotonic_ns() // 1000 - announced_us < 30_000_000
    assert "mode: shadow" in manager.wait("READY")["STATUS"]
    assert daemon.wait_record("mode.switched") is not None
    changed = {record["key"]: record["after"] for record in daemon.records("config.changed")}
    assert changed == {"max_engines": "1", "log_level": "debug", "mode": "shadow"}
    assert [record["key"] for record in daemon.records("config.kept")] == []  # --memory, a flag, wins over the file

    config.write_text("max_engine = 1\n")
    os.kill(daemon.pid, signal.SIGHUP)
    record = daemon.wait_record("config.invalid")
    assert record is not None
    assert "did you mean max_engines?" in record["error"]
    config.write_text('socket_group = "no-such-group"\n')  # a start with it would be refused
    os.kill(daemon.pid, signal.SIGHUP)
    assert eventually(lambda: daemon.records("config.invalid")[1:])[0]["error"].startswith(
        "socket_group: no such group"
    )

    engine = FakeEngine(daemon.socket)
    while "engines: 1" not in manager.wait("STATUS")["STATUS"]:
        pass
    engine.close()
    os.kill(daemon.pid, signal.SIGTERM)
    assert "STATUS" in manager.wait("STOPPING")
    assert daemon.wait_exit(40) == 0


def test_a_start_with_values_on_disk_asks_for_the_time_to_read_their_index(
    serve: Callable[..., Daemon], manager: Manager, tmp_path: Path
) -> None:
    """Before it reads the index, as nothing can be sent meanwhile: systemd would end the start again and again."""
    daemon = serve(disk=f"{tmp_path / 'disk'}:64MiB")
    engine, _ = engine_with(daemon, "before", 8)
    engine.close()
    assert daemon.sigterm(30) == 0
    serve(disk=f"{tmp_path / 'disk'}:64MiB", env=manager.env)
    message = manager.wait("EXTEND_TIMEOUT_USEC")
    assert int(message["EXTEND_TIMEOUT_USEC"]) == INDEX_US + 8 * VALUE_US
    assert message["STATUS"] == "reading the disk's index: values=8"
    assert not any("READY" in each for each in manager.heard)
    manager.wait("READY")


@pytest.mark.store
def test_a_reload_that_comes_while_the_daemon_starts_is_done_when_it_runs(manager: Manager) -> None:
    """It still imports its modules: it can have a handler only then."""
    with closing(Daemon(memory="64MiB", staging="1MiB", env=manager.env)) as daemon:
        daemon.launch()
        eventually(lambda: "pydantic" in Path(f"/proc/{daemon.pid}/maps").read_text(), what="the first imports")
        os.kill(daemon.pid, signal.SIGHUP)
        manager.wait("READY")
        manager.wait("RELOADING")
        assert daemon.sigterm() == 0


@pytest.mark.store
def test_a_loop_that_hangs_falls_silent(manager: Manager) -> None:
    """The watchdog is fed by the loop itself: threads that still run do not speak for it."""
    with closing(Daemon(memory="64MiB", staging="1MiB", env=manager.env)) as daemon:
        daemon.argv[1:3] = ["-c", HANGING]
        daemon.start()
        manager.wait("WATCHDOG")
        os.kill(daemon.pid, signal.SIGUSR1)
        time.sleep(0.5)
        manager.drain()
        silent_until = time.monotonic() + 4 * WATCHDOG_US / 1e6
        while (left := silent_until - time.monotonic()) > 0:
            message = manager.listen(left)
            assert message is None or "WATCHDOG" not in message
        daemon.sigkill()


def test_without_a_manager_nothing_is_said_and_children_inherit_nothing(manager: Manager) -> None:
    environ = {**manager.env, "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(environ)
    assert environ == {}
    notifier.tick(10**12)
    notifier.tick(10**12 + 1)
    assert [manager.listen(1.0), manager.listen(0.01)] == [{"WATCHDOG": "1"}, None]
    notifier.close()
    Notifier({}).ready("nobody listens")
    stranger = Notifier({**manager.env, "WATCHDOG_PID": "1"})
    stranger.tick(10**12)
    assert manager.listen(0.01) is None
    stranger.close()


def serving(folder: Path) -> list[str]:
    arguments = ["serve", "--memory", "64MiB", "--staging", "1MiB", "--metrics-port", "0"]
    return [*COMMAND, *arguments, "--socket", str(folder / "unused.sock")]


# Puts an inherited socket at descriptor 3, announces it with its own pid, and becomes the daemon.
LAUNCHER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()));"
    "os.execv(sys.argv[2], sys.argv[2:])"
)
ACTIVATE = "systemd-socket-activate"


@pytest.mark.store
@pytest.mark.parametrize("launcher", ["ours", ACTIVATE])
def test_a_socket_unit_s_socket_is_served_and_left_to_the_manager(folder: Path, launcher: str) -> None:
    """A hand-made LISTEN_FDS exec, and systemd's own, which starts the daemon at the first connection."""
    path = folder / "unit.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        if launcher == "ours":
            sock.bind(str(path))
            sock.listen()
            command = [sys.executable, "-c", LAUNCHER, str(sock.fileno())]
        elif shutil.which(ACTIVATE) is None:
            pytest.skip(f"{ACTIVATE} is not installed")
        else:
            passed = [word for name in ("PYTHONPATH", "PATH") if name in os.environ for word in ("-E", name)]
            command = [ACTIVATE, "--seqpacket", "-l", str(path), *passed]
        child = subprocess.Popen([*command, *serving(folder)], pass_fds={sock.fileno(), 3}, stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: listening(path), 60, "the socket")
        engine = FakeEngine(path)
        engine.save({b"\1" * 32: b"v" * 4096})
        eventually(lambda: engine.load([b"\1" * 32]) == [b"v" * 4096], what="a hit")
        engine.close()
        child.terminate()
        assert child.wait(40) == 0
        assert path.exists()
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(("count", "words"), [("2", "LISTEN_FDS=2"), ("1", "ListenSequentialPacket=")])
def test_a_socket_of_another_kind_is_refused(count: str, words: str) -> None:
    """In a process of its own: descriptor 3 is this one's for something else."""
    code = (
        "import os, socket, sys; from kvprefetch.daemon.control.listener import inherited_socket\n"
        "from kvprefetch.daemon.config.model import ConfigError\n"
        "sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM); sock.fileno() == 3 or os.dup2(sock.fileno(), 3)\n"
        f"try: inherited_socket({{'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '{count}'}})\n"
        "except ConfigError as error: print(error)"
    )
    result = run([sys.executable, "-c", code])
    assert words in result.stdout, result


def test_a_socket_for_another_process_is_left_alone() -> None:
    assert inherited_socket({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) is None
    assert inherited_socket({}) is None


ONE_CORE = (
    "import os, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ([sys.executable, "-c", ONE_CORE], "cores=1 min=2"),
        (["prlimit", f"--as={2 << 30}"], "ulimit -v): bytes=2GiB min="),
    ],
    ids=["one core", "little to map"],
)
def test_a_machine_that_gives_too_little_is_refused_in_one_line(folder: Path, launcher: list[str], words: str) -> None:
    """Before a less clear failure."""
    result = run([*launcher, *serving(folder)])
    assert result.returncode == 78
    assert words in result.stderr
    assert one_line(result.stderr)
