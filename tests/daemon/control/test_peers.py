"""Processes that may attach and do harm: descriptors and users have bounds, and other engines attach and go on."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvprefetch.daemon.control.budget import SHARE
from kvprefetch.daemon.control.connections import MAX_PROCESSES, MAX_WAITING
from kvprefetch.shmring.wire.admin import EngineQuery, Report, StatQuery, StatusQuery
from kvprefetch.shmring.wire.attach import Attached, Refused
from kvprefetch.shmring.wire.codec import Message, encode_message, send_message
from tests.daemon.conftest import keeps_to_the_catalogue
from tests.daemon.stores import blocks
from tests.lab import process
from tests.lab.daemon import Daemon
from tests.support.auditor import Auditor, ask_daemon
from tests.support.command import cpu_s
from tests.support.descriptors import of_engines
from tests.support.fake_engine import FakeEngine, answer
from tests.support.ordinary import effective_user
from tests.support.waiting import eventually

pytestmark = pytest.mark.store

OTHER_UID = 54321
OPEN = ("--socket-mode", "0666", "--allow-uids", str(OTHER_UID))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may connect as another user")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One that serves other users, too."""
    with Daemon(memory="64MiB", staging="1MiB", extra=OPEN) as daemon:
        daemon.socket.parent.chmod(0o711)
        yield daemon
        assert daemon.sigterm(30) == 0
        keeps_to_the_catalogue(daemon)


def descriptors(daemon: Daemon) -> int:
    """Count them, Mooncake's among them, once the number stands still."""
    seen = [-1] * 5

    def count() -> bool:
        seen.append(len(os.listdir(f"/proc/{daemon.pid}/fd")))
        time.sleep(0.05)
        return len(set(seen[-5:])) == 1

    eventually(count, 20, "a number that stands still")
    return seen[-1]


@contextlib.contextmanager
def at_most(daemon: Daemon, count: int) -> Iterator[None]:
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)


def test_an_engine_for_which_no_descriptors_are_left_is_refused(daemon: Daemon) -> None:
    """Whichever descriptor is the first that it cannot get."""
    FakeEngine(daemon.socket).close()
    eventually(lambda: daemon.records("engine.detached"))
    time.sleep(0.2)
    before, held = descriptors(daemon), len(of_engines(daemon.pid))
    refused = 0
    for left in range(2, 10):  # two connections, and the descriptors of the engine's memory
        engine = FakeEngine(daemon.socket, attach=False)
        worker, scheduler = engine.connect(), engine.connect()
        ask_daemon(daemon.socket)  # by then both are accepted
        with at_most(daemon, before + left):
            send_message(worker, engine.spec.hello("worker"))
            send_message(scheduler, engine.spec.hello("scheduler"))
            refused += isinstance(answer(scheduler, Attached, Refused), Refused)
        engine.close()
        eventually(lambda: len(of_engines(daemon.pid)) == held, what="its descriptors")
    assert 2 < refused < 8
    FakeEngine(daemon.socket).close()
    eventually(lambda: len(of_engines(daemon.pid)) == held, what="its descriptors")


def connections(daemon: Daemon) -> int:
    """Count its sockets, without the eventfds that Mooncake makes whenever it needs one."""
    return sum(target.startswith("socket:") for target in of_engines(daemon.pid))


def test_silent_connections_make_room_for_others(daemon: Daemon) -> None:
    silent = FakeEngine(daemon.socket, attach=False)
    descriptors(daemon)  # by then all of the test before are closed
    held = connections(daemon)
    oldest, *_ = [silent.connect() for _ in range(3)]
    eventually(lambda: connections(daemon) == held + 3, what="three connections")
    with at_most(daemon, descriptors(daemon)):
        assert ask_daemon(daemon.socket).pid == daemon.pid
        assert not answer(oldest, Refused).final
        assert oldest.recv(1) == b""
        began_s = cpu_s(daemon.pid)
        time.sleep(1)
        assert cpu_s(daemon.pid) - began_s < 0.5, "it does not spin"
    for _ in range(MAX_WAITING + 20):
        silent.connect()
    assert ask_daemon(daemon.socket).pid == daemon.pid
    eventually(lambda: connections(daemon) <= held + MAX_WAITING, what="room made for the last ones")
    silent.close()
    eventually(lambda: connections(daemon) == held, what=lambda: f"{held}, not {connections(daemon)},")
    assert daemon.records("peers.full")


def half(path: Path, number: int) -> socket.socket:
    """Connect one of an engine's two processes; the other one never says hello."""
    return FakeEngine(path, engine_id=f"half-{number}", attach=False).greet("scheduler")


def test_engines_that_never_become_complete_take_nobodys_place(daemon: Daemon) -> None:
    """However many: the oldest are refused for now, an honest engine attaches, a command is answered."""
    halves = [half(daemon.socket, number) for number in range(MAX_WAITING + 20)]
    FakeEngine(daemon.socket, engine_id="honest").close()
    assert ask_daemon(daemon.socket).pid == daemon.pid
    refused = answer(halves[0], Refused)
    assert (refused.final, f"max={MAX_WAITING}" in refused.error) == (False, True)
    assert halves[0].recv(1) == b""
    assert select.select([halves[-1]], [], [], 0)[0] == [], "the newest one waits on"


@needs_root
def test_a_crowd_of_one_user_hangs_up_on_nobody_elses_connection(daemon: Daemon) -> None:
    engine = FakeEngine(daemon.socket, attach=False)
    worker, scheduler = engine.connect(), engine.connect()
    send_message(worker, engine.spec.hello("worker"))
    with effective_user(OTHER_UID):
        crowd = [half(daemon.socket, number) for number in range(MAX_WAITING + 20)]
    assert "the oldest of uid=54321" in answer(crowd[0], Refused).error
    send_message(scheduler, engine.spec.hello("scheduler"))
    assert engine.receive(worker)[0].slot_count > 0


@needs_root
def test_one_user_cannot_take_the_places_of_another(serve: Callable[..., Daemon]) -> None:
    path = serve(extra=(*OPEN, "--max-engines", "2", "--max-engines-per-uid", "1")).socket
    path.parent.chmod(0o711)
    with effective_user(OTHER_UID):
        FakeEngine(path, engine_id="first")
        peers = FakeEngine(path, engine_id="second", attach=False).greet_all()
    error = f"too many engines of one user: uid={OTHER_UID} max_engines_per_uid=1"
    for peer in peers:
        assert answer(peer, Refused) == Refused(error=error, final=False)
    FakeEngine(path, engine_id="ours", prefix="ours")


def hoard(path: Path, ranks: int) -> list[socket.socket] | None:
    """Attach an engine, and end it with its workers' descriptors unread; return the workers, None for a refusal."""
    engine = FakeEngine(path, engine_id="hoard", ranks=ranks, attach=False)
    *workers, scheduler = engine.greet_all()
    answered = answer(scheduler, Attached, Refused)
    scheduler.close()
    return workers if isinstance(answered, Attached) else None


def test_descriptors_that_nobody_reads_are_bounded_for_each_user(daemon: Daemon) -> None:
    """In flight they count against the daemon's user, also once the daemon has ended the connection."""
    kept: list[list[socket.socket]] = []
    for _ in range(MAX_PROCESSES // 32 + 1):
        if (workers := hoard(daemon.socket, 32)) is None:
            break
        kept.append(workers)
        eventually(lambda: not ask_daemon(daemon.socket).engine_count, what="its end")
    assert len(kept) == (MAX_PROCESSES - 1) // 32
    if os.geteuid() == 0:
        with effective_user(OTHER_UID):
            other = FakeEngine(daemon.socket, engine_id="another user's", prefix="another")
        other.close()
    for worker in kept.pop():
        worker.close()
    again = eventually(lambda: hoard(daemon.socket, 32), what="room for the memory of an engine")
    for worker in [*again, *(worker for workers in kept for worker in workers)]:
        worker.close()
    eventually(lambda: not ask_daemon(daemon.socket).engine_count, what="the end of all")


@pytest.fixture
def bounded(auditor: Auditor) -> Iterator[Daemon]:
    """A daemon without the capabilities for which the kernel does not count descriptors in flight."""
    daemon = Daemon(memory="64MiB", staging="1MiB")
    [effective] = re.findall(r"^CapEff:\t(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    uncounted = int(effective, 16) & (1 << 21 | 1 << 24)  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
    drop = ["setpriv", "--bounding-set", "-sys_resource,-sys_admin"] if uncounted else []
    daemon.argv = [*drop, "prlimit", "--nofile=512:2048", *daemon.argv]
    with daemon:
        yield daemon
    keeps_to_the_catalogue(daemon)


def test_an_engine_is_handed_its_memory_once_the_kernel_takes_descriptors_again(bounded: Daemon) -> None:
    """Other processes of the daemon's user fill the kernel's count: the daemon warns and tries again."""
    daemon = bounded
    assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (2048, 2048), "the daemon raises its soft limit"
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (400, 2048))
    ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(5)]
    for near, _ in ends:
        socket.send_fds(near, [b"x"], [near.fileno()] * 100)
    engine = FakeEngine(daemon.socket, engine_id="patient", attach=False)
    peers = engine.greet_all()
    waiting = daemon.wait_record("engine.waiting")
    assert waiting is not None
    assert waiting["engine"] == "patient"
    assert ask_daemon(daemon.socket).engine_count == 1
    for pair in ends:
        for end in pair:
            end.close()
    for peer in peers:
        assert engine.receive(peer)[0].epoch == waiting["epoch"], "the same memory, handed over later"
    assert len(daemon.records("engine.waiting")) == 1


_FLOOD = """
import select, socket, sys
data, poll, sockets = sys.argv[2].encode(), select.epoll(), {}
for _ in range(int(sys.argv[3])):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(sys.argv[1])
    sockets[sock.fileno()] = sock
    poll.register(sock, select.EPOLLIN)
    sock.send(data)
    sock.send(data)
print("flooding", flush=True)
while True:
    for fd, _ in poll.poll():
        assert sockets[fd].recv(1 << 16)
        sockets[fd].send(data)
"""


@contextlib.contextmanager
def flooded(path: Path, query: Message, clients: int = 200) -> Iterator[None]:
    """Meanwhile so many connections each have two questions under way, and send the next with every answer."""
    command = [sys.executable, "-c", _FLOOD, str(path), encode_message(query).decode(), str(clients)]
    with subprocess.Popen(process.bound_to_parent(command), stdout=subprocess.PIPE) as flood:
        try:
            assert flood.stdout is not None
            assert flood.stdout.readline() == b"flooding\n"
            yield
            assert flood.poll() is None, "the flood went on"
        finally:
            flood.kill()


@pytest.mark.parametrize("query", [StatusQuery(), StatQuery()], ids=["status", "stat"])
def test_a_newcomer_is_served_within_seconds_beside_two_hundred_clients_that_flood(
    daemon: Daemon, query: Message
) -> None:
    """Of connections that wait for their turn, those that waited longest, or never had one, go first."""
    engine = FakeEngine(daemon.socket, engine_id="served", prefix="flood")
    with flooded(daemon.socket, query):
        for _ in range(3):
            began = time.monotonic()
            assert ask_daemon(daemon.socket).pid == daemon.pid
            assert engine.load(list(blocks("flood", 2))) is None
            assert time.monotonic() - began < 3.0
        for number in range(2):
            FakeEngine(daemon.socket, engine_id=f"newcomer-{number}")


def test_a_kept_connection_is_answered_beside_clients_that_connect_anew_for_each_question(daemon: Daemon) -> None:
    """As the door's connection beside scripts that run `kvprefetchd status` again and again."""
    stop, asked = threading.Event(), list[int]()

    def ask_anew() -> None:
        while not stop.is_set():
            asked.append(ask_daemon(daemon.socket).pid)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as kept, ThreadPoolExecutor() as pool:
        kept.connect(str(daemon.socket))
        clients = [pool.submit(ask_anew) for _ in range(4)]
        try:
            eventually(lambda: len(asked) > 100, what="a hundred answers to new connections")
            for _ in range(5):
                began = time.monotonic()
                send_message(kept, EngineQuery())
                assert not answer(kept, Report).ok
                assert time.monotonic() - began < 3.0
        finally:
            stop.set()
        for each in clients:
            each.result()


@pytest.mark.parametrize("clients", [1, 200])
def test_the_questions_of_one_user_take_a_bounded_share_of_a_core(daemon: Daemon, clients: int) -> None:
    """However many connections ask, and as fast as they can. Without a bound one client keeps half a core busy."""
    with flooded(daemon.socket, StatusQuery(), clients):
        time.sleep(1)  # a burst is free
        began_s, began = cpu_s(daemon.pid), time.monotonic()
        time.sleep(2)
        assert (cpu_s(daemon.pid) - began_s) / (time.monotonic() - began) < 4 * SHARE
