"""A daemon that is killed, frozen, stopped, started again, idle, or waits for its cluster."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvprefetch.daemon.runtime.loop import IDLE_AFTER_NS
from kvprefetch.daemon.telemetry import board
from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.liveness import PeerStatus
from kvprefetch.shmring.wire.records import FlagState, Outcome
from tests.daemon.stores import blocks, engine_with, stored
from tests.lab.daemon import Daemon
from tests.lab.store import Store
from tests.support.auditor import Auditor, ask_daemon
from tests.support.command import cpu_s
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]


def test_sigterm_stops_cleanly_while_an_engine_is_attached(serve: Serve) -> None:
    daemon = serve()
    engine = FakeEngine(daemon.socket)
    engine.hint(list(blocks("term", 4)))
    began = time.monotonic()
    assert daemon.sigterm(30) == 0
    assert time.monotonic() - began < 2.5, "nobody is there to hear a goodbye of three seconds"
    assert engine.liveness.peer(time.monotonic_ns()) is PeerStatus.GONE
    assert not daemon.socket.exists()
    assert daemon.wait_record("daemon.stopped")


def test_a_daemon_that_stops_leaves_its_successors_socket_alone(serve: Serve) -> None:
    """A stop waits for store calls and the disk; another daemon may serve at the same path by then."""
    daemon = serve()
    daemon.socket.unlink()
    successor = serve(socket=daemon.socket)
    with closing(Daemon(memory="64MiB", staging="1MiB", socket=daemon.socket)) as second:
        second.launch()
        assert second.wait_exit() == 69, "systemd tries again: it may be free then"
    assert daemon.sigterm(30) == 0
    assert ask_daemon(successor.socket).pid == successor.pid


@pytest.mark.parametrize("end", ["ctrl-c", "kill"])  # tests/e2e/test_lifecycle.py has SIGTERM
def test_with_a_disk_the_data_is_there_after_a_restart(
    serve: Serve, auditor: Auditor, tmp_path: Path, end: str
) -> None:
    disk = f"{tmp_path / 'disk'}:256MiB"
    daemon = serve(disk=disk)
    engine, values = engine_with(daemon, "disk", 40)
    if end == "ctrl-c":  # goes to the whole process group
        os.killpg(daemon.pid, signal.SIGINT)
        assert daemon.wait_exit(30) == 0
    else:
        # The disk promises the values that it has written (daemon/store/embedded.py): after a heartbeat of a second.
        # A file stands under its name before it has its bytes.
        files = (tmp_path / "disk").rglob
        eventually(lambda: sum(each.stat().st_size > 0 for each in files("*.meta")) == 40, 8, "the files")
        daemon.sigkill()
        assert engine.scheduler.recv(1) == b""
    engine.close()
    auditor.assert_nothing_left()
    again = serve(disk=disk)
    engine = FakeEngine(again.socket, prefix="disk")
    found = eventually(lambda: engine.load(list(values)), 30, "a hit after the restart")
    assert found == list(values.values())
    assert engine.disk_blocks == 40
    assert engine.load(list(values)) == list(values.values())
    assert engine.disk_blocks == 0, "now they came from staging"
    line = eventually(lambda: [e for e in again.records("request.done") if e["outcome"] == "loaded"])[0]
    assert line["bytes_disk"] == 40 * BLOCK_BYTES
    assert [text for text in again.lines if re.match(r"I\d{4} ", text)] == [], "Mooncake's lines for information"


def test_a_daemon_whose_master_dies_says_what_is_lost_and_ends_to_be_started_again(
    serve: Serve, tmp_path: Path, auditor: Auditor
) -> None:
    daemon = serve(disk=f"{tmp_path / 'disk'}:256MiB")
    engine, _ = engine_with(daemon, "unflushed", 40)
    os.kill(int(daemon.records("master.started")[0]["pid"]), signal.SIGKILL)
    assert daemon.wait_exit(60) == 69
    assert daemon.records("master.died")
    assert daemon.records("daemon.stopped")
    assert "kvprefetchd: the store's master ended: what was in memory alone is lost" in daemon.lines, "the last words"
    written = len(list((tmp_path / "disk").rglob("*.meta")))
    assert written == 40 or daemon.records("store.unflushed"), written
    assert engine.liveness.peer(time.monotonic_ns()) is PeerStatus.GONE
    engine.close()
    auditor.assert_nothing_left()


def switches(pid: int) -> int:
    """Count how often the threads of a process gave up a core by themselves: each went to sleep, and was woken."""
    texts = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("voluntary_"))


def test_an_idle_daemon_sleeps(serve: Serve) -> None:
    """Its wake-ups, its own and Mooncake's, are what it costs; how much time each takes is the machine's."""
    daemon = serve()
    FakeEngine(daemon.socket, prefix="idle").load(list(blocks("idle", 4)))
    time.sleep(IDLE_AFTER_NS / 1e9 + 1)
    woken, used = list[float](), list[float]()
    while len(woken) < 5 and (min(woken, default=100.0) >= 40 or min(used) >= 0.05):
        before = switches(daemon.pid), cpu_s(daemon.pid)
        time.sleep(3)
        woken.append((switches(daemon.pid) - before[0]) / 3)
        used.append((cpu_s(daemon.pid) - before[1]) / 3)
    assert min(woken) < 40, woken
    assert min(used) < 0.05, used


@pytest.mark.stress
def test_an_idle_daemon_ticks_twice_a_second_also_when_it_looks_at_its_store(serve: Serve) -> None:
    daemon = serve()
    FakeEngine(daemon.socket, prefix="idle").load(list(blocks("idle", 4)))
    ticks = list[float]()
    while len(ticks) < 3 and min(ticks, default=9.0) >= 2.5:
        time.sleep(IDLE_AFTER_NS / 1e9 + 1)
        beats, until = set[int](), time.monotonic() + 11  # it asks a quiet store every ten seconds
        while time.monotonic() < until:
            if (picture := board.read(daemon.socket)) is not None:
                beats.add(picture.beat_ns)
            time.sleep(0.02)
        ticks.append(len(beats) / 11)
    assert min(ticks) < 2.5, ticks


def test_while_a_request_waits_the_daemon_hears_pushes_without_a_bell_and_then_sleeps(shared_daemon: Daemon) -> None:
    """Looks take 2 % of a core, or more where one costs over 40 µs. Looks without their pause would take a third."""
    engine = FakeEngine(shared_daemon.socket, prefix="looks")
    eventually(lambda: engine.words.load_acquire(Line.SLEEPING) == 1, what="asleep without requests")
    key = engine.hint(list(blocks("looks", 2)))
    engine.settled(key)
    used, asleep = list[float](), 0
    while len(used) < 3 and min(used, default=1.0) >= 0.1:
        before = cpu_s(shared_daemon.pid)
        for _ in range(400):
            asleep += engine.words.load_acquire(Line.SLEEPING)
            time.sleep(0.005)
        used.append((cpu_s(shared_daemon.pid) - before) / 2)
    assert asleep == 0, "a bell would have been needed"
    assert min(used) < 0.1, used
    engine.ask(key)
    eventually(lambda: engine.words.load_acquire(Line.HEAD) == engine.words.load_acquire(Line.TAIL), what="heard")
    assert engine.move(key, FlagState.CANCELLED)
    engine.done(key, Outcome.ABORTED)
    eventually(lambda: engine.words.load_acquire(Line.SLEEPING) == 1, what="asleep again")


def test_a_quiet_engine_beside_a_busy_one_rings_and_is_heard_at_once(shared_daemon: Daemon) -> None:
    busy, quiet = (FakeEngine(shared_daemon.socket, engine_id=name, prefix=name) for name in ("busy", "quiet"))
    key = busy.hint(list(blocks("busy", 2)))
    busy.settled(key)
    sleeping = [0, 0]
    eventually(lambda: quiet.words.load_acquire(Line.SLEEPING) == 1, what="asleep without requests")
    for _ in range(200):
        sleeping[0] += busy.words.load_acquire(Line.SLEEPING)
        sleeping[1] += quiet.words.load_acquire(Line.SLEEPING)
        time.sleep(0.005)
    assert sleeping[0] == 0
    assert sleeping[1] > 150, "awake only while it works"
    assert quiet.load(list(blocks("quiet", 2))) is None
    assert busy.move(key, FlagState.CANCELLED)
    busy.done(key, Outcome.ABORTED)


def test_an_engine_that_starts_before_its_cluster_attaches_when_that_is_there(serve: Serve) -> None:
    with Store(memory="64 MB") as cluster, ThreadPoolExecutor(1) as thread:
        cluster.kill_master()
        daemon = serve(memory=None, mooncake_config=cluster.config)
        assert len(daemon.records("store.degraded")) == 1
        gone = FakeEngine(daemon.socket, attach=False, engine_id="gone")
        gone.greet_all()
        attaching = thread.submit(FakeEngine, daemon.socket)
        assert daemon.wait_record("peer.hello", count=4)
        status = ask_daemon(daemon.socket)
        assert (status.store_open, status.engine_count) == (False, 0)
        assert "the store is not open: everything is a miss, and engines wait for it" in status.problems
        gone.close()
        cluster.start_master()
        engine = attaching.result(30)
        values = blocks("late", 3)
        engine.save(values)
        stored(daemon, 3)
        assert engine.load(list(values)) == list(values.values())
        assert [line["engine"] for line in daemon.records("engine.attached")] == [engine.spec.engine_id]
        assert daemon.records("store.joined")
        engine.close()
