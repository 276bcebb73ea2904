"""Store calls that hang: a real cluster whose storage node or master SIGSTOP stops, and SIGCONT thaws."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.stores import blocks, engine_with
from tests.lab import control
from tests.lab.daemon import Daemon
from tests.lab.process import frozen
from tests.lab.store import Store
from tests.support.auditor import Auditor, ask_daemon
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

ANSWER_S = 15.0  # the calls' deadline is one second; the rest is for a busy machine, and far below Mooncake's 60 s


@pytest.fixture(scope="module")
def cluster() -> Iterator[Store]:
    with Store(memory="64 MB") as store:
        yield store


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Store]:
    """Its first node is killed by the last test."""
    with Store(memory="64 MB", nodes=2) as store:
        yield store


def grouped(name: str, count: int) -> list[dict[bytes, bytes]]:
    """Groups of two blocks."""
    return [blocks(f"{name}-{number}", 2) for number in range(count)]


def put(cluster: Store, *groups: list[dict[bytes, bytes]], prefixes: tuple[str, ...] = ("model", "model")) -> None:
    """Put each list of groups on a storage node of its own."""
    for prefix, each, segment in zip(prefixes, groups, cluster.segments, strict=True):
        begin = f"u{os.getuid()}@{prefix}@tp_rank:0@"
        values = {begin + digest.hex(): value for group in each for digest, value in group.items()}
        control.put(cluster.config, values, segment)


def stuck(daemon: Daemon) -> int:
    return int(ask_daemon(daemon.socket).engines[0]["slots_stuck"])


def test_a_node_that_is_frozen_costs_its_requests_the_deadline_and_no_one_else_anything(
    serve: Callable[..., Daemon], cluster: Store, auditor: Auditor
) -> None:
    daemon = serve(memory=None, mooncake_config=cluster.config, extra=("--call-timeout-ms", "1000"))
    engine = FakeEngine(daemon.socket)
    staged, hung, other = blocks("staged", 3), blocks("hung", 5), blocks("other", 4)
    engine.save({**staged, **hung, **other})
    eventually(lambda: engine.load(list(staged)), what="a hit")
    eventually(lambda: sum(line["stored_blocks"] for line in daemon.records("save.done")) >= 12, what="the saves")
    with frozen(cluster.node_pid):
        key = engine.hint([*staged, *hung])
        at_once = engine.hint(list(staged))
        assert engine.settled(at_once, ANSWER_S).count == 3, "what is staged waits for nothing"
        assert engine.settled(engine.hint(list(blocks("absent", 2))), ANSWER_S).count == 0
        assert engine.settled(key, ANSWER_S).count == 3, "the prefix that is ready"
        assert stuck(daemon) == 5
        assert daemon.wait_record("call.overdue") is not None
        again = engine.hint([*staged, *hung])
        assert engine.settled(again, ANSWER_S).count == 3
        assert stuck(daemon) == 5
        assert len(daemon.records("call.overdue")) == 1, "known to hang: not asked for again"
    eventually(lambda: stuck(daemon) == 0, 60, "the slots")
    assert eventually(lambda: engine.load(list(other)), 30, "a hit") == list(other.values())
    assert engine.load([*staged, *hung]) == [*staged.values(), *hung.values()], "it arrived, so it is asked for again"
    for index in range(engine.layout.flag_count):
        flag = engine.flag((index, 0))
        if flag.state == FlagState.READY:
            engine.cancel((index, flag.generation))
    auditor.assert_idle(daemon.pid, daemon.socket)
    engine.close()


@pytest.mark.parametrize("apart", [True, False])
def test_requests_behind_a_node_that_is_frozen_wait_for_it_once_and_those_of_others_are_served(
    serve: Callable[..., Daemon], two_nodes: Store, apart: bool
) -> None:
    """Each request's values lie on one node, or on both: then gets read apart to find out which one hangs."""
    hung, fine = grouped(f"hung-{apart}", 8), grouped(f"fine-{apart}", 8)
    put(two_nodes, hung, fine)
    # Two blocks in a call, and one call at a time: each in flight when the node stops waits for it.
    extra = ("--call-timeout-ms", "1000", "--chunk", "8192", "--fetch-threads", "1")
    daemon = serve(memory=None, mooncake_config=two_nodes.config, extra=extra)
    engine = FakeEngine(daemon.socket)
    wanted = [list(group) for pair in zip(hung, fine, strict=True) for group in pair]
    if not apart:
        wanted = [[good, bad] for (_, good), (bad, _) in zip(fine, hung, strict=True)]
    with frozen(two_nodes.node_pid):
        began = time.monotonic()
        keys = [engine.hint(digests) for digests in wanted]
        counts = [engine.settled(key, ANSWER_S).count for key in keys]
        assert time.monotonic() - began < 3.5, "far below one deadline after the other"
        assert counts == [0, 2] * 8 if apart else counts == [0] + [1] * 7
        (overdue,) = daemon.records("call.overdue")
        assert len(overdue["owners"].split()) == (1 if apart else 2)
        again = [engine.hint(list(group)) for group in (fine[1], hung[1])]
        assert [engine.settled(key, ANSWER_S).count for key in again] == [2, 0]
    eventually(lambda: stuck(daemon) == 0, 60, "the slots")
    assert eventually(lambda: engine.load(list(hung[5])), 30, "a hit") == list(hung[5].values())
    engine.close()


def test_sigterm_does_not_wait_for_a_call_that_hangs(serve: Callable[..., Daemon], cluster: Store) -> None:
    daemon = serve(memory=None, mooncake_config=cluster.config, extra=("--call-timeout-ms", "1000"))
    engine, values = engine_with(daemon, "term", 3)
    with frozen(cluster.node_pid):
        assert engine.settled(engine.hint(list(values)), ANSWER_S).count == 0
        assert daemon.sigterm(25) == 0
    engine.close()


def test_one_engine_s_calls_that_hang_are_not_in_the_way_of_another_s(
    serve: Callable[..., Daemon], two_nodes: Store
) -> None:
    """One node is frozen, and one engine wants its values alone: its calls hang in the midst of their time.

    Those of the other node still come.
    """
    hung, fine = grouped("hung", 8), grouped("fine", 12)
    put(two_nodes, hung, fine, prefixes=("hung", "fine"))
    extra = ("--call-timeout-ms", "20000", "--chunk", "8192", "--fetch-threads", "1")  # two blocks in a call
    daemon = serve(memory=None, mooncake_config=two_nodes.config, extra=extra)
    victim = FakeEngine(daemon.socket, engine_id="victim", prefix="hung")
    other = FakeEngine(daemon.socket, engine_id="other", prefix="fine")
    assert other.load(list(fine[0])) == list(fine[0].values())
    with frozen(two_nodes.node_pid):
        for group in hung:
            victim.hint(list(group))
        for number, group in enumerate(fine[1:]):
            started = time.monotonic()
            assert other.load(list(group)) == list(group.values()), f"a hit became a miss: {number}"
            assert time.monotonic() - started < 5, "far below the long deadline"
            time.sleep(0.2)
    victim.close()
    other.close()


def test_requests_behind_a_node_that_was_killed_wait_for_it_once_and_those_of_others_are_served(
    serve: Callable[..., Daemon], two_nodes: Store
) -> None:
    """Mooncake takes a second for each call to it, until the master drops its values."""
    dead, fine = grouped("dead", 10), grouped("fine", 10)
    put(two_nodes, dead, fine)
    daemon = serve(memory=None, mooncake_config=two_nodes.config, extra=("--chunk", "8192"))  # two blocks in a call
    engine = FakeEngine(daemon.socket)
    assert engine.load(list(dead[0])) == list(dead[0].values()), "connected"
    assert engine.load(list(fine[0])) == list(fine[0].values())
    os.kill(two_nodes.node_pid, signal.SIGKILL)
    began = time.monotonic()
    behind = [engine.hint(list(group)) for group in dead[1:]]
    others = [engine.hint(list(group)) for group in fine[1:6]]
    assert [engine.settled(key, ANSWER_S).count for key in others] == [2] * 5
    assert [engine.settled(key, ANSWER_S).count for key in behind] == [0] * 9
    assert time.monotonic() - began < 6, "far below nine seconds, one after the other"
    [line] = daemon.records("owner.aside")
    assert line["owners"]
    began = time.monotonic()
    while time.monotonic() - began < 5:
        again = [engine.hint(list(group)) for group in (*dead[1:], fine[6])]
        assert [engine.settled(key, ANSWER_S).count for key in again] == [0] * 9 + [2]
        for key in again:
            engine.cancel(key)
        time.sleep(0.05)
    assert len(daemon.records("owner.aside")) == 1
    engine.close()
