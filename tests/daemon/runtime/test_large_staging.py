"""Engines with large staging come and go, and the others hear the daemon's heartbeat all the while."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvprefetch.shmring.layout import Line
from tests.daemon.stores import blocks
from tests.lab import process
from tests.lab.daemon import Daemon
from tests.support.auditor import Auditor, ask_daemon
from tests.support.descriptors import of_engines
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]
PATIENT = ("--call-timeout-ms", "60000")

# Each slice of four MiB takes 50 ms, and each registration a second.
SLOW = """
import time
from kvprefetch.daemon.engine import staging
from kvprefetch.daemon.store.client import Store
fill, register, unregister = staging.Segment.fill, Store.register, Store.unregister

def slow_fill(segment, start, stop):
    time.sleep(0.05)
    fill(segment, start, stop)

def slow_register(store, address, length):
    print(f"registering {address}", flush=True)
    time.sleep(1)
    register(store, address, length)

def seen_unregister(store, address):
    print(f"unregistering {address}", flush=True)
    unregister(store, address)

staging.Segment.fill, Store.register, Store.unregister = slow_fill, slow_register, seen_unregister
"""


class Heartbeat:
    """The daemon's heartbeat as an engine sees it: how long it stood still at most, in ms."""

    def __init__(self) -> None:
        self.longest_ms, self.beats = 0.0, 0

    @contextlib.contextmanager
    def watched(self, engine: FakeEngine) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            last_ns, looked_s, slept = engine.words.load_acquire(Line.CONSUMER_BEAT), time.monotonic(), False
            while not over.wait(0.002):
                beat_ns, now_s = engine.words.load_acquire(Line.CONSUMER_BEAT), time.monotonic()
                slept, looked_s = slept or now_s - looked_s > 0.05, now_s
                if beat_ns != last_ns:
                    if not slept:  # else this thread had no core, and may have missed a beat
                        self.beats += 1
                        self.longest_ms = max(self.longest_ms, (beat_ns - last_ns) / 1e6)
                    last_ns, slept = beat_ns, False

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def mapped(daemon: Daemon) -> int:
    """Count the segments that the daemon has mapped."""
    return Path(f"/proc/{daemon.pid}/maps").read_text().count("memfd:kvprefetch")


def test_the_heartbeat_goes_on_while_an_engine_comes_and_goes(serve: Serve) -> None:
    daemon, heartbeat = serve(staging="256MiB"), Heartbeat()
    staying = FakeEngine(daemon.socket, engine_id="staying", prefix="staying", block_bytes=1 << 20)
    with heartbeat.watched(staying):
        for _ in range(3):
            passing = FakeEngine(daemon.socket, engine_id="passing", prefix="passing", block_bytes=1 << 20)
            assert staying.load(list(blocks("nowhere", 1))) is None
            passing.close()
            eventually(lambda: mapped(daemon) == 2, 60, "the memory of the engine that left")
    assert heartbeat.beats > 0
    assert heartbeat.longest_ms < 1000
    assert {line["page_bytes"] for line in daemon.records("engine.attached")} <= set(range(4096, (2 << 20) + 1))


HALF_ATTACHED = """
import sys, time
from pathlib import Path
from tests.support.fake_engine import FakeEngine
engine = FakeEngine(Path(sys.argv[1]), engine_id="killed", prefix="killed", attach=False, block_bytes=1 << 20)
sockets = engine.greet_all()
print("greeted", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def attaching(daemon: Daemon) -> Iterator[subprocess.Popen[bytes]]:
    """An engine in a process of its own, whose memory is being reserved."""
    command = process.bound_to_parent([sys.executable, "-c", HALF_ATTACHED, str(daemon.socket)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=process.REPO) as engine:
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == b"greeted\n"
            yield engine
        finally:
            engine.kill()


def registered(daemon: Daemon) -> set[str]:
    """Return the addresses that the store knows, and those that it is about to know."""
    known: set[str] = set()
    for word, address in (line.split() for line in daemon.lines if line.startswith(("registering", "unregistering"))):
        (known.add if word == "registering" else known.discard)(address)
    return known


def registering(daemon: Daemon, count: int) -> None:
    eventually(lambda: len(registered(daemon)) == count, 20, "a registration that began")


@pytest.mark.parametrize("while_it", ["fills", "registers"])
def test_an_engine_killed_while_its_memory_is_reserved_leaves_nothing(
    patched: Serve, auditor: Auditor, while_it: str
) -> None:
    daemon = patched(SLOW, staging="96MiB" if while_it == "fills" else "16MiB", extra=PATIENT)
    staying = FakeEngine(daemon.socket, engine_id="staying", prefix="staying", block_bytes=1 << 20)
    before = of_engines(daemon.pid)
    with attaching(daemon) as engine:
        eventually(lambda: mapped(daemon) > 2, 20, "its memory")
        if while_it == "registers":
            registering(daemon, 2)
        engine.kill()
        engine.wait()
        eventually(lambda: mapped(daemon) == 2, 20, "its memory freed")
    assert len(registered(daemon)) == 1
    begun = sum(line.startswith("registering") for line in daemon.lines)
    assert begun == (1 if while_it == "fills" else 2), "the reservation ends with the next slice"
    eventually(lambda: len(of_engines(daemon.pid)) == len(before), 20, lambda: [before, of_engines(daemon.pid)])
    assert daemon.records("engine.refused") == []
    assert staying.load(list(blocks("nowhere", 1))) is None
    FakeEngine(daemon.socket, engine_id="next", prefix="killed", block_bytes=1 << 20).close()
    auditor.assert_idle(daemon.pid, daemon.socket, timeout_s=20)


@pytest.mark.parametrize("while_it", ["fills", "registers"])
def test_a_daemon_that_stops_while_it_reserves_does_not_finish_it_first(patched: Serve, while_it: str) -> None:
    """The reservation would take 25 s."""
    daemon = patched(SLOW, staging="2000MiB" if while_it == "fills" else "16MiB", extra=PATIENT)
    with attaching(daemon):
        eventually(lambda: mapped(daemon) > 0, 20, "its memory")
        if while_it == "registers":
            registering(daemon, 1)
        began = time.monotonic()
        assert daemon.sigterm(30) == 0
        assert time.monotonic() - began < 10
    assert not registered(daemon)


def test_engines_attach_at_the_same_time(patched: Serve) -> None:
    """Each takes 2.6 s alone: 32 slices and a registration."""
    daemon = patched(SLOW, staging="128MiB", extra=PATIENT)
    staying, heartbeat = FakeEngine(daemon.socket, engine_id="staying", prefix="staying"), Heartbeat()
    engines = [FakeEngine(daemon.socket, engine_id=f"{i}", prefix=f"{i}", attach=False) for i in range(4)]
    began = time.monotonic()
    with heartbeat.watched(staying):
        sockets = [engine.greet_all() for engine in engines]
        for each, engine in zip(sockets, engines, strict=True):
            for sock in each:
                assert engine.receive(sock)[0].slot_count > 0
        assert time.monotonic() - began < 8, "one after the other takes 10.4 s"
    assert heartbeat.longest_ms < 1000, "a registration takes as long"
    assert ask_daemon(daemon.socket).engine_count == 5
