"""The negative caches: known misses, for as long as their kind lasts, and what engines store meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.daemon.engine.neighbours import NegativeCaches
from kvprefetch.daemon.planning.negative import LASTING_NS, MAX_ENTRIES, MISS_NS, NegativeCache


def test_a_foreign_object_stays_known_after_we_stored_the_key() -> None:
    cache = NegativeCache()
    cache.add(b"foreign", 0, lasting=True)
    cache.add(b"miss", 0)
    cache.stored([b"foreign", b"miss"], 0)
    assert cache.first([b"miss", b"foreign"], 1) == 1
    assert cache.first([b"foreign"], LASTING_NS) == 1
    cache.add(b"foreign", 0, lasting=True)
    cache.add(b"foreign", 0)
    assert cache.first([b"foreign"], MISS_NS) == 0, "a look-up that misses it meanwhile makes it no plain miss"
    cache.clear(5)
    assert cache.first([b"foreign"], 1) == 1
    cache.add(b"foreign", 6, asked_ns=5, lasting=True)
    assert cache.first([b"foreign"], 7) == 1, "the store was asked for an older key"
    cache.add(b"foreign", 7, asked_ns=6)
    assert cache.first([b"foreign"], 8) == 0


def test_what_an_engine_stores_is_no_plain_miss_to_its_neighbours() -> None:
    caches = NegativeCaches()
    one, neighbour, stranger = (caches.join(names) for names in (["a", "b"], ["b", "c"], ["c"]))
    for cache in (one, neighbour, stranger):
        cache.add(b"miss", 0)
        cache.add(b"foreign", 0, lasting=True)
    caches.stored(one, [b"miss", b"foreign"], 1)
    assert [cache.first([b"miss"], 2) for cache in (one, neighbour, stranger)] == [1, 1, 0]
    assert [cache.first([b"foreign"], 2) for cache in (one, neighbour, stranger)] == [0, 0, 0], "each engine's own"
    caches.leave(one)
    caches.leave(stranger)
    neighbour.add(b"miss", 2)
    caches.stored(neighbour, [b"miss"], 3)
    assert neighbour.first([b"miss"], 4) == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3 * MISS_NS), st.booleans())), st.integers(0, 3 * MISS_NS))
def test_the_cache_knows_exactly_what_is_young(entries: list[tuple[int, int, bool]], now: int) -> None:
    cache = NegativeCache()
    until = dict.fromkeys(range(10), -1)
    lasting: set[int] = set()
    for digest, at, long in sorted(entries, key=lambda entry: entry[1]):
        lasting |= {digest} if long else set()
        cache.add(bytes([digest]), at, lasting=long)
        until[digest] = at + (LASTING_NS if digest in lasting else MISS_NS)
    known = [digest for digest in range(10) if until[digest] > now]
    assert cache.first([bytes([digest]) for digest in range(10)], now) == min(known, default=10)


def test_the_cache_is_bounded() -> None:
    cache = NegativeCache()
    for number in range(MAX_ENTRIES + 10):
        cache.add(number.to_bytes(4, "big"), 0)
    assert len(cache) == MAX_ENTRIES
    cache.stored((number.to_bytes(4, "big") for number in range(MAX_ENTRIES + 10)), 2)
    first, last = ((number).to_bytes(4, "big") for number in (0, MAX_ENTRIES + 9))
    for each in (first, last):
        cache.add(each, 3, asked_ns=1)
    assert [cache.first([each], 4) for each in (first, last)] == [0, 1], "the oldest puts are forgotten"
