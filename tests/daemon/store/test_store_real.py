"""The Mooncake client before a real store: what a put, a get and a removal may be believed to have done."""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog

from kvprefetch.daemon.store import connection, joining
from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.embedded import EmbeddedMaster
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.store.settings import MooncakeSettings
from tests.lab import control
from tests.lab.process import free_ports, frozen
from tests.lab.store import Store as LabStore

pytestmark = pytest.mark.store

BLOCK = 65536
PAGE = 4096


class Spied:
    """A real client, and what else happens during each get, after the bytes were copied."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.after_get: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def batch_get_into(self, *arguments: Any) -> list[int]:
        codes: list[int] = self.client.batch_get_into(*arguments)
        self.after_get()
        return codes


class Opened(NamedTuple):
    """An open store, its client, and a registered area that is no page of zeros, which no KV is."""

    store: Store
    client: Spied
    base: int
    area: mmap.mmap


@contextmanager
def opened(settings: MooncakeSettings, size: int) -> Iterator[Opened]:
    clients: list[Spied] = []

    def join(*arguments: Any) -> joining.Joined:
        joined = joining.join(*arguments)
        clients.append(Spied(joined.client))
        return joined._replace(client=clients[-1])

    store = Store(settings, structlog.get_logger())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "join", join)
        store.open()
    area = mmap.mmap(-1, size)
    area[:] = b"a" * size
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    store.register(base, size)
    yield Opened(store, clients[0], base, area)
    store.unregister(base)
    store.close()


@contextmanager
def embedded(size: int, port: int | None = None) -> Iterator[Opened]:
    pytest.importorskip("mooncake")
    master = EmbeddedMaster(16 << 20, None, structlog.get_logger(), master_port=port)
    with opened(master.start(), size) as made:
        yield made
    master.stop()


@pytest.fixture(scope="module")
def real() -> Iterator[Opened]:
    """A store on a private master, and an area of 8 blocks."""
    with embedded(8 * BLOCK) as made:
        yield made


def test_should_put_find_and_get_the_same_bytes(real: Opened) -> None:
    store, _, base, area = real
    assert store.put_from(["p@00"], [base], [BLOCK]) == [ErrorClass.OK]
    assert store.put_from(["p@00"], [base + BLOCK], [BLOCK]) == [ErrorClass.OK], "an existing key keeps its value"
    assert store.exist(["p@00", "p@01"]) == [True, False]
    assert store.media(["p@00", "p@01"]) == ["memory", None]
    assert store.media(["p@00", "p@01"], BLOCK) == ["memory", None]
    assert store.media(["p@01", "p@00"], BLOCK // 2) == [None, None]
    results = store.get_into(["p@00", "p@01"], [base + BLOCK, base + 2 * BLOCK], [BLOCK, BLOCK])
    assert results == [ErrorClass.OK, ErrorClass.MISS]
    assert area[BLOCK : 2 * BLOCK] == b"a" * BLOCK


def test_should_refuse_a_key_that_stands_twice_in_a_get(real: Opened) -> None:
    """Mooncake 0.3.13 fills the last destination only, and says OK for both; 0.3.14 fills both."""
    with pytest.raises(ValueError, match="twice"):
        real.store.get_into(["d@00"] * 2, [real.base, real.base + BLOCK], [BLOCK] * 2)


@pytest.mark.parametrize("size", [BLOCK // 2, BLOCK * 2])
def test_should_tell_an_object_of_another_size(real: Opened, size: int) -> None:
    store, _, base, _ = real
    store.put_from(["f@00"], [base], [BLOCK])
    assert store.get_into(["f@00"], [base + 2 * BLOCK], [size]) == [ErrorClass.FOREIGN]
    assert store.exist(["f@00"]) == [True]


Joined = tuple[LabStore, Store, int]


@pytest.fixture
def joined() -> Iterator[Joined]:
    """A cluster whose memory another process holds, an open store in it, and the address of a registered page."""
    pytest.importorskip("mooncake")
    with LabStore(memory="64 MB") as cluster, opened(MooncakeSettings.from_file(cluster.config), PAGE) as made:
        yield cluster, made.store, made.base


def test_should_call_a_put_done_only_when_its_owner_has_the_bytes(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a reader could get what stood in that memory before; with MC_TCP_PROTO=1 it is so, which is refused."""
    cluster, store, base = joined
    assert store.put_from(["ack@00"], [base], [PAGE]) == [ErrorClass.OK], "connected"
    for protocol, early in (("2", False), ("1", True)):
        monkeypatch.setenv("MC_TCP_PROTO", protocol)
        with ThreadPoolExecutor() as pool:
            with frozen(cluster.node_pid):
                put = pool.submit(store.put_from, [f"ack@0{protocol}"], [base], [PAGE])
                done, _ = wait([put], 30 if early else 1.5)
                assert bool(done) is early
            assert put.result(30) == [ErrorClass.OK]


def test_should_not_count_what_another_client_of_an_embedded_master_removed_while_it_was_read(tmp_path: Path) -> None:
    """Others may know a port that is configured. Our own memory, too, holds other values after a removal."""
    (port,) = free_ports(1)
    config = tmp_path / "mooncake.json"
    cluster = {"metadata_server": "P2PHANDSHAKE", "master_server_address": f"127.0.0.1:{port}", "protocol": "tcp"}
    config.write_text(json.dumps({**cluster, "device_name": ""}))
    with embedded(PAGE, port) as (store, client, base, _):
        store.put_from(["torn@00", "kept@00"], [base] * 2, [PAGE] * 2)
        assert store.get_into(["torn@00"], [base], [PAGE]) == [ErrorClass.OK]
        client.after_get = lambda: control.remove(config, ["torn@00"])
        assert store.get_into(["torn@00"], [base], [PAGE]) == [ErrorClass.MISS]
        client.after_get = lambda: None
        assert store.get_into(["kept@00"], [base], [PAGE]) == [ErrorClass.OK]
