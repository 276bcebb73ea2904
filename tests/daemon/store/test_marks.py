"""Whose a namespace is, in a real store: put by one of many, not evicted, and told from another without reading it."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import structlog

from benchmarks.lab import control
from benchmarks.lab.store import Store as LabStore
from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.embedded import EmbeddedMaster
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.store.marks import padded
from kvprefetch.daemon.store.settings import MooncakeSettings

pytest.importorskip("mooncake")

PAGE = 4096
KEY = "m@fingerprint"
A, B = b'{"weights":"a"}', b'{"weights":"b"}'
AREA = mmap.mmap(-1, PAGE)
AREA[:] = b"a" * PAGE  # a page of zeros is no KV
BASE = ctypes.addressof(ctypes.c_char.from_buffer(AREA))
Pair = tuple[LabStore, Store, Store]


def opened(settings: MooncakeSettings) -> Store:
    store = Store(settings, structlog.get_logger())
    store.open()
    store.register(BASE, PAGE)
    return store


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two clients of one cluster, as two daemons have them, with two owners of memory."""
    with LabStore(memory="32 MB", owners=2, lease_ms=500) as cluster:
        settings = MooncakeSettings.from_file(cluster.config)
        stores = opened(settings), opened(settings)
        yield cluster, *stores
        for store in stores:
            store.close()


@pytest.fixture(scope="module")
def private() -> Iterator[Store]:
    master = EmbeddedMaster(16 << 20, None, structlog.get_logger())
    store = opened(master.start())
    yield store
    store.close()
    master.stop()


def test_of_two_that_put_at_once_both_find_the_same(pair: Pair) -> None:
    """One that finds nothing asks again: the other's value is on its way."""
    _, *stores = pair
    barrier = Barrier(2)

    def found(number: int, which: int) -> bytes:
        barrier.wait()
        while not (value := stores[which].put_once(f"race{number}@fingerprint", (A, B)[which]).value):
            pass
        return value.rstrip()

    first = {A: 0, B: 0}
    with ThreadPoolExecutor(2) as pool:
        for number in range(100):
            one, other = (pool.submit(found, number, which) for which in (0, 1))
            assert one.result() == other.result()
            first[one.result()] += 1
    assert all(first.values()), "or they never met"


def test_it_outlives_values_that_the_store_evicts_and_goes_with_its_namespace(pair: Pair) -> None:
    _, store, other = pair
    mark = store.put_once(KEY, A).mark
    keys = [f"filler@{number:08x}" for number in range(40_000)]
    for start in range(0, len(keys), 500):  # 160 MB into 64
        part = keys[start : start + 500]
        while ErrorClass.NO_SPACE in store.put_from(part, [BASE] * len(part), [PAGE] * len(part)):
            pass
    assert not all(store.exist(keys))
    assert other.unchanged(mark)
    assert other.put_once(KEY, B).value.rstrip() == A
    assert other.remove_matching(["m@"], 10.0)
    assert not store.unchanged(mark)
    assert store.remove_matching(["filler@"], 10.0)


def test_a_get_does_not_count_once_another_has_the_namespace(pair: Pair) -> None:
    cluster, store, other = pair
    nothing = other.put_once(KEY, b"")
    assert (nothing.value, nothing.there, other.unchanged(nothing.mark)) == (b"", False, True)
    mine = store.put_once(KEY, A).mark
    assert not other.unchanged(nothing.mark)
    store.put_from(["m@00"], [BASE], [PAGE])
    assert store.get_into(["m@00"], [BASE], [PAGE], None, mine) == [ErrorClass.OK]
    control.remove(cluster.config, [KEY])
    assert store.get_into(["m@00"], [BASE], [PAGE], None, mine) == [ErrorClass.DOUBT]
    theirs = other.put_once(KEY, B).mark
    assert store.get_into(["m@00", "m@01"], [BASE] * 2, [PAGE] * 2, None, mine) == [ErrorClass.DOUBT, ErrorClass.MISS]
    assert store.get_into(["m@00"], [BASE], [PAGE], None, theirs) == [ErrorClass.OK]
    store.discard(["m@00"])
    assert other.exist(["m@00"]) == [False]


def test_in_a_store_of_our_own_a_removal_and_a_put_tell(private: Store) -> None:
    nothing = private.put_once(KEY, b"").mark
    assert private.unchanged(nothing)
    mine = private.put_once(KEY, A).mark
    assert not private.unchanged(nothing)
    private.put_once("another@fingerprint", A)
    private.put_from(["m@00"], [BASE], [PAGE])
    assert private.get_into(["m@00"], [BASE], [PAGE], None, mine) == [ErrorClass.OK]
    assert private.remove_matching(["m@"], 5.0)
    assert not private.unchanged(mine)
    assert private.put_once(KEY, B).value.rstrip() == B
    private.put_from(["m@00"], [BASE], [PAGE])
    assert private.get_into(["m@00"], [BASE], [PAGE], None, mine) == [ErrorClass.DOUBT]


def test_what_is_there_and_cannot_be_read_is_told_from_nothing(pair: Pair) -> None:
    """Here it is larger than the client's own buffer."""
    cluster, store, _ = pair
    key = "large@fingerprint"
    control.put(cluster.config, {key: bytes(20 << 20)}, cluster.segments[0])
    found = store.put_once(key, A)
    assert (found.value, found.there) == (b"", True)
    control.remove(cluster.config, [key])


def test_the_size_follows_from_the_value_and_differs_from_those_of_others() -> None:
    values = [b'{"weights":"%x"}' % random.getrandbits(64) for _ in range(200)]
    assert all(padded(value).rstrip() == value for value in values)
    assert padded(A) == padded(A)
    assert len({len(padded(value)) for value in values}) > 180


def test_what_is_removed_of_another_namespace_is_no_doubt_for_this_one(private: Store) -> None:
    """Its next get would count for nothing, and with a disk tier a removal goes on for seconds."""
    kept, emptied = (private.put_once(f"{name}@fingerprint", A).mark for name in ("kept", "emptied"))
    assert private.put_from(["kept@01"], [BASE], [PAGE]) == [ErrorClass.OK]
    assert private.remove_matching(["emptied@"], timeout_s=10)
    private.discard(["kept@02"])
    assert private.unchanged(kept)
    assert not private.unchanged(emptied)
    assert private.get_into(["kept@01"], [BASE], [PAGE], None, kept) == [ErrorClass.OK]
    assert private.get_into(["kept@01"], [BASE], [PAGE], None, emptied) == [ErrorClass.DOUBT]
