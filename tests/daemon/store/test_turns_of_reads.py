"""Reads that wait for their turn, and what changed before they begin. Here they nest, as they overlap on threads."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.store.storage_nodes import Get
from tests.daemon.store.sleeping import SIZE, Sleeper, made, opened

SLOW_NS = 300_000_000  # for one value, which is more than a lease


@pytest.fixture
def sleeper() -> Sleeper:
    model = made("a")
    for number in range(4):
        model.put(f"k{number}", b"k" * SIZE, ("a", number * 2 * SIZE))
    return Sleeper(model)


def test_a_read_whose_lease_ends_before_its_turn_never_begins(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, results = sleeper.model, list[ErrorClass]()
    store = opened(model, monkeypatch, sleeper)
    sleeper.steps = [lambda: setattr(model.clock, "ns", model.clock.ns + SLOW_NS)]
    store.get_into(["k0"], [0], [SIZE])  # the pace becomes known
    sleeper.steps = [lambda: results.extend(store.get_into(["k2"], [2 * SIZE], [SIZE]))]
    store.get_into(["k1"], [SIZE], [SIZE])
    assert results == [ErrorClass.LOOKUP_AGAIN]
    assert model.begun == 2, "its bytes would only have delayed others"


def test_a_read_that_is_dropped_before_its_turn_never_begins_and_its_node_is_not_blamed(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, results, get = sleeper.model, list[ErrorClass](), Get()
    store = opened(model, monkeypatch, sleeper)
    sleeper.steps = [lambda: setattr(model.clock, "ns", model.clock.ns + SLOW_NS // 10)]
    store.get_into(["k0"], [0], [SIZE])

    def drop() -> None:
        assert not get.begun
        get.dropped = True

    sleeper.steps = [lambda: results.extend(store.get_into(["k2"], [2 * SIZE], [SIZE], get)), drop]
    store.get_into(["k1"], [SIZE], [SIZE])
    assert results == [ErrorClass.LOOKUP_AGAIN]
    assert (model.begun, get.begun, store.aside) == (2, False, frozenset())
    assert store.get_into(["k3"], [3 * SIZE], [SIZE]) == [ErrorClass.OK]


def test_a_read_that_is_dropped_as_it_begins_comes(sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch) -> None:
    model, get = sleeper.model, Get()
    store = opened(model, monkeypatch, sleeper)
    model.on_begin = lambda: setattr(get, "dropped", get.begun)
    assert store.get_into(["k0"], [0], [SIZE], get) == [ErrorClass.OK]
    assert get.dropped
    get = Get()
    store.get_into(["gone"], [0], [SIZE], get)
    assert model.blocking == [["gone"]]
    assert get.begun, "by Mooncake's own get"


def test_a_node_that_failed_while_a_read_waited_is_probed_before_it_begins(
    sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, results = sleeper.model, list[ErrorClass]()
    store = opened(model, monkeypatch, sleeper)
    sleeper.steps = [lambda: setattr(model.clock, "ns", model.clock.ns + SLOW_NS // 10)]
    store.get_into(["k0"], [0], [SIZE])

    def waits() -> None:
        results.extend(store.get_into(["k2"], [2 * SIZE], [SIZE]))

    def fails() -> None:
        model.nodes["a"].state = "dead"
        results.extend(store.get_into(["k3"], [3 * SIZE], [SIZE]))
        model.nodes["a"].state = "stopped"
        model.known.clear()  # the engine asks it anew, and waits

    sleeper.steps = [waits, fails]
    store.get_into(["k1"], [SIZE], [SIZE])
    assert results == [ErrorClass.TRANSFER, ErrorClass.TRANSFER]
