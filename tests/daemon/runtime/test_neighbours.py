"""What one engine does wrong, dying included, is refused in one line or ends that engine alone; the others go on."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvprefetch.shmring.flags import pack
from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.liveness import PeerStatus
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.attach import Attached, Refused, Reset, ResetDone, SchedulerInfo, WorkerInfo
from kvprefetch.shmring.wire.codec import Message, receive_message, send_message
from kvprefetch.shmring.wire.records import FlagState, RecordKind
from tests.daemon.fake_engine import BLOCK_BYTES, FakeEngine
from tests.daemon.stores import blocks, stored
from tests.lab.daemon import Daemon
from tests.lab.store import Store
from tests.support.auditor import Auditor, ask_daemon
from tests.support.waiting import eventually


def test_an_engine_that_vanishes_leaves_nothing_pinned_and_nobody_else_notices(
    shared_daemon: Daemon, auditor: Auditor
) -> None:
    survivor = FakeEngine(shared_daemon.socket, engine_id="survivor", prefix="vanish")
    values = blocks("vanish", 8)
    survivor.save(values)
    eventually(lambda: survivor.load(list(values)), what="a hit")
    victim = FakeEngine(shared_daemon.socket, engine_id="victim", prefix="vanish")
    key = victim.hint(list(values))
    victim.settled(key)
    assert victim.move(key, FlagState.CLAIMED)
    victim.credits.take(3)
    victim.close()
    eventually(lambda: len(ask_daemon(shared_daemon.socket).engines) == 1, what="the victim's end")
    assert survivor.load(list(values)) == list(values.values())
    auditor.assert_idle(shared_daemon.pid, shared_daemon.socket)
    survivor.close()


SLOW_KERNEL = """
import time
from kvprefetch.shmring.segment import Segment

def slow(segment, close=Segment.close):
    time.sleep(2)
    return close(segment)

Segment.close = slow
"""


def test_the_memory_of_an_engine_that_leaves_is_freed_beside_the_others(
    serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Unmapping takes the kernel 50 ms per GiB; here 2 s for each of two segments."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_KERNEL)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    daemon = serve(env={"PYTHONPATH": path})
    leaving = FakeEngine(daemon.socket, engine_id="leaving", prefix="leaving")
    staying = FakeEngine(daemon.socket, engine_id="staying", prefix="staying")

    def segments() -> int:
        return Path(f"/proc/{daemon.pid}/maps").read_text().count("memfd:kvprefetch")

    assert segments() == 4
    leaving.close()
    longest_s = 0.0
    while segments() > 2:
        began = time.monotonic()
        assert staying.load(list(blocks("nowhere", 1))) is None
        longest_s = max(longest_s, time.monotonic() - began)
    assert longest_s < 1.5
    staying.close()
    assert daemon.sigterm(30) == 0


def test_a_corrupt_ring_ends_that_engine_only(shared_daemon: Daemon) -> None:
    good = FakeEngine(shared_daemon.socket, engine_id="good", prefix="corrupt")
    bad = FakeEngine(shared_daemon.socket, engine_id="bad", prefix="corrupt")
    bad.words.store_release(Line.TAIL, 64 * 1024 * 1024 * 1024)
    bad.bell.ring()
    assert bad.scheduler.recv(1) == b"", "the daemon hangs up"
    assert bad.liveness.peer(time.monotonic_ns()) is PeerStatus.GONE
    assert good.load(list(blocks("corrupt", 2))) is None
    told = shared_daemon.wait_record("engine.corrupt")
    assert told is not None
    assert told["engine"] == "bad"
    assert len(shared_daemon.records("engine.corrupt")) == 1
    bad.close()
    good.close()


def test_bad_records_are_counted_and_skipped(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, prefix="records")
    assert engine.producer.push(77, b"what is this")
    assert engine.producer.push(RecordKind.HINT, b"short")
    word = engine.table.load(0)
    assert engine.table.exchange(0, word, pack(9, FlagState.HINTED, 0))
    assert engine.producer.push(RecordKind.SAVED, records.encode_saved(records.Saved(1, 0, True, [3], [])))
    assert engine.load(list(blocks("records", 2))) is None
    status = ask_daemon(shared_daemon.socket).engines[0]
    assert status["bad_records"] == 3
    engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 2}, "only one KV-cache group is served: groups=2 max=1"),
        ({"rank": 3}, "rank out of bounds: rank=3 world_size=1"),
    ],
)
def test_a_wrong_hello_is_refused_in_one_line(shared_daemon: Daemon, changes: dict[str, int], message: str) -> None:
    engine = FakeEngine(shared_daemon.socket, attach=False)
    sock = engine.connect()
    send_message(sock, engine.hello("worker", **changes))  # type: ignore[arg-type]
    received = receive_message(sock)
    assert received is not None
    assert received[0] == Refused(error=message, final=True)
    assert sock.recv(1) == b""
    engine.close()


@pytest.mark.parametrize(("theirs", "older"), [(99, "daemon"), (1, "engine"), (0, "engine"), (-(10**30), "engine")])
def test_another_protocol_is_refused_naming_both_and_what_to_do(shared_daemon: Daemon, theirs: int, older: str) -> None:
    engine = FakeEngine(shared_daemon.socket, attach=False)
    sock = engine.connect()
    send_message(sock, engine.hello("worker", protocol=theirs))
    received = receive_message(sock)
    assert received is not None
    refused = received[0]
    assert isinstance(refused, Refused)
    assert refused.final
    both = f"protocol differs: engine={str(theirs)[:20]} ('test') daemon={records.PROTOCOL} ('"
    assert refused.error.startswith(both)
    assert f"restart the {older};" in refused.error
    assert len(refused.error.splitlines()) == 1
    assert sock.recv(1) == b""
    engine.close()


def test_a_second_process_of_the_same_rank_is_turned_away_for_now(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket)
    twin = FakeEngine(shared_daemon.socket, incarnation=engine.incarnation, attach=False)
    sock = twin.connect()
    send_message(sock, twin.hello("worker"))
    received = receive_message(sock)
    assert received is not None
    assert received[0] == Refused(error="already attached: role=worker rank=0", final=False)
    twin.close()
    assert engine.load(list(blocks("twin", 1))) is None
    engine.close()


def refusals(sockets: Sequence[socket.socket]) -> Iterator[Refused]:
    """What each connection hears, which is a refusal."""
    for sock in sockets:
        received = receive_message(sock)
        assert received is not None
        assert isinstance(received[0], Refused)
        yield received[0]


def test_staging_smaller_than_one_block_is_refused_naming_both(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, block_bytes=2 << 20, attach=False)
    sockets = [engine.connect(), engine.connect()]
    send_message(sockets[0], engine.hello("worker"))
    send_message(sockets[1], engine.hello("scheduler"))
    for refusal in refusals(sockets):
        assert "staging=1MiB block=2MiB" in refusal.error
    engine.close()


def test_a_control_segment_out_of_proportion_to_staging_is_refused(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, engine_id="large", attach=False)
    wants = SchedulerInfo(max_blocks=(1 << 20) - 1, max_hint_bytes=1 << 28, loads=True, saves=True)
    sockets = [engine.connect(), engine.connect()]
    send_message(sockets[0], engine.hello("worker"))
    send_message(sockets[1], engine.hello("scheduler", scheduler=wants))
    for refusal in refusals(sockets):
        assert "max_hint_bytes=268435456 max_blocks=1048575 control=1087MiB max=64MiB" in refusal.error
        assert "raise staging=1MiB to 4352MiB" in refusal.error
    engine.close()


def test_ranks_of_one_key_that_do_not_take_turns_are_refused(shared_daemon: Daemon) -> None:
    """Otherwise a slot that nobody filled would be put."""
    engine = FakeEngine(shared_daemon.socket, ranks=2, attach=False)
    share = WorkerInfo(block_bytes=4096, key_prefix="m@", put_factor=2, put_turn=0)
    sockets = [engine.connect() for _ in range(3)]
    for rank in range(2):
        send_message(sockets[rank], engine.hello("worker", rank, worker=share))
    send_message(sockets[2], engine.hello("scheduler"))
    for refusal in refusals(sockets):
        assert "must take turns: key_prefix='m@' (put_factor, put_turn)=[(2, 0), (2, 0)]" in refusal.error
    engine.close()


def test_a_flood_of_resets_is_one_reset(shared_daemon: Daemon) -> None:
    """The last one is answered soon, and saves go on behind it."""
    engine = FakeEngine(shared_daemon.socket, prefix="resets")
    engine.scheduler.setblocking(False)
    before, last, began = len(shared_daemon.records("store.reset")), 3000, time.monotonic()
    for generation in range(1, last + 1):
        while True:
            with contextlib.suppress(BlockingIOError):
                send_message(engine.scheduler, Reset(reset_generation=generation, timeout_ms=600_000))
                break
            time.sleep(0.001)
            assert time.monotonic() - began < 30
    engine.scheduler.settimeout(10)
    while True:
        assert time.monotonic() - began < 30
        received = receive_message(engine.scheduler)
        assert received is not None
        assert isinstance(received[0], ResetDone)
        if received[0].reset_generation == last:
            break
    assert received[0].ok
    values = blocks("after the resets", 3)
    engine.save(values, reset_generation=last)
    eventually(lambda: engine.load(list(values)), what="the save")
    assert len(shared_daemon.records("store.reset")) - before < last
    engine.close()


def test_garbage_on_the_control_socket_hurts_nobody(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, prefix="garbage")
    for data in (b"\x00" * 100, b'{"type":"mapped","epoch":5}', b"[" * 60_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(10)
            sock.connect(str(shared_daemon.socket))
            sock.send(data)
            sock.recv(1 << 16)
    assert engine.load(list(blocks("garbage", 1))) is None
    engine.close()


def test_an_object_of_another_size_is_a_miss_for_one_engine_and_costs_no_fetch(serve: Callable[..., Daemon]) -> None:
    """Two engines look for the same keys with blocks of different sizes; in a cluster the look-up tells them apart."""
    with Store(memory="64 MB") as cluster:
        daemon = serve(memory=None, mooncake_config=cluster.config, extra=("--log-level", "debug"))
        whole = FakeEngine(daemon.socket, engine_id="whole", prefix="sized")
        half = FakeEngine(daemon.socket, engine_id="half", prefix="sized", block_bytes=BLOCK_BYTES // 2)
        values = blocks("sized", 4)
        whole.save(values)
        stored(daemon, 4)
        for _ in range(2):
            assert half.load(list(values)) is None
            assert whole.load(list(values)) == list(values.values())
        assert daemon.wait_record("fetch.done") is not None
        assert {line["engine"] for line in daemon.records("fetch.done")} == {"whole"}
        assert daemon.records("store.failed") == []


def test_a_hint_that_names_a_block_twice_is_served_and_ends_nothing(shared_daemon: Daemon) -> None:
    """The store is asked for each key once: of one that stands twice in a get, Mooncake fills one destination only."""
    engine = FakeEngine(shared_daemon.socket, prefix="twice")
    values = blocks("twice", 3)
    first, *others = values
    engine.save(values)
    eventually(lambda: engine.load(others[-1:]), what="the save")
    again = [first, *others, first, first, *others]
    assert engine.load(again) == [values[digest] for digest in again]
    assert engine.load(again) == [values[digest] for digest in again], "from staging"
    engine.close()


def test_workers_hear_which_epochs_the_scheduler_may_still_name(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, engine_id="epochs", attach=False)
    scheduler, worker = engine.connect(), engine.connect()
    hello = engine.hello("scheduler")
    assert hello.scheduler is not None
    said = hello.scheduler.model_copy(update={"live_epochs": [3, 5]})
    send_message(scheduler, engine.hello("scheduler", scheduler=said))
    send_message(worker, engine.hello("worker"))
    attached, fds = engine.receive(worker)
    for fd in fds:
        os.close(fd)
    assert attached.live_epochs == [3, 5]


def test_an_engine_whose_resets_could_never_be_confirmed_is_refused_with_the_bound(
    serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """A removal looks on for two heartbeats of the disk tier and half a second before it is confirmed."""
    daemon = serve(disk=f"{tmp_path / 'kv'}:256MiB")

    def attach(timeout_ms: int | None) -> Message:
        engine = FakeEngine(daemon.socket, engine_id=f"reset-{timeout_ms}", attach=False)
        hello = engine.hello("scheduler")
        assert hello.scheduler is not None
        said = hello.scheduler.model_copy(update={"reset_timeout_ms": timeout_ms})
        scheduler, worker = engine.connect(), engine.connect()
        send_message(scheduler, engine.hello("scheduler", scheduler=said))
        send_message(worker, engine.hello("worker"))
        received = receive_message(scheduler)
        assert received is not None
        for fd in received[1]:
            os.close(fd)
        return received[0]

    refused = attach(2999)
    assert isinstance(refused, Refused)
    assert refused.final
    assert "reset_timeout_ms=2999 min=3000" in refused.error
    for enough in (3000, None):
        attached = attach(enough)
        assert isinstance(attached, Attached)
        assert attached.removal_ms == 3000
