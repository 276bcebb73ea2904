"""A `lease_ms` above the master's lease is found out, and from then on Mooncake judges each lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvprefetch.daemon.cli import findings
from kvprefetch.daemon.config.model import load
from kvprefetch.daemon.store.lease_check import AGAIN_NS, LEASE_EXPIRED, LeaseCheck
from tests.daemon.stores import blocks, stored
from tests.lab.daemon import Daemon
from tests.lab.process import frozen
from tests.lab.store import Store as LabStore
from tests.support.auditor import ask_daemon
from tests.support.clock import Clock
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

MASTER_MS, LEASE_MS = 300, 2000
LEASE_NS = LEASE_MS * 1_000_000


class Sessions:
    """Mooncake's sessions with a master whose lease is `master_ms`; a read of one takes `read_ms`."""

    def __init__(self, master_ms: int = MASTER_MS) -> None:
        self.clock, self.master_ms, self.read_ms, self.there = Clock(), master_ms, 0, True
        self.open: dict[str, int] = {}

    def register_buffer(self, address: int, size: int) -> int:
        assert address
        return 0 if size == 1 else -1

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        self.open.update(dict.fromkeys(keys if self.there else (), self.clock.ns + self.master_ms * 1_000_000))
        return [0 if self.there else -704 for _ in keys]

    def batch_get_into_multi_buffer_ranges(
        self, keys: list[str], _: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> list[int]:
        self.clock.advance_ms(self.read_ms)
        assert (sizes, offsets) == ([[1]], [[0]])
        return [1 if self.clock.ns < self.open[key] else LEASE_EXPIRED for key in keys]

    def batch_get_session_end(self, keys: list[str]) -> None:
        for key in keys:
            del self.open[key]

    def check(self) -> LeaseCheck:
        check = LeaseCheck(LEASE_NS, self.clock)
        assert not check.due, "no value was read"
        check.key = "a"
        return check


def both(check: LeaseCheck, sessions: Sessions, late_ms: int = 0) -> None:
    """Begin a session and end it."""
    for wait_ms in (late_ms, 0):
        assert check.due
        check.go_on(sessions, lambda call, *rest: call(*rest))
        if sessions.open:
            assert not check.due
            sessions.clock.advance_ms(LEASE_MS * 0.9 + wait_ms)
    assert not sessions.open


@pytest.mark.parametrize(("master_ms", "short"), [(MASTER_MS, True), (LEASE_MS - 201, True), (LEASE_MS, False)])
def test_a_verdict_needs_a_read_before_the_lease_ends(master_ms: int, short: bool) -> None:
    sessions = Sessions(master_ms)
    check = sessions.check()
    both(check, sessions)
    assert (check.short, check.due) == (short, False)
    sessions.clock.ns += AGAIN_NS
    assert check.due is not short, "a master may start anew with another lease"


@pytest.mark.parametrize(("late_ms", "read_ms"), [(250, 0), (0, 250)])
def test_a_read_that_is_late_says_nothing(late_ms: int, read_ms: int) -> None:
    sessions = Sessions(LEASE_MS)
    sessions.read_ms = read_ms
    check = sessions.check()
    both(check, sessions, late_ms)
    assert not check.short
    sessions.clock.ns += LEASE_NS
    sessions.read_ms, sessions.master_ms = 0, MASTER_MS
    both(check, sessions)
    assert check.short


def test_a_value_that_is_gone_begins_no_session() -> None:
    sessions = Sessions()
    check, sessions.there = sessions.check(), False
    check.go_on(sessions, lambda call, *rest: call(*rest))
    assert not check.due
    sessions.there = True
    sessions.clock.ns += LEASE_NS
    both(check, sessions)
    assert check.short


@pytest.fixture
def cluster() -> Iterator[LabStore]:
    pytest.importorskip("mooncake")
    with LabStore(memory="64 MB", lease_ms=MASTER_MS) as store:
        yield store


@pytest.mark.store
@pytest.mark.parametrize("lease_ms", [LEASE_MS, MASTER_MS])
def test_a_daemon_whose_lease_is_not_the_master_s_says_so(
    cluster: LabStore, serve: Callable[..., Daemon], lease_ms: int
) -> None:
    values = blocks("leased", 3)
    daemon = serve(memory=None, mooncake_config=cluster.config, extra=("--lease-ms", str(lease_ms)))
    [opened] = daemon.records("store.opened")
    assert opened["reads"] == "sleeping"
    engine = FakeEngine(daemon.socket)
    engine.save(values)
    stored(daemon, 3)
    assert eventually(lambda: engine.load(list(values))) == list(values.values())
    config = load({"socket": daemon.socket})
    if lease_ms == MASTER_MS:
        assert daemon.wait_record("lease.short", timeout_s=1.5) is None
        assert ask_daemon(daemon.socket).lease_fault == ""
    else:
        line = daemon.wait_record("lease.short", timeout_s=20)
        assert line is not None
        what, _, advice = line["error"].rpartition(": ")
        assert what.startswith("lease_ms=2000: the master keeps values for a shorter time")
        assert advice == "set it to the master's default_kv_lease_ttl, and restart"
        eventually(lambda: ask_daemon(daemon.socket).lease_fault == line["error"], what="the picture of its second")
        assert next(findings.master(config)) == ("bad", what, advice)
        assert eventually(lambda: engine.load(list(values))) == list(values.values()), "loads go on"
    assert len(daemon.records("lease.short")) == (lease_ms != MASTER_MS)
    engine.close()


@pytest.mark.store
def test_a_check_that_waits_for_a_storage_node_does_not_hold_up_the_end(serve: Callable[..., Daemon]) -> None:
    pytest.importorskip("mooncake")
    values = blocks("leased", 1)
    with LabStore(memory="64 MB", lease_ms=LEASE_MS) as cluster:
        daemon = serve(memory=None, mooncake_config=cluster.config, extra=("--lease-ms", str(LEASE_MS)))
        engine = FakeEngine(daemon.socket)
        engine.save(values)
        stored(daemon, 1)
        assert eventually(lambda: engine.load(list(values)))
        engine.close()
        with frozen(cluster.node_pid):
            assert daemon.wait_record("lease.short", timeout_s=1.5 * LEASE_MS / 1e3) is None, "its read hangs"
            began = time.monotonic()
            assert daemon.sigterm(90) == 0
            assert time.monotonic() - began < 20
