"""The Mooncake client's border: classes of codes, guards and the breaker."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from kvprefetch.daemon.store.breaker import Breaker
from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.errors import ErrorClass, StoreUnavailable, classify
from kvprefetch.daemon.store.joining import Joined
from kvprefetch.daemon.store.settings import MooncakeSettings
from kvprefetch.daemon.store.storage_nodes import PAUSE_S
from tests.support.clock import Clock
from tests.support.waiting import eventually

SETTINGS = MooncakeSettings("P2PHANDSHAKE", "127.0.0.1:1", "tcp", "", 0, "default")


class Replica:
    """In memory at `address`, or on a disk."""

    def __init__(self, address: int | None) -> None:
        self.buffer_descriptor = SimpleNamespace(transport_endpoint="there", buffer_address=address, size=8)

    def is_memory_replica(self) -> bool:
        return self.buffer_descriptor.buffer_address is not None

    def get_memory_descriptor(self) -> Replica:
        return self


class FakeClient:
    """Gives planned answers, counts calls, and can hold one in flight."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.replicas: dict[str, list[int | None]] = {}  # of keys that do not lie at 0
        self.size = -704
        self.calls = 0
        self.closed = 0
        self.registered: list[int] = []
        self.hold: threading.Event | None = None
        self.entered = threading.Event()

    def _answer(self, *_: Any) -> list[int]:
        self.calls += 1
        self.entered.set()
        if self.hold:
            self.hold.wait(5)
        assert not self.closed, "a call after close is a segmentation fault"
        return self.codes

    batch_is_exist = batch_get_into = batch_put_from = _answer

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force
        return self.codes or [0] * len(keys)

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Replica]]:
        return {key: [Replica(address) for address in self.replicas.get(key, [0])] for key in keys}

    def register_buffer(self, address: int, _: int) -> int:
        self.registered.append(address)
        return 0

    def unregister_buffer(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def get_size(self, _: str) -> int:
        return self.size

    def close(self) -> int:
        self.closed += 1
        return 0


def opened(clock: Clock | None = None, settings: MooncakeSettings = SETTINGS) -> tuple[Store, FakeClient]:
    """A store that believes it is open, on a fake client."""
    store = Store(settings, structlog.get_logger(), clock=(clock or Clock()).now_s)
    client = FakeClient()
    store.adopt(Joined(client))
    return store, client


def unavailable(store: Store) -> bool:
    try:
        store.exist(["k"])
    except StoreUnavailable:
        return True
    return False


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0, ErrorClass.OK),
        (-704, ErrorClass.MISS),
        (-703, ErrorClass.RETRY),
        (-900, ErrorClass.TRANSIENT),
        (-1101, ErrorClass.TRANSFER),
        (-1399, ErrorClass.TRANSFER),
        (-200, ErrorClass.NO_SPACE),
        (-31337, ErrorClass.TRANSIENT),
    ],
)
def test_should_classify_codes(code: int, kind: ErrorClass) -> None:
    assert classify(code) is kind


def test_should_refuse_every_call_before_open_and_after_close() -> None:
    store = Store(SETTINGS, structlog.get_logger())
    for _ in range(2):
        for call in (
            lambda: store.exist(["k"]),
            lambda: store.get_into(["k"], [0], [1]),
            lambda: store.put_from(["k"], [0], [1]),
            lambda: store.media(["k"]),
            lambda: store.register(0, 1),
            lambda: store.unregister(0),
        ):
            with pytest.raises(StoreUnavailable):
                call()
        store.close()


def test_should_close_once_and_only_after_calls_in_flight() -> None:
    store, client = opened()
    client.codes, client.hold = [1], threading.Event()
    caller = threading.Thread(target=store.exist, args=(["k"],))
    caller.start()
    assert client.entered.wait(5)
    closer = threading.Thread(target=store.close)
    closer.start()
    eventually(lambda: not store.answering, what="the refusal")
    assert client.closed == 0
    assert unavailable(store)
    client.hold.set()
    closer.join(5)
    caller.join(5)
    store.close()
    assert client.closed == 1


def test_should_fail_fast_for_growing_intervals_and_let_one_probe_through() -> None:
    clock = Clock()
    store, client = opened(clock)
    client.codes = [-900]
    for pause in (0.5, 1, 2, 4, 8, 10, 10):
        calls = client.calls
        assert unavailable(store)
        assert client.calls == calls + 1
        clock.advance_ms(1000 * (pause - 0.01))
        assert unavailable(store)
        assert client.calls == calls + 1, "no call may pass while the breaker is open"
        clock.advance_ms(20)
    client.codes = [1]
    assert store.exist(["k"]) == [True]
    assert store.exist(["k"]) == [True]


def test_calls_that_fail_together_are_one_failure() -> None:
    clock = Clock()
    breaker = Breaker(clock.now_s)
    calls = [breaker.begin() for _ in range(8)]
    assert [breaker.failed(call) for call in calls] == [0.5] * 8
    clock.advance_ms(501)
    probe = breaker.begin()
    assert probe is not None and probe.probe  # noqa: PT018
    breaker.failed(calls[0])
    assert breaker.failed(probe) == 1.0


@pytest.mark.parametrize("code", [-800, -900, -901])
def test_should_not_blame_the_master_for_an_owner_or_a_disk_that_does_not_answer(code: int) -> None:
    """A disk that hangs ends a get with -901, as a master that is away does; the master is asked which it was."""
    clock = Clock()
    store, client = opened(clock)
    client.codes, client.size = [code], 8
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.TRANSFER]
    client.codes = [1]
    assert store.exist(["k"]) == [True], "the breaker is closed"
    clock.advance_ms(1000 * PAUSE_S[0])  # the node is put aside as long
    client.codes, client.size = [code], -900
    with pytest.raises(StoreUnavailable):
        store.get_into(["k"], [0], [8])


def test_should_not_open_the_breaker_for_a_call_that_began_before_one_that_worked() -> None:
    store, client = opened()
    client.codes, client.hold = [-900], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(store.exist, ["k"])
        assert client.entered.wait(5)
        held, client.hold = client.hold, None
        client.codes = [1]
        assert store.exist(["k"]) == [True]
        client.codes = [-900]
        held.set()
        with pytest.raises(StoreUnavailable):
            hung.result(5)
    assert store.answering
    assert unavailable(store)
    assert not store.answering, "none worked since this one began"


def test_should_register_memory_while_the_breaker_is_open() -> None:
    """Engines come and go while the store is away."""
    store, client = opened()
    client.codes = [-900]
    assert unavailable(store)
    store.register(4096, 1)
    store.unregister(4096)
    assert client.registered == []
    assert unavailable(store)


def test_should_not_open_the_breaker_for_a_foreign_or_partly_failed_batch() -> None:
    store, client = opened()
    client.codes, client.size = [-800], 7
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.FOREIGN]
    client.codes, client.size = [-900, 8], -900
    assert store.get_into(["a", "b"], [0, 8], [8, 8]) == [ErrorClass.TRANSIENT, ErrorClass.OK]
    client.codes = [4]
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.FOREIGN]
    assert store.answering


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ([1], [1], ErrorClass.OK),
        ([1], [2, 1], ErrorClass.OK),
        ([None], [None, 2], ErrorClass.OK),
        ([1], [], ErrorClass.MISS),
        ([1], [2], ErrorClass.LOOKUP_AGAIN),
        ([], [2], ErrorClass.LOOKUP_AGAIN),
    ],
)
def test_a_value_that_did_not_stay_where_it_was_does_not_count(
    before: list[int | None], after: list[int | None], kind: ErrorClass
) -> None:
    store, client = opened()
    client.codes, client.hold = [8, 8], threading.Event()
    client.replicas = {"moved": before}
    with ThreadPoolExecutor(1) as pool:
        get = pool.submit(store.get_into, ["stays", "moved"], [0, 8], [8, 8])
        assert client.entered.wait(5)
        client.replicas = {"moved": after}
        client.hold.set()
        assert get.result(5) == [ErrorClass.OK, kind]


def test_what_was_read_from_our_own_memory_while_something_was_removed_does_not_count() -> None:
    store, client = opened(settings=replace(SETTINGS, private=True))
    client.codes, client.hold = [8], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        get = pool.submit(store.get_into, ["k"], [0], [8])
        assert client.entered.wait(5)
        client.codes, read = [0], client.codes
        assert store.remove(["other@"]) == (1, 0)
        client.codes = read
        client.hold.set()
        assert get.result(5) == [ErrorClass.LOOKUP_AGAIN]
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.OK]


def test_a_value_lies_in_memory_before_disk_and_one_of_another_size_nowhere() -> None:
    store, client = opened()
    client.replicas = {"both": [None, 0], "disk": [None], "nowhere": []}
    assert store.media(["both", "disk", "nowhere"]) == ["memory", "disk", None]
    assert store.media(["both", "disk", "nowhere"], 8) == ["memory", "disk", None]
    assert store.media(["both", "disk", "nowhere"], 16) == [None, "disk", None]


def test_a_key_that_exists_keeps_its_value_and_a_put_that_finds_no_space_is_no_failure_of_the_store() -> None:
    store, client = opened()
    client.codes = [0, -705, -200]
    results = store.put_from(["new", "there", "full"], [0, 8, 16], [8, 8, 8])
    assert results == [ErrorClass.OK, ErrorClass.OK, ErrorClass.NO_SPACE]
    client.codes = [-200]
    assert store.put_from(["full"], [16], [8]) == [ErrorClass.NO_SPACE]
    assert store.answering


def test_what_was_put_counts_as_flushed_once_it_lies_on_a_disk_or_nowhere() -> None:
    store, client = opened(settings=replace(SETTINGS, enable_ssd_offload=True))
    client.codes = [0, 0, -900]
    keys = ["disk", "gone", "not put"]
    store.put_from(keys, [0, 8, 16], [8, 8, 8])
    client.codes = [0]
    cases: Any = ((([0], [0]), False), (([0, None], [0]), False), (([None], []), True))
    for replicas, flushed in cases:
        client.replicas = dict(zip(keys, replicas, strict=False))
        assert store.flush(0.0) is flushed


def test_a_removal_says_how_many_values_are_left_and_makes_the_store_no_suspect() -> None:
    """It is an operator's, and may meet a master that is busy with it."""
    store, client = opened()
    client.codes = [0, -704, -901]
    assert store.remove(["gone", "was gone", "left"]) == (1, 1)
    client.codes = [-900]
    assert store.remove(["left"]) == (0, 1)
    assert store.answering


def test_a_store_that_failed_is_asked_by_a_probe_and_by_no_request() -> None:
    clock = Clock()
    store, client = opened(clock)
    assert store.answering
    store.suspect("look_up")
    assert not store.answering
    assert not store.due_for_probe
    clock.advance_ms(600)
    assert store.due_for_probe
    client.codes = [-900]
    store.probe()
    assert not store.answering
    assert not store.due_for_probe, "a longer pause"
    clock.advance_ms(1100)
    client.codes = [0]
    store.probe()
    assert store.answering


def test_a_store_that_nobody_asks_is_probed_every_ten_seconds() -> None:
    """Otherwise an idle daemon says "ready" while the cluster's master is dead."""
    clock = Clock()
    store, client = opened(clock)
    clock.advance_ms(9000)
    assert not store.due_for_probe
    client.codes = [0]
    assert store.exist(["k"]) == [False]
    clock.advance_ms(9000)
    assert not store.due_for_probe, "a call was made meanwhile"
    clock.advance_ms(1001)
    assert store.due_for_probe
    client.codes = [-900]
    store.probe()
    assert not store.answering
