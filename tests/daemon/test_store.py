"""The Mooncake client's border: classes of codes, settings, guards, the breaker, and a real store behind them."""

from __future__ import annotations

import ctypes
import json
import mmap
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from benchmarks.lab.process import frozen
from benchmarks.lab.store import Store as LabStore
from kvprefetch.daemon.store.client import Store, StoreError, StoreUnavailable
from kvprefetch.daemon.store.embedded import EmbeddedMaster
from kvprefetch.daemon.store.errors import ErrorClass, classify
from kvprefetch.daemon.store.settings import MooncakeSettings, SettingsError
from tests.daemon.fake_engine import wait_for

SETTINGS = MooncakeSettings("127.0.0.1", "P2PHANDSHAKE", "127.0.0.1:1", "tcp", "", 0, 16 << 20, "default")
BLOCK = 65536
PAGE = 4096


class Replica:
    """In memory at `address`, or on a disk."""

    def __init__(self, address: int | None) -> None:
        self.buffer_descriptor = SimpleNamespace(transport_endpoint="there", buffer_address=address)

    def is_memory_replica(self) -> bool:
        return self.buffer_descriptor.buffer_address is not None

    def get_memory_descriptor(self) -> Replica:
        return self


class FakeClient:
    """Answers what it is told to, counts calls, and can hold one in flight."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.places: dict[str, list[int | None]] = {}  # of keys that do not lie at 0
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

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[Replica]]:
        return {key: [Replica(address) for address in self.places.get(key, [0])] for key in keys}

    def remove_by_regex(self, *_: Any) -> int:
        return 0

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


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock | None = None, settings: MooncakeSettings = SETTINGS) -> tuple[Store, FakeClient]:
    """A store that believes it is open, on a fake client."""
    store = Store(settings, structlog.get_logger(), clock=clock or Clock())
    client = FakeClient()
    store._client, store._open = client, True
    return store, client


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (0, ErrorClass.OK),
        (65536, ErrorClass.OK),
        (-704, ErrorClass.MISS),
        (-703, ErrorClass.RETRY),
        (-707, ErrorClass.LOOKUP_AGAIN),
        (-900, ErrorClass.TRANSIENT),
        (-801, ErrorClass.CORRUPT),
        (-600, ErrorClass.BUG),
        (-200, ErrorClass.NO_SPACE),
        (-706, ErrorClass.WRITE),
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
            lambda: store.tiers(["k"]),
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
    wait_for(lambda: not store.answering, what="the refusal")
    assert client.closed == 0
    with pytest.raises(StoreUnavailable):
        store.exist(["k"])
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
        with pytest.raises(StoreUnavailable):
            store.exist(["k"])
        assert client.calls == calls + 1
        clock.now += pause - 0.01
        with pytest.raises(StoreUnavailable):
            store.exist(["k"])
        assert client.calls == calls + 1, "no call may pass while the breaker is open"
        clock.now += 0.02
    client.codes = [1]
    assert store.exist(["k"]) == [True]
    assert store.exist(["k"]) == [True]


@pytest.mark.parametrize("code", [-800, -900, -901])
def test_should_not_blame_the_master_for_an_owner_or_a_disk_that_does_not_answer(code: int) -> None:
    """A disk that hangs ends a get with -901, as a master that is away does; the master is asked which it was."""
    store, client = opened()
    client.codes, client.size = [code], 8
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.TRANSFER]
    client.codes = [1]
    assert store.exist(["k"]) == [True], "the breaker is closed"
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
    with pytest.raises(StoreUnavailable):
        store.exist(["k"])
    assert not store.answering, "none worked since this one began"


def test_should_register_memory_while_the_breaker_is_open() -> None:
    """Engines come and go while the store is away."""
    store, client = opened()
    client.codes = [-900]
    with pytest.raises(StoreUnavailable):
        store.exist(["k"])
    store.register(4096, 1)
    store.unregister(4096)
    assert client.registered == []
    with pytest.raises(StoreUnavailable):
        store.exist(["k"])


def test_should_not_open_the_breaker_for_a_foreign_or_partly_failed_batch() -> None:
    store, client = opened()
    client.codes, client.size = [-800], 7
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.FOREIGN]
    client.codes, client.size = [-900, 8], -900
    assert store.get_into(["a", "b"], [0, 8], [8, 8]) == [ErrorClass.TRANSIENT, ErrorClass.OK]
    client.codes = [4]
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.FOREIGN]
    client.codes, client.size = [-800], 8
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.TRANSFER], "one owner that does not deliver is not the store"
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
    client.places = {"moved": before}
    with ThreadPoolExecutor(1) as pool:
        get = pool.submit(store.get_into, ["stays", "moved"], [0, 8], [8, 8])
        assert client.entered.wait(5)
        client.places = {"moved": after}
        client.hold.set()
        assert get.result(5) == [ErrorClass.OK, kind]


def test_what_was_read_from_our_own_memory_while_something_was_removed_does_not_count() -> None:
    store, client = opened(settings=replace(SETTINGS, global_segment_size=16 << 20))
    client.codes, client.hold = [8], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        get = pool.submit(store.get_into, ["k"], [0], [8])
        assert client.entered.wait(5)
        assert store.remove_matching(["other@"], 1.0)
        client.hold.set()
        assert get.result(5) == [ErrorClass.LOOKUP_AGAIN]
    assert store.get_into(["k"], [0], [8]) == [ErrorClass.OK]


def test_a_store_that_failed_is_asked_by_a_probe_and_by_no_request() -> None:
    clock = Clock()
    store, client = opened(clock)
    assert store.answering
    store.suspect("look_up")
    assert not store.answering
    assert not store.due_for_probe
    clock.now += 0.6
    assert store.due_for_probe
    client.codes = [-900]
    store.probe()
    assert not store.answering
    assert not store.due_for_probe, "a longer pause"
    clock.now += 1.1
    client.codes = [0]
    store.probe()
    assert store.answering


def test_should_give_up_soon_on_a_master_that_accepts_and_says_nothing() -> None:
    pytest.importorskip("mooncake")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        store = Store(replace(SETTINGS, master_server_address=address), structlog.get_logger(), rpc_timeout_ms=1000)
        begun = time.monotonic()
        with pytest.raises(StoreError, match=f"set-up failed.*{address}"):
            store.open()
        assert time.monotonic() - begun < 15, "each of Mooncake's twenty tries waits, and holds the interpreter's lock"
        store.close()


def test_should_open_with_one_line_when_no_master_listens() -> None:
    pytest.importorskip("mooncake")
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1") as caught:
        Store(SETTINGS, structlog.get_logger()).open()
    assert "\n" not in str(caught.value)


def test_should_read_the_file_that_vllm_reads(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": "127.0.0.1:50051",
                "protocol": "tcp",
                "global_segment_size": "4GB",
                "local_buffer_size": "8 MB",
                "tenant_id": None,
            }
        )
    )
    assert MooncakeSettings.from_file(path) == MooncakeSettings(
        "127.0.0.1", "P2PHANDSHAKE", "127.0.0.1:50051", "tcp", "", 0, 8 << 20, "default"
    )


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"colour": "red"}, "colour='red'"),
        ({"protocol": 3}, "protocol=3"),
        ({"local_buffer_size": "4 XB"}, "local_buffer_size='4 XB'"),
        ({"local_buffer_size": 0}, "local_buffer_size=0"),
        ({"mode": "both"}, "mode='both'"),
        ({"mode": "standalone-store"}, "global_segment_size"),
        ({"enable_offload": "yes"}, "enable_offload='yes'"),
        ({"master_server_address": ""}, "master_server_address=''"),
        ({"master_server_address": "somewhere"}, "master_server_address='somewhere' must be host:port"),
        (
            {"master_server_address": "h:99999"},
            "master_server_address='h:99999' must be host:port, with a port of 1 to",
        ),
        ({"global_segment_size": float("inf")}, "global_segment_size=inf"),
        ({"local_buffer_size": float("nan")}, "local_buffer_size=nan"),
    ],
)
def test_should_refuse_a_wrong_setting_by_name(tmp_path: Path, change: dict[str, Any], names: str) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "127.0.0.1:1", **change}))
    with pytest.raises(SettingsError) as caught:
        MooncakeSettings.from_file(path)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_should_refuse_a_file_that_is_missing_or_no_object(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "mooncake.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError):
        MooncakeSettings.from_file(path)


def test_should_refuse_puts_that_nobody_acknowledges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "127.0.0.1:1"}))
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(SettingsError, match=r"^MC_TCP_PROTO=1: .*; unset it$"):
        MooncakeSettings.from_file(path)


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Store, int, mmap.mmap]]:
    """A store on a private master, and a registered area of 8 blocks."""
    pytest.importorskip("mooncake")
    master = EmbeddedMaster(16 << 20, None, structlog.get_logger())
    store = Store(master.start(), structlog.get_logger())
    store.open()
    area = mmap.mmap(-1, 8 * BLOCK)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    store.register(base, 8 * BLOCK)
    yield store, base, area
    store.unregister(base)
    store.close()
    master.stop()


def test_should_put_find_and_get_the_same_bytes(real: tuple[Store, int, mmap.mmap]) -> None:
    store, base, area = real
    area[:BLOCK] = b"a" * BLOCK
    assert store.put_from(["p@00"], [base], [BLOCK]) == [ErrorClass.OK]
    assert store.put_from(["p@00"], [base + BLOCK], [BLOCK]) == [ErrorClass.OK], "an existing key keeps its value"
    assert store.exist(["p@00", "p@01"]) == [True, False]
    assert store.tiers(["p@00", "p@01"]) == ["memory", None]
    assert store.tiers(["p@00", "p@01"], BLOCK) == ["memory", None]
    assert store.tiers(["p@01", "p@00"], BLOCK // 2) == [None, None]
    results = store.get_into(["p@00", "p@01"], [base + BLOCK, base + 2 * BLOCK], [BLOCK, BLOCK])
    assert results == [ErrorClass.OK, ErrorClass.MISS]
    assert area[BLOCK : 2 * BLOCK] == b"a" * BLOCK


def test_should_refuse_a_key_that_stands_twice_in_a_get(real: tuple[Store, int, mmap.mmap]) -> None:
    """Mooncake fills the last destination only, and says OK for both."""
    store, base, area = real
    area[: 3 * BLOCK] = b"d" * BLOCK + b"." * 2 * BLOCK
    store.put_from(["d@00"], [base], [BLOCK])
    twice = (["d@00"] * 2, [base + BLOCK, base + 2 * BLOCK], [BLOCK] * 2)
    with pytest.raises(ValueError, match="twice"):
        store.get_into(*twice)
    assert store._client.batch_get_into(*twice) == [BLOCK] * 2
    assert [area[BLOCK : BLOCK + 1], area[2 * BLOCK : 2 * BLOCK + 1]] == [b".", b"d"], "mended? then fetch() may use it"


@pytest.mark.parametrize("size", [BLOCK // 2, BLOCK * 2])
def test_should_tell_an_object_of_another_size(real: tuple[Store, int, mmap.mmap], size: int) -> None:
    store, base, _ = real
    store.put_from(["f@00"], [base], [BLOCK])
    assert store.get_into(["f@00"], [base + 2 * BLOCK], [size]) == [ErrorClass.FOREIGN]
    assert store.exist(["f@00"]) == [True]


def test_should_remove_leased_values_by_prefix_and_no_others(real: tuple[Store, int, mmap.mmap]) -> None:
    store, base, _ = real
    gone, kept = (
        ["a.b-c/d@x:1@00ff", "a.b-c/d@x:1@ff00"],
        ["aXb-c/d@x:1@00ff", "a.b-c/d@x:1@zz", "a.b-c/d@x:1@0z", "z@a.b-c/d@x:1@00"],
    )
    store.put_from(gone + kept, [base] * 6, [BLOCK] * 6)
    assert all(store.exist(gone + kept))
    assert store.remove_matching(["a.b-c/d@x:1@", "none(+)@"], 5.0)
    assert store.exist(gone + kept) == [False, False, True, True, True, True]


Joined = tuple[LabStore, Store, int]


@pytest.fixture
def joined() -> Iterator[Joined]:
    """A cluster whose memory another process owns, an open store in it, and the address of a registered page."""
    pytest.importorskip("mooncake")
    with LabStore(memory="64 MB") as cluster:
        store = Store(MooncakeSettings.from_file(cluster.config), structlog.get_logger())
        store.open()
        area = mmap.mmap(-1, PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(area))
        store.register(base, PAGE)
        yield cluster, store, base
        store.unregister(base)
        store.close()


def test_should_call_a_put_done_only_when_its_owner_has_the_bytes(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a reader could get what stood in that memory before; with MC_TCP_PROTO=1 it is so, which is refused."""
    cluster, store, base = joined
    assert store.put_from(["ack@00"], [base], [PAGE]) == [ErrorClass.OK], "connected"
    for protocol, early in (("2", False), ("1", True)):
        monkeypatch.setenv("MC_TCP_PROTO", protocol)
        with ThreadPoolExecutor() as pool:
            with frozen(cluster.owner_pid):
                put = pool.submit(store.put_from, [f"ack@0{protocol}"], [base], [PAGE])
                done, _ = wait([put], 30 if early else 1.5)
                assert bool(done) is early
            assert put.result(30) == [ErrorClass.OK]


def test_should_not_confirm_a_removal_before_a_put_that_hangs_has_returned(joined: Joined) -> None:
    """It brings its keys back: KV of old weights after a reset, when another epoch of its engine asks for that."""
    cluster, store, base = joined
    store.put_from(["m@00", "other@00"], [base] * 2, [PAGE] * 2)
    with ThreadPoolExecutor() as pool:
        with frozen(cluster.owner_pid):
            put = pool.submit(store.put_from, ["m@01"], [base], [PAGE])
            wait_for(lambda: store._puts, what="the put")
            assert store.remove_matching(["other@"], 1.0), "others do not wait"
            assert not store.remove_matching(["m@"], 1.0)
            assert not put.done()
        assert put.result(30) == [ErrorClass.OK]
    assert store.remove_matching(["m@"], 5.0)
    assert store.exist(["m@00", "m@01"]) == [False, False]


def test_should_not_count_what_it_read_while_the_value_was_removed(joined: Joined) -> None:
    """Its memory may hold another value by then: Mooncake says that all bytes arrived."""
    cluster, store, base = joined
    store.put_from(["torn@00"], [base], [PAGE])
    assert store.get_into(["torn@00"], [base], [PAGE]) == [ErrorClass.OK]
    with ThreadPoolExecutor() as pool:
        with frozen(cluster.owner_pid):
            get = pool.submit(store.get_into, ["torn@00"], [base], [PAGE])
            wait([get], 0.5)
            assert store.remove_matching(["torn@"], 5.0)
            assert not get.done()
        assert get.result(30) == [ErrorClass.MISS]
