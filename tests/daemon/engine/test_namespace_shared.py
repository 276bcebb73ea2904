"""Whose namespace it is, between two daemons on one store that loses what says so: before the owner looks again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from benchmarks.lab.control import Reader
from benchmarks.lab.daemon import Daemon
from benchmarks.lab.process import frozen
from benchmarks.lab.store import Store
from kvprefetch.shmring.protocol import FlagState
from tests.daemon.fake_engine import FakeEngine, wait_for
from tests.daemon.stores import blocks, stored

Serve = Callable[..., Daemon]
PREFIX = "model@tp_rank:0@"


@pytest.fixture
def cluster() -> Iterator[Store]:
    with Store(memory="64 MB", owners=2) as store:
        yield store


@pytest.fixture
def reader(cluster: Store) -> Iterator[Reader]:
    with Reader(cluster.config) as reader:
        reader.digests(["nothing"])  # it has joined
        yield reader


class Pair:
    """An owner with two blocks, and an engine unlike it, of another daemon, that found nobody's name."""

    def __init__(self, serve: Serve, cluster: Store, reader: Reader) -> None:
        self.daemons = [serve(memory=None, mooncake_config=cluster.config) for _ in range(2)]
        self.owner = FakeEngine(self.daemons[0].socket, engine_id="owner", fingerprint={"weights": "a"})
        self.owner.save(blocks("before", 2))
        stored(self.daemons[0], 2)
        reader.ask({"op": "remove", "keys": [PREFIX + "fingerprint"]})
        self.unlike = FakeEngine(self.daemons[1].socket, engine_id="unlike", fingerprint={"weights": "b"})
        wait_for(lambda: reader.digests([PREFIX + "fingerprint"]) != [None], what="its claim")


def gets_nothing(engine: FakeEngine, digests: Iterable[bytes]) -> bool:
    """Whether a request with these is a miss, or void because the namespace was found to be another's."""
    flag = engine.settled(engine.hint(list(digests)))
    return flag.state == FlagState.EXPIRED or flag.count == 0


def test_what_the_former_owner_saves_before_it_looks_again_is_not_stored(
    serve: Serve, cluster: Store, reader: Reader
) -> None:
    pair = Pair(serve, cluster, reader)
    values = blocks("after", 3)
    pair.owner.save(values)
    line = pair.daemons[0].wait_record("namespace.refused")
    assert line is not None
    assert line["differences"] == "weights=b here=a"
    assert gets_nothing(pair.unlike, values)
    assert reader.digests([PREFIX + digest.hex() for digest in values]) == [None] * 3


def test_what_another_stored_meanwhile_is_not_loaded_by_the_former_owner(
    serve: Serve, cluster: Store, reader: Reader
) -> None:
    pair = Pair(serve, cluster, reader)
    values = blocks("after", 3)
    pair.unlike.save(values)
    stored(pair.daemons[1], 3)
    assert gets_nothing(pair.owner, values)
    assert pair.daemons[0].wait_record("namespace.refused") is not None
    assert pair.unlike.load(list(values)) == list(values.values())


def test_when_the_master_forgot_everything_the_former_owner_gives_way_to_who_came_first(
    serve: Serve, cluster: Store
) -> None:
    """Restarted, with all that was stored gone; the owner's daemon is stopped meanwhile, and finds out by saving."""
    one, two = (serve(memory=None, mooncake_config=cluster.config) for _ in range(2))
    owner = FakeEngine(one.socket, engine_id="owner", fingerprint={"weights": "a"})
    owner.save(blocks("before", 2))
    stored(one, 2)
    values, theirs = blocks("after", 3), blocks("theirs", 3)
    with frozen(one.pid):
        cluster.kill_master()
        cluster.start_master()
        unlike = FakeEngine(two.socket, engine_id="unlike", fingerprint={"weights": "b"})
        unlike.save(theirs)
        stored(two, 3)
        owner.save(values)
    assert gets_nothing(owner, theirs)
    line = one.wait_record("namespace.refused", timeout_s=30)
    assert line is not None
    assert line["differences"] == "weights=b here=a"
    wait_for(lambda: sum(each["failed_blocks"] for each in one.records("save.done")) >= 3, what="its saves' end")
    assert gets_nothing(unlike, values)
    assert unlike.load(list(theirs)) == list(theirs.values())


def test_who_only_reads_leaves_the_namespace_to_who_saves(serve: Serve, cluster: Store, reader: Reader) -> None:
    one, two = (serve(memory=None, mooncake_config=cluster.config) for _ in range(2))
    consumer = FakeEngine(one.socket, engine_id="consumer", fingerprint={"weights": "b"}, saves=False)
    assert consumer.load(list(blocks("a", 1))) is None
    assert reader.digests([PREFIX + "fingerprint"]) == [None]
    producer = FakeEngine(two.socket, engine_id="producer", fingerprint={"weights": "a"})
    values = blocks("a", 2)
    producer.save(values)
    stored(two, 2)
    assert gets_nothing(consumer, list(values)[1:]), "the first one is a known miss"
    line = one.wait_record("namespace.refused")
    assert line is not None
    assert line["differences"] == "weights=a here=b"
    assert producer.load(list(values)) == list(values.values())
    assert not two.records("namespace.refused")
