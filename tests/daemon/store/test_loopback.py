"""Other machines do not reach what Mooncake's client of an embedded store listens on: a real one, from a namespace."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from benchmarks.lab.daemon import Daemon
from benchmarks.lab.link import LimitedLink, available
from kvprefetch.daemon.store import joining, loopback
from kvprefetch.daemon.store.settings import MooncakeSettings

# Connects to each port, all of them within a second, and prints those that answer.
KNOCK = """
import select, socket, sys, time
tries = {}
for port in map(int, sys.argv[2:]):
    each = socket.socket()
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
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd)):
            inodes.add(match[1])
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            if words[3] == "0A" and words[9] in inodes and not int(address, 16):
                ports.append(int(port, 16))
    return sorted(ports)


def test_an_embedded_store_is_reached_from_this_machine_only(far: LimitedLink, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        metrics = probe.getsockname()[1]
    extra = ("--metrics-address", "0.0.0.0", "--metrics-port", str(metrics))
    with Daemon(memory="64MiB", disk=f"{tmp_path / 'kv'}:1GiB", extra=extra) as daemon:
        ports = open_to_all(daemon.pid)
        assert len(ports) >= 3, "Mooncake's listeners: its data, its handshakes, and the metrics"
        assert answering("127.0.0.1", ports) == ports
        assert answering(far.host_ip, ports) == ports, "by another address of this machine"
        assert answering(far.host_ip, ports, far) == [metrics]
        assert not daemon.records("store.exposed")


def listener() -> socket.socket:
    made = socket.socket()
    made.bind(("0.0.0.0", 0))
    made.listen()
    return made


def test_only_what_listens_since_is_shut_off_and_what_it_accepted(far: LimitedLink) -> None:
    told = [sys.executable, "-c", "import socket, sys\n"
            "each = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
            "sys.stdin.readline()\neach.sendall(b'late')\nsys.stdin.readline()"]  # fmt: skip
    with listener() as ours:
        before = loopback.listening()
        with listener() as theirs:
            port = theirs.getsockname()[1]
            argv = far.in_namespace([*told, far.host_ip, str(port)])
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


@pytest.mark.parametrize(("host", "exposed"), [("127.0.0.1", True), ("10.1.2.3", False)])
def test_a_kernel_without_socket_filters_is_told_of(host: str, exposed: bool, monkeypatch: Any) -> None:
    class Client:
        """Mooncake's, as far as it listens; the real one is in the test above."""

        def setup(self, *args: Any, **options: Any) -> int:
            self.listens = listener()
            return 0

    imported: Callable[[], Any] = lambda: Client  # noqa: E731
    monkeypatch.setattr(joining, "_import_client", imported)
    monkeypatch.setattr(MooncakeSettings, "unreached", lambda self, timeout_s: None)
    monkeypatch.setattr(loopback, "_SO_ATTACH_FILTER", 9999)
    settings = MooncakeSettings(
        local_hostname=host, metadata_server="P2PHANDSHAKE", master_server_address="127.0.0.1:1", protocol="tcp",
        device_name="", global_segment_size=0, tenant_id="default", enable_ssd_offload=False, ssd_offload_path="",
    )  # fmt: skip
    with capture_logs() as logs:
        client = joining.join(settings, 1, 100, structlog.get_logger())
    client.listens.close()
    assert [each["event"] for each in logs] == ["store.exposed"] * exposed
