"""Other machines do not reach what Mooncake's client of an embedded store listens on: a real one, from a namespace."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from kvprefetch.daemon.config.model import ConfigError
from kvprefetch.daemon.store import addresses, joining, loopback
from kvprefetch.daemon.store.embedded import EmbeddedMaster
from kvprefetch.daemon.store.settings import MooncakeSettings
from tests.lab import process
from tests.lab.daemon import Daemon
from tests.lab.link import LimitedLink, available
from tests.support.descriptors import targets
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.ordinary import AS_NOBODY, NOBODY
from tests.support.waiting import eventually

# Connects to each port, all of them within a second, and prints those that answer.
KNOCK = """
import select, socket, sys, time
tries = {}
for port in map(int, sys.argv[2:]):
    each = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
    each.setblocking(False)
    each.connect_ex((sys.argv[1], port))
    tries[each] = port
deadline, open_ports = time.monotonic() + 2, []
while tries and time.monotonic() < deadline:
    for each in select.select([], tries, [], 0.1)[1]:
        port = tries.pop(each)
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            open_ports.append(port)
print(*sorted(open_ports))
"""
HOST_IP6, FAR_IP6 = "fd97:6b76::1", "fd97:6b76::2"


@pytest.fixture
def far() -> Iterator[LimitedLink]:
    if why_not := available():
        pytest.skip(why_not)
    with LimitedLink() as link:
        yield link


def answering(address: str, ports: list[int], link: LimitedLink | None = None) -> list[int]:
    """Which of the ports can be connected to, from the far side of `link` or from here."""
    argv = [sys.executable, "-c", KNOCK, address, *map(str, ports)]
    done = subprocess.run(
        argv if link is None else link.in_namespace(argv), capture_output=True, text=True, check=True, timeout=30
    )
    return [int(port) for port in done.stdout.split()]


def open_to_all(pid: int) -> list[int]:
    """Ports on which the process listens on every address."""
    inodes = {match[1] for target in targets(pid) if (match := re.fullmatch(r"socket:\[(\d+)\]", target))}
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            if words[3] == "0A" and words[9] in inodes and not int(address, 16):
                ports.append(int(port, 16))
    return sorted(ports)


@pytest.mark.store
@pytest.mark.parametrize("as_user", [[], AS_NOBODY], ids=["as this user", "as nobody"])
def test_an_embedded_store_is_reached_from_this_machine_only(
    far: LimitedLink, tmp_path: Path, as_user: list[str]
) -> None:
    subprocess.run(["ip", "-6", "addr", "add", f"{HOST_IP6}/64", "dev", far.namespace, "nodad"], check=True)
    there = far.in_namespace(["ip", "-6", "addr", "add", f"{FAR_IP6}/64", "dev", "far0", "nodad"])
    subprocess.run(there, check=True)
    metrics, metrics6 = process.free_ports(2)
    extra = ("--metrics-address", "0.0.0.0", "--metrics-port", str(metrics))
    daemon = Daemon(memory="64MiB", extra=extra)
    daemon.argv[:0] = as_user
    daemon.socket.parent.chmod(0o1777)
    with socket.socket(socket.AF_INET6) as ours, daemon:
        ours.bind(("::", metrics6))
        ours.listen()
        assert Path(f"/proc/{daemon.pid}").stat().st_uid == (NOBODY if as_user else os.geteuid())
        ports = open_to_all(daemon.pid)
        assert len(ports) >= 3, "Mooncake's listeners: its data, its handshakes, and the metrics"
        assert answering("127.0.0.1", ports) == ports
        assert answering("::1", [*ports, metrics6]), "the data port is of both families"
        assert answering(far.host_ip, ports, far) == [metrics]
        assert answering(HOST_IP6, [*ports, metrics6], far) == [metrics6]
        engine = FakeEngine(daemon.socket)
        engine.save({b"\1" * 32: b"v" * BLOCK_BYTES})
        eventually(lambda: engine.load([b"\1" * 32]) == [b"v" * BLOCK_BYTES], what="what was saved")
        engine.close()
        assert not daemon.records("store.exposed")


def listener() -> socket.socket:
    made = socket.socket()
    made.bind(("0.0.0.0", 0))
    made.listen()
    return made


def test_only_what_listens_since_is_shut_off_and_what_it_accepted(far: LimitedLink) -> None:
    script = (
        "import socket, sys; each = socket.create_connection((sys.argv[1], int(sys.argv[2])));"
        "sys.stdin.readline(); each.sendall(b'late'); sys.stdin.readline()"
    )
    with listener() as ours:
        before = loopback.listening()
        with listener() as theirs:
            port = theirs.getsockname()[1]
            argv = far.in_namespace([sys.executable, "-c", script, far.host_ip, str(port)])
            with subprocess.Popen(argv, stdin=subprocess.PIPE, text=True) as early:
                assert early.stdin is not None
                accepted, _ = theirs.accept()
                with accepted:
                    loopback.confine(before)
                    early.stdin.write("\n")
                    early.stdin.flush()
                    accepted.settimeout(1)
                    with pytest.raises(TimeoutError):
                        accepted.recv(4)
                early.kill()
            ports = sorted([ours.getsockname()[1], port])
            assert answering("127.0.0.1", ports) == ports
            assert answering(far.host_ip, ports, far) == [ours.getsockname()[1]]


class Client:
    """Mooncake's, as far as it listens; the real one is in the test above."""

    def setup(self, *args: Any, **options: Any) -> int:
        self.listens = listener()
        return 0


@pytest.fixture
def without_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that neither binds sockets to the loopback interface nor filters them; none at hand is one."""
    monkeypatch.setattr(loopback, "LOOPBACK", b"no-such-device")
    monkeypatch.setattr(loopback, "SO_ATTACH_FILTER", 9999)


def join(host: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Client, list[Any]]:
    imported: Callable[[], Any] = lambda: Client  # noqa: E731
    monkeypatch.setattr(joining, "import_client", imported)
    monkeypatch.setattr(MooncakeSettings, "unreached", lambda self, timeout_s: None)
    monkeypatch.setattr(addresses, "own", lambda master: host)
    settings = MooncakeSettings("P2PHANDSHAKE", "127.0.0.1:1", "rdma", "", 0, "default")
    with capture_logs() as logs:
        joined = joining.join(settings, 1, 100, structlog.get_logger())
    return joined.client, [each["event"] for each in logs]


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", b"lo\0"), ("10.1.2.3", b"")])
def test_what_a_client_with_a_loopback_name_listens_on_is_bound_to_the_interface(
    host: str, bound: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs the tests: it needs no privilege."""
    client, events = join(host, monkeypatch)
    with client.listens as listens:
        assert (listens.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16), events) == (bound, [])


@pytest.mark.parametrize(("host", "exposed"), [("127.0.0.1", True), ("10.1.2.3", False)])
def test_a_kernel_that_confines_no_socket_is_said(
    host: str, exposed: bool, monkeypatch: pytest.MonkeyPatch, without_means: None
) -> None:
    client, events = join(host, monkeypatch)
    client.listens.close()
    assert events == ["store.exposed"] * exposed


def test_a_socket_that_cannot_be_bound_to_the_interface_is_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "LOOPBACK", b"no-such-device")
    if why := loopback.refusal():
        pytest.skip(f"this kernel filters no sockets of this user: {why}")
    client, events = join("127.0.0.1", monkeypatch)
    with client.listens as listens:
        bound = listens.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
        assert (events, bound) == ([], b"")
        assert answering("127.0.0.1", [listens.getsockname()[1]]) == [listens.getsockname()[1]]


@pytest.mark.store
def test_an_embedded_store_that_others_could_reach_is_not_started_unless_configured(
    monkeypatch: pytest.MonkeyPatch, without_means: None
) -> None:
    monkeypatch.setattr(loopback, "interfaces", lambda: ["eth7"])
    with pytest.raises(ConfigError, match=r"^store_reach: .*store_reach='local' interfaces=eth7: use ") as caught:
        EmbeddedMaster(1, None, structlog.get_logger()).start()
    assert "\n" not in str(caught.value)
    anywhere = EmbeddedMaster(1, None, structlog.get_logger())
    anywhere.anywhere = True
    assert anywhere.start().private
    anywhere.stop()
    monkeypatch.setattr(loopback, "interfaces", list)
    alone = EmbeddedMaster(1, None, structlog.get_logger())
    assert alone.start().private
    alone.stop()


def test_interfaces_are_those_that_are_up_without_loopback(far: LimitedLink) -> None:
    assert {far.namespace, "lo"} & set(loopback.interfaces()) == {far.namespace}
    look = "from kvprefetch.daemon.store import loopback; print(loopback.interfaces())"
    argv = far.in_namespace([sys.executable, "-c", look])
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "['far0']\n"


def test_a_handshake_that_began_before_is_waited_for(far: LimitedLink) -> None:
    """Bound sockets do not pass their bounds on to what was begun before: nobody may accept it unseen."""
    with listener() as theirs:
        port = theirs.getsockname()[1]
        knock = f"import socket; socket.create_connection(({far.host_ip!r}, {port})); print(flush=True); input()"
        argv = far.in_namespace([sys.executable, "-c", knock])
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as early:
            assert early.stdout is not None
            early.stdout.readline()
            with pytest.raises(OSError, match="not accepted"):
                loopback.confine(loopback.listening() - {os.fstat(theirs.fileno()).st_ino})
            accepting = threading.Timer(0.2, lambda: accepted.append(theirs.accept()[0]))
            accepted: list[socket.socket] = []
            accepting.start()
            loopback.confine(loopback.listening() - {os.fstat(theirs.fileno()).st_ino})
            [each] = accepted
            with each:
                assert each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) == b"lo\0"
            early.kill()
