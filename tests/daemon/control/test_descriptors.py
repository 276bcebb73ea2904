"""A daemon that runs out of descriptors, or whose clients stay silent: it refuses some, and serves the others."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvprefetch.daemon.control.connections import MAX_WAITING
from kvprefetch.shmring.wire.attach import Refused
from kvprefetch.shmring.wire.codec import receive_message, send_message
from tests.daemon.fake_engine import FakeEngine
from tests.daemon.processes import answer, cpu_s
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.waiting import eventually

# Mooncake may open connections of its own meanwhile.  A leak for each refused engine would be more: at least three are.
MOONCAKES = 2


def descriptors(daemon: Daemon) -> int:
    """How many it has, once that stands still: Mooncake's and the engines' come and go."""
    seen = [-1] * 5

    def count() -> bool:
        seen.append(len(os.listdir(f"/proc/{daemon.pid}/fd")))
        time.sleep(0.05)
        return len(set(seen[-5:])) == 1

    eventually(count, 20, "a number that stands still")
    return seen[-1]


@contextmanager
def at_most(daemon: Daemon, count: int) -> Iterator[None]:
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)


def test_an_engine_for_which_no_descriptors_are_left_is_refused(shared_daemon: Daemon) -> None:
    """Whichever of them is the first that cannot be had."""
    FakeEngine(shared_daemon.socket).close()
    eventually(lambda: shared_daemon.records("engine.detached"))
    time.sleep(0.2)
    before = descriptors(shared_daemon)
    refused = 0
    for left in range(2, 10):  # two connections, and the descriptors of the engine's memory
        engine = FakeEngine(shared_daemon.socket, attach=False)
        peers = [engine.connect(), engine.connect()]
        ask_daemon(shared_daemon.socket)  # by then both are accepted
        with at_most(shared_daemon, before + left):
            send_message(peers[0], engine.hello("worker"))
            send_message(peers[1], engine.hello("scheduler"))
            received = receive_message(peers[1])
        assert received is not None
        for fd in received[1]:
            os.close(fd)
        refused += isinstance(received[0], Refused)
        engine.close()
        eventually(lambda: descriptors(shared_daemon) <= before + MOONCAKES, what="its descriptors")
    assert MOONCAKES < refused < 8
    FakeEngine(shared_daemon.socket).close()
    eventually(lambda: descriptors(shared_daemon) <= before + MOONCAKES, what="its descriptors")


@pytest.fixture
def silent() -> Iterator[list[socket.socket]]:
    """Sockets that are closed at the end."""
    sockets: list[socket.socket] = []
    yield sockets
    for sock in sockets:
        sock.close()


def test_silent_connections_make_room_for_others(shared_daemon: Daemon, silent: list[socket.socket]) -> None:
    before = descriptors(shared_daemon)

    def connect() -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(shared_daemon.socket))
        silent.append(sock)

    for _ in range(3):
        connect()
    eventually(lambda: descriptors(shared_daemon) == before + 3, what="three connections")
    with at_most(shared_daemon, before + 3):
        assert ask_daemon(shared_daemon.socket).pid == shared_daemon.pid
        assert not answer(silent[0], Refused).final
        assert silent[0].recv(1) == b"", "the oldest"
        began_s = cpu_s(shared_daemon.pid)
        time.sleep(1)
        assert cpu_s(shared_daemon.pid) - began_s < 0.5, "it does not spin"
    for _ in range(MAX_WAITING + 20):
        connect()
    assert ask_daemon(shared_daemon.socket).pid == shared_daemon.pid
    assert descriptors(shared_daemon) <= before + MAX_WAITING + 1
    for sock in silent:
        sock.close()
    eventually(lambda: descriptors(shared_daemon) <= before, what="what it had before")
    assert shared_daemon.records("peers.full")
