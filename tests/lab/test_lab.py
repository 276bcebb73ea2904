"""The lab's parts without an engine (tests/e2e/test_lab.py has that): links, and no process left."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import link, process
from tests.support.waiting import eventually, poll


def test_a_killed_parent_of_a_child_takes_it_along(tmp_path: Path) -> None:
    """SIGKILL of whoever started it must not leave a store behind."""
    log = tmp_path / "log"
    code = (
        "import pathlib, time; from tests.lab import process\n"
        f"print(process.spawn(['sleep', '60'], log=pathlib.Path({str(log)!r})).pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=process.REPO) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert process.alive(pid)
        starter.send_signal(signal.SIGKILL)
    assert process.wait_gone([pid]) == []


def test_a_limited_link_carries_so_much_and_leaves_nothing(tmp_path: Path) -> None:
    """A stream over a 200 Mbit/s link takes its time; afterwards namespace, link and process are gone.

    Both ends have the kernel's default congestion control, whatever this machine's own setting is.
    """
    if why_not := link.available():
        pytest.skip(why_not)
    size = 5_000_000
    with link.LimitedLink(rate_mbit=200) as limited:
        serve = (
            "import socket, sys; s = socket.create_server((sys.argv[1], 7001)); print('up', flush=True)\n"
            "c, _ = s.accept(); print(c.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16), flush=True)\n"
            f"c.sendall(bytes({size})); c.close()"
        )
        log = tmp_path / "log"
        server = limited.run_in_ns([sys.executable, "-c", serve, limited.remote_ip], log=log)
        try:
            before = limited.received_bytes
            seconds = _receive_seconds(limited.remote_ip, log, size)
            counted = limited.received_bytes - before
        finally:
            process.reap(server)
        namespace = limited.namespace
        assert "b'cubic\\x00" in log.read_text()
    assert size < counted < 1.1 * size
    assert seconds > 0.8 * size * 8 / 200e6
    listed = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert namespace not in listed
    assert not Path("/run/netns", namespace).exists()


def test_a_lossy_link_loses_packets_until_it_does_not(tmp_path: Path) -> None:
    if why_not := link.available():
        pytest.skip(why_not)
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed (package nftables)")
    with link.LimitedLink() as limited, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        serve = (
            "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind((sys.argv[1], 7002))\n"
            "print('up', flush=True)\nwhile True: s.recv(10); print('got', flush=True)"
        )
        log = tmp_path / "log"
        receiver = limited.run_in_ns([sys.executable, "-c", serve, limited.remote_ip], log=log)
        try:
            assert poll(lambda: "up" in log.read_text(), 10)
            for percent, arrived in ((50, range(1, 200)), (0, range(200, 201))):
                limited.lose(percent)
                before = log.read_text().count("got")
                for _ in range(200):
                    sender.sendto(b"x", (limited.remote_ip, 7002))
                    time.sleep(0.001)
                poll(lambda before=before: log.read_text().count("got") - before >= 200, 1)  # type: ignore[misc]
                assert log.read_text().count("got") - before in arrived
        finally:
            process.reap(receiver)


def _receive_seconds(address: str, log: Path, size: int) -> float:
    eventually(lambda: log.exists() and "up" in log.read_text(), 20, lambda: process.tail(log))
    with socket.create_connection((address, 7001), timeout=20) as stream:
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"cubic\0")
        begun, got = time.monotonic(), 0
        while part := stream.recv(1 << 16):
            got += len(part)
    assert got == size
    return time.monotonic() - begun
