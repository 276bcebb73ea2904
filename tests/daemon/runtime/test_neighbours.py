"""One engine's mistakes, dying included, are refused in one line or end that engine alone; the others go on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.liveness import PeerStatus
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.attach import Attached, Refused, Reset, ResetDone, WorkerInfo
from kvprefetch.shmring.wire.codec import send_message
from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.stores import blocks, request_line
from tests.lab.daemon import Daemon
from tests.support.auditor import Auditor, ask_daemon
from tests.support.engine_side import EngineSpec
from tests.support.fake_engine import FakeEngine, answer
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


SLOW_KERNEL = """
import time
from kvprefetch.shmring.segment import Segment

def slow(segment, close=Segment.close):
    time.sleep(2)
    return close(segment)

Segment.close = slow
"""


def test_the_memory_of_an_engine_that_leaves_is_freed_beside_the_others(patched: Callable[..., Daemon]) -> None:
    """Unmapping takes the kernel 50 ms per GiB; here 2 s for each of two segments."""
    daemon = patched(SLOW_KERNEL)
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
    bad.settled(bad.hint(list(blocks("corrupt", 3)), name="of the bad one"))
    bad.words.store_release(Line.TAIL, 64 * 1024 * 1024 * 1024)
    bad.bell.ring()
    assert bad.scheduler.recv(1) == b"", "the daemon closes the connection"
    assert bad.liveness.peer(time.monotonic_ns()) is PeerStatus.GONE
    assert good.load(list(blocks("corrupt", 2))) is None
    assert shared_daemon.wait_record("engine.corrupt")
    assert [line["engine"] for line in shared_daemon.records("engine.corrupt")] == ["bad"]
    assert request_line(shared_daemon, "of the bad one")["outcome"] == "engine_corrupt"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 3}, "rank out of bounds: rank=3 world_size=1"),
        (
            {"rank": 7, "world_size": 4096},
            "world_size out of bounds: world_size=4096 max=127: one daemon serves the processes of one node",
        ),
    ],
)
def test_a_wrong_hello_is_refused_in_one_line(shared_daemon: Daemon, changes: dict[str, Any], message: str) -> None:
    engine = FakeEngine(shared_daemon.socket, attach=False)
    sock = engine.greet("worker", **changes)
    assert answer(sock, Refused) == Refused(error=message, final=True)
    assert sock.recv(1) == b""


FULL, WINDOW = Group(Kind.FULL, 32), Group(Kind.WINDOW, 32, 64)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Groups((FULL, Group(Kind.WINDOW, 32)), 32), "KV group's window is out of bounds: group=1 kind=window"),
        (Groups((FULL, WINDOW), 48), "KV group's block is no multiple of the hash block: group=0"),
        (Groups((WINDOW,), 32), "KV groups are served beside full attention only: groups=1 kinds=window"),
    ],
)
def test_groups_that_are_not_served_are_refused_in_one_line(shared_daemon: Daemon, rules: Groups, message: str) -> None:
    engine = FakeEngine(shared_daemon.socket, attach=False, groups=rules)
    sock = engine.greet("scheduler")
    refused = answer(sock, Refused)
    assert refused.error.startswith(message)
    assert refused.final
    assert sock.recv(1) == b""


def test_the_longest_hints_of_the_most_groups_hold_up_no_other_engine(serve: Callable[..., Daemon]) -> None:
    """As many as find room in the slot tables: each names a quarter of a million blocks in a few kilobytes."""
    daemon, groups = serve(staging="64MiB"), Groups((FULL, *[Group(Kind.STATE, 32)] * 31), 32)
    victim = FakeEngine(daemon.socket, engine_id="victim", prefix="victim")
    flood = FakeEngine(daemon.socket, engine_id="flood", prefix="flood", groups=groups, max_blocks=8000)
    assert victim.load(list(blocks("nowhere", 1))) is None
    count, digests = 0, [bytes([i % 251]) for i in range(8000)]
    while flood.flags.room(groups.names(8000)):
        flood.hint(digests, names=groups.names(8000))
        count += 1
    assert count >= 16, "LONGEST of memory.py"
    began, longest_s = time.monotonic(), 0.0
    while time.monotonic() - began < 2.0:
        before = time.monotonic()
        assert victim.load(list(blocks(f"nowhere-{before}", 1))) is None
        longest_s = max(longest_s, time.monotonic() - before)
    assert longest_s < 1.5


@pytest.mark.parametrize(("theirs", "older"), [(99, "daemon"), (1, "engine"), (0, "engine"), (-(10**30), "engine")])
def test_another_protocol_is_refused_naming_both_and_what_to_do(shared_daemon: Daemon, theirs: int, older: str) -> None:
    engine = FakeEngine(shared_daemon.socket, attach=False)
    sock = engine.greet("worker", protocol=theirs)
    refused = answer(sock, Refused)
    assert refused.final
    both = f"protocol differs: engine={str(theirs)[:20]} ('test') daemon={records.PROTOCOL} ('"
    assert refused.error.startswith(both)
    assert f"restart the {older};" in refused.error
    assert len(refused.error.splitlines()) == 1
    assert sock.recv(1) == b""


def test_a_second_process_of_the_same_rank_is_turned_away_for_now(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket)
    twin = FakeEngine(shared_daemon.socket, incarnation=engine.spec.incarnation, attach=False)
    sock = twin.greet("worker")
    assert answer(sock, Refused) == Refused(error="already attached: role=worker rank=0", final=False)
    twin.close()
    assert engine.load(list(blocks("twin", 1))) is None


LARGE = EngineSpec().scheduler().model_copy(update={"max_blocks": (1 << 20) - 1, "max_hint_bytes": 1 << 28})
OF_TWO_GROUPS = WorkerInfo(block_bytes=4096, key_prefixes=["m@", "n@"], replicas=1, replica_index=0)
SHARE = WorkerInfo(block_bytes=4096, key_prefixes=["m@"], replicas=2, replica_index=0)


@pytest.mark.parametrize(
    ("options", "infos", "words"),
    [
        ({"block_bytes": 2 << 20}, {}, ["staging=1MiB block=2MiB"]),
        (
            {},
            {"scheduler": LARGE},
            ["max_hint_bytes=268435456 max_blocks=1048575 control=1088MiB max=64MiB", "raise staging=1MiB to 4352MiB"],
        ),
        (
            {"ranks": 2},
            {"worker": SHARE},
            ["must take turns: key_prefix='m@' (replicas, replica_index)=[(2, 0), (2, 0)]"],
        ),
        ({}, {"worker": OF_TWO_GROUPS}, ["number of KV groups differs: groups=2 expected=1"]),
    ],
    ids=[
        "staging is smaller than a block",
        "control segment too large for staging",
        "a slot nobody fills would be put",
        "more groups than the scheduler's",
    ],
)
def test_an_engine_that_cannot_be_served_is_refused_naming_the_bound(
    shared_daemon: Daemon, options: dict[str, Any], infos: dict[str, Any], words: list[str]
) -> None:
    """Each of its processes gets the refusal."""
    engine = FakeEngine(shared_daemon.socket, attach=False, **options)
    for sock in engine.greet_all(**infos):
        error = answer(sock, Refused).error
        assert all(word in error for word in words), error


def test_a_flood_of_resets_hurts_nobody(shared_daemon: Daemon) -> None:
    """The last one is answered soon, saves go on behind it, and a neighbour finds its blocks meanwhile."""
    engine = FakeEngine(shared_daemon.socket, prefix="resets")
    neighbour, values = FakeEngine(shared_daemon.socket, engine_id="neighbour", prefix="calm"), blocks("calm", 3)
    neighbour.save(values)
    eventually(lambda: neighbour.load(list(values)), what="the save")
    engine.scheduler.setblocking(False)
    last, began = 3000, time.monotonic()
    for generation in range(1, last + 1):
        while True:
            with contextlib.suppress(BlockingIOError):
                send_message(engine.scheduler, Reset(reset_generation=generation, weights=f"{generation:032x}"))
                break
            time.sleep(0.001)
            assert time.monotonic() - began < 30
    assert neighbour.load(list(values)) == list(values.values())
    engine.scheduler.settimeout(10)
    while answer(engine.scheduler, ResetDone).reset_generation != last:
        assert time.monotonic() - began < 30
    later = blocks("after the resets", 3)
    engine.save(later, reset_generation=last)
    eventually(lambda: engine.load(list(later)), what="the save")


def test_workers_hear_which_epochs_the_scheduler_may_still_name(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, engine_id="epochs", attach=False)
    info = engine.spec.scheduler().model_copy(update={"live_epochs": [3, 5]})
    [worker, _] = engine.greet_all(scheduler=info)
    assert answer(worker, Attached).live_epochs == [3, 5]
