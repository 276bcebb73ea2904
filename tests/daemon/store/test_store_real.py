"""The Mooncake client before a real store: what a put, a get and a removal may be believed to have done."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.embedded import EmbeddedMaster
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.store.settings import MooncakeSettings
from tests.lab import control
from tests.lab.process import free_ports, frozen
from tests.lab.store import Store as LabStore
from tests.support.waiting import eventually

BLOCK = 65536
PAGE = 4096


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
    assert store.media(["p@00", "p@01"]) == ["memory", None]
    assert store.media(["p@00", "p@01"], BLOCK) == ["memory", None]
    assert store.media(["p@01", "p@00"], BLOCK // 2) == [None, None]
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
    assert store.remove_matching(["a.b-c/d@x:1@", "none(+)@"], 5.0) == (True, 2)
    assert store.remove_matching(["a.b-c/d@x:1@"], 5.0) == (True, 0)
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
        area[:] = b"a" * PAGE  # a page of zeros is no KV
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
            eventually(lambda: store._puts, what="the put")
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


class RemovedWhileRead:
    """A client from which `remove` takes something during each get, after the bytes were copied."""

    def __init__(self, client: Any, remove: Callable[[], None]) -> None:
        self._client, self._remove = client, remove

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def batch_get_into(self, *arguments: Any) -> list[int]:
        codes: list[int] = self._client.batch_get_into(*arguments)
        self._remove()
        return codes


def test_should_not_count_what_another_client_of_an_embedded_master_removed_while_it_was_read(tmp_path: Path) -> None:
    """One with a port that was told: others may know it. Its own memory, too, holds other values after a removal."""
    pytest.importorskip("mooncake")
    (port,) = free_ports(1)
    master = EmbeddedMaster(16 << 20, None, structlog.get_logger(), master_port=port)
    store = Store(master.start(), structlog.get_logger())
    store.open()
    config = tmp_path / "mooncake.json"
    config.write_text(json.dumps({"metadata_server": "P2PHANDSHAKE", "master_server_address": f"127.0.0.1:{port}",
                                  "protocol": "tcp", "device_name": ""}))  # fmt: skip
    area = mmap.mmap(-1, PAGE)
    area[:] = b"a" * PAGE
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    store.register(base, PAGE)
    try:
        store.put_from(["torn@00", "kept@00"], [base] * 2, [PAGE] * 2)
        assert store.get_into(["torn@00"], [base], [PAGE]) == [ErrorClass.OK]
        store._client = RemovedWhileRead(store._client, lambda: control.remove(config, ["torn@00"]))
        assert store.get_into(["torn@00"], [base], [PAGE]) == [ErrorClass.MISS]
        store._client = store._client._client
        assert store.get_into(["kept@00"], [base], [PAGE]) == [ErrorClass.OK]
    finally:
        store.unregister(base)
        store.close()
        master.stop()
