"""A cluster with high availability: masters of which one leads, an etcd that says which, and what befalls them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvprefetch.shmring.wire.records import FlagState, Outcome
from tests.daemon.stores import absent_cluster, blocks, engine_with
from tests.lab import process
from tests.lab.daemon import Daemon
from tests.lab.masters import HighlyAvailableStore, etcd
from tests.support.auditor import Auditor
from tests.support.command import kvprefetchd
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]

pytestmark = pytest.mark.stress  # an etcd and two masters: a minute, and few clusters have them

needs_etcd = pytest.mark.skipif(etcd() is None, reason="no etcd (make setup takes it out of Debian's etcd-server)")

DEADLINE_S = 1.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[HighlyAvailableStore]:
    with HighlyAvailableStore(memory="64 MB") as store:
        yield store


def joined(serve: Serve, cluster: HighlyAvailableStore) -> Daemon:
    return serve(memory=None, mooncake_config=cluster.config, extra=("--call-timeout-ms", str(int(DEADLINE_S * 1000))))


@needs_etcd
def test_a_daemon_joins_and_leaves_at_once(serve: Serve, cluster: HighlyAvailableStore, auditor: Auditor) -> None:
    """Mooncake's goodbye there takes up to 31 s, and holds the GIL, for nobody's use."""
    daemon = joined(serve, cluster)
    engine, values = engine_with(daemon, "there", 4)
    assert engine.load(list(values)) == list(values.values())
    auditor.assert_idle(daemon.pid, daemon.socket)
    began = time.monotonic()
    assert daemon.sigterm(60) == 0
    assert time.monotonic() - began < 2.5
    engine.close()


@needs_etcd
def test_doctor_looks_at_the_etcd_and_makes_its_round_trip(cluster: HighlyAvailableStore, tmp_path: Path) -> None:
    said = kvprefetchd(
        "doctor", "--mooncake-config", cluster.config, "--socket", tmp_path / "none.sock", "--staging", "1MiB"
    )
    assert f"etcd of the masters {cluster.master_address} answers" in said.stdout, said.stdout + said.stderr
    assert "round trip through the cluster: put, found, read, removed" in said.stdout
    assert said.returncode == 0


@needs_etcd
def test_a_master_that_does_not_lead_lists_nothing_and_says_why(cluster: HighlyAvailableStore) -> None:
    said = kvprefetchd("store", "ls", "--master-http", cluster.standby_http)
    assert (said.returncode, said.stdout) == (69, "")
    assert said.stderr.startswith("kvprefetchd: another master leads: name that one: http://")


def test_without_a_master_that_leads_engines_wait_and_the_daemon_says_why(serve: Serve, tmp_path: Path) -> None:
    """Mooncake's packages are built with etcd alone; others than their builders find that out here."""
    config = absent_cluster(tmp_path, master="k8s://space/lease")
    daemon = serve(memory=None, mooncake_config=config)
    degraded = daemon.wait_record("store.degraded")
    assert degraded is not None
    assert "set-up failed: with code -600: master_server_address='k8s://space/lease'" in degraded["error"]
    assert (
        "no master with --cluster_id=mooncake_cluster leads yet, or this Mooncake was built without k8s"
        in (degraded["error"])
    )
    engine = FakeEngine(daemon.socket, attach=False)
    engine.greet_all()
    assert daemon.wait_record("peer.hello", count=2)
    assert daemon.sigterm(10) == 0
    engine.close()


class Traffic:
    """Saves and requests of one engine, one after the other: what came back, and how long the slowest took."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.saved: list[dict[bytes, bytes]] = []
        self.slowest_s = 0.0
        self.requests = 0

    def save(self) -> dict[bytes, bytes]:
        self.saved.append(blocks(f"traffic-{len(self.saved)}", 4))
        if self.engine.credits.available() >= 4:
            self.engine.save(self.saved[-1])
        return self.saved[-1]

    def load(self, values: dict[bytes, bytes]) -> bool:
        """Whether all of them came; what did not come is nowhere, what did is right."""
        engine, began = self.engine, time.monotonic()
        key = engine.hint(list(values))
        flag = engine.settled(key, 60)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.requests += 1
        assert flag.state == FlagState.READY
        if not flag.count:
            engine.cancel(key, Outcome.MISS)
            return False
        assert engine.take(key) == list(values.values())[: flag.count]
        return flag.count == len(values)

    def run(self, over: Callable[[], object]) -> None:
        """A save, two loads of it a little later and of an old one, and so on, until it is `over`."""
        while not over():
            self.save()
            for back in (3, 100):
                self.load(self.saved[-min(back, len(self.saved))])
            time.sleep(0.02)

    def served(self) -> bool:
        """Whether something new is saved and found."""
        values = self.save()
        time.sleep(0.2)
        return self.load(values)


def leader_killed(cluster: HighlyAvailableStore) -> None:
    cluster.kill_master()
    cluster.wait_leader()


def leader_frozen(cluster: HighlyAvailableStore) -> None:
    with process.frozen(cluster.master_pid):
        time.sleep(20)


def etcd_killed(cluster: HighlyAvailableStore) -> None:
    cluster.kill_etcd()
    time.sleep(12)
    cluster.start_etcd()
    cluster.wait_leader()


def etcd_frozen_for_a_moment(cluster: HighlyAvailableStore) -> None:
    with process.frozen(cluster.etcd_pid):
        time.sleep(2)
    time.sleep(5)


def all_masters_killed(cluster: HighlyAvailableStore) -> None:
    for master in cluster.masters:
        process.reap(master)
    time.sleep(8)
    cluster.start_masters()
    cluster.wait_leader()


DISASTERS = [leader_killed, leader_frozen, etcd_killed, etcd_frozen_for_a_moment, all_masters_killed]


@needs_etcd
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("disaster", DISASTERS)
def test_every_request_is_answered_in_time_and_right(
    serve: Serve, auditor: Auditor, disaster: Callable[[HighlyAvailableStore], None], replicated: bool
) -> None:
    """`replicated`: a master that takes over knows what there is, by the log of changes in the etcd."""
    options = ("--enable_oplog=true",) if replicated else ()
    with HighlyAvailableStore(memory="64 MB", options=options) as cluster, ThreadPoolExecutor() as pool:
        daemon = joined(serve, cluster)
        engine = FakeEngine(daemon.socket)
        traffic = Traffic(engine)
        began = time.monotonic()
        traffic.run(lambda: time.monotonic() > began + 5)
        assert traffic.served()
        before = [each for each in traffic.saved if traffic.load(each)]
        assert len(before) > 20
        happening = pool.submit(disaster, cluster)
        traffic.run(happening.done)
        happening.result()
        over = time.monotonic()
        eventually(traffic.served, 40, "service")
        print(
            f"{disaster.__name__} {replicated=}: {traffic.requests} requests, {traffic.slowest_s=:.2f}, "
            f"served again {time.monotonic() - over:.1f} s after it"
        )
        assert traffic.slowest_s < DEADLINE_S + 1.5
        lost = [each for each in before if not traffic.load(each)]
        print(f"{len(lost)} of {len(before)} lost")
        if replicated or disaster is etcd_frozen_for_a_moment:
            # What hung when it happened is left alone for half a minute.
            eventually(lambda: all(map(traffic.load, lost)), 40, "what was replicated")
        auditor.assert_idle(daemon.pid, daemon.socket)
        engine.close()
