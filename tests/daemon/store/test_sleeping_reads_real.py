"""Reads that sleep, from real storage nodes that stop in the middle of a read."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import structlog

from kvprefetch.daemon.store import joining
from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.store.settings import MooncakeSettings
from kvprefetch.daemon.store.storage_nodes import Get
from tests.lab import control
from tests.lab.process import frozen
from tests.lab.store import Store as LabStore

pytestmark = pytest.mark.store

SIZE, COUNT = 65536, 16
LEASE_MS = 200
OK, TRANSFER = ErrorClass.OK, ErrorClass.TRANSFER


class Reader:
    """An open store on a cluster, with room for COUNT values."""

    made: ClassVar[list[Reader]] = []

    def __init__(self, config: Path, *, lease_ms: int = 10_000, protocol: str = "tcp") -> None:
        settings = replace(MooncakeSettings.from_file(config), protocol=protocol)
        self.store = Store(settings, structlog.get_logger(), lease_ns=lease_ms * 1_000_000)
        with structlog.testing.capture_logs() as self.lines:
            self.store.open()
        self.memory = ctypes.create_string_buffer(COUNT * SIZE)
        self.base = ctypes.addressof(self.memory)
        self.store.register(self.base, len(self.memory))
        self.made.append(self)

    def get(self, keys: list[str], first: int = 0, get: Get | None = None) -> list[ErrorClass]:
        addresses = [self.base + (first + number) * SIZE for number in range(len(keys))]
        return self.store.get_into(keys, addresses, [SIZE] * len(keys), get)

    def value(self, number: int) -> bytes:
        return self.memory.raw[number * SIZE : (number + 1) * SIZE]


def values(name: str, count: int = 8) -> dict[str, bytes]:
    return {f"{name}@tp_rank:0@{number:064x}": bytes([number + 1]) * SIZE for number in range(count)}


@pytest.fixture(autouse=True)
def _stores_are_closed() -> Iterator[None]:
    yield
    while Reader.made:
        Reader.made.pop().store.close()


@contextmanager
def cluster(nodes: int = 1, lease_ms: int = 10_000) -> Iterator[LabStore]:
    pytest.importorskip("mooncake")
    with LabStore(memory="64 MB", nodes=nodes, lease_ms=lease_ms) as store:
        for number in range(nodes):
            control.put(store.config, values("ab"[number]), store.segments[number])
        yield store


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[LabStore]:
    with cluster(2) as store:
        yield store


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
def test_a_read_that_waits_uses_no_core_unless_the_log_says_so(two_nodes: LabStore, protocol: str) -> None:
    """Without an RDMA device Mooncake reads over TCP; for that protocol reads are not known to work asleep."""
    reader, keys = Reader(two_nodes.config, protocol=protocol), list(values("a"))
    [opened] = [line for line in reader.lines if line["event"] == "store.opened"]
    assert opened["reads"] == ("sleeping" if protocol == "tcp" else "blocking")
    assert reader.get(keys) == [OK] * 8
    assert [reader.value(number) for number in range(8)] == list(values("a").values())
    with ThreadPoolExecutor() as pool:
        with frozen(two_nodes.node_pid):
            get = pool.submit(reader.get, keys, 8)
            wait([get], 0.2)
            began = time.process_time()
            done, _ = wait([get], 2.0)
            used = time.process_time() - began
            assert not done
        assert get.result(30) == [OK] * 8
    assert used < 0.2 if protocol == "tcp" else used > 0.3


def test_when_the_test_of_sleeping_reads_fails_reads_block(
    two_nodes: LabStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "self_test", lambda *_: "planted")
    reader = Reader(two_nodes.config)
    assert {line["event"]: line.get("error", line.get("reads")) for line in reader.lines} == {
        "reads.blocking": "planted",
        "store.opened": "blocking",
    }
    assert reader.get(list(values("a"))) == [OK] * 8


def test_a_lease_that_runs_out_in_mid_read_voids_what_arrives() -> None:
    with cluster(lease_ms=LEASE_MS) as store:
        reader = Reader(store.config, lease_ms=LEASE_MS)
        assert reader.get(list(values("a"))) == [OK] * 8
        with ThreadPoolExecutor() as pool:
            with frozen(store.node_pid):
                get = pool.submit(reader.get, list(values("a")))
                wait([get], 3 * LEASE_MS / 1e3)
            assert get.result(30) == [ErrorClass.LOOKUP_AGAIN] * 8
        assert reader.get(list(values("a"))) == [OK] * 8


def test_a_value_that_is_removed_and_put_again_in_mid_read_does_not_count(two_nodes: LabStore) -> None:
    reader, [key] = Reader(two_nodes.config), values("a", 1)
    assert reader.get([key]) == [OK]
    with ThreadPoolExecutor() as pool:
        with frozen(two_nodes.node_pid):
            get = pool.submit(reader.get, [key])
            wait([get], 0.2)
            assert reader.store.remove([key]) == (1, 0)
            control.put(two_nodes.config, {key: b"n" * SIZE}, two_nodes.segments[1])
        assert get.result(30) == [ErrorClass.LOOKUP_AGAIN]
    assert reader.get([key]) == [OK]
    assert reader.value(0) == b"n" * SIZE
