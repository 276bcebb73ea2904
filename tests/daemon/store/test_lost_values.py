"""Values that the store took and lost are told apart from those that it evicted, or that somebody removed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprefetch.daemon.store.fill import StoreFill
from tests.daemon.store.test_fill import MIB, known, said, save
from tests.daemon.stores import another_client, blocks, engine_with, request_line
from tests.lab.daemon import Daemon, Record
from tests.support.auditor import ask_daemon
from tests.support.command import kvprefetchd
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.store


def nowhere(engine: FakeEngine, daemon: Daemon, digests: list[bytes], name: str) -> Record:
    """Ask for blocks that are not there; the request's line."""
    assert engine.load(digests, name=name) is None
    return request_line(daemon, name)


def test_a_value_that_is_gone_without_an_eviction_is_counted_as_lost(
    serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    daemon = serve(memory="64MiB")
    engine, kept = engine_with(daemon, "kept", 2)
    known(daemon, lambda store: store.memory_used_bytes > 0)
    assert nowhere(engine, daemon, list(blocks("never", 1)), "never")["nowhere"] == "never_stored"
    keys = json.loads(said(daemon, "store", "ls", "--json"))["keys"]
    assert len(keys) == 2
    with another_client(daemon, tmp_path) as behind:
        assert behind.remove(keys) == (2, 0)
    line = nowhere(engine, daemon, list(kept), "lost")
    assert (line["nowhere"], line["cause"]) == ("lost", "lost")
    assert ask_daemon(daemon.socket).engines[0]["lost_values"] == 1
    doctor = kvprefetchd("doctor", "--socket", daemon.socket)
    assert "the store lost values that were stored: requests that missed them: 1" in doctor.stdout
    engine.close()


def test_what_is_evicted_or_purged_is_not_lost(serve: Callable[..., Daemon]) -> None:
    daemon = serve(memory="16MiB", staging="16MiB")
    engine = FakeEngine(daemon.socket, block_bytes=MIB, max_blocks=64)
    save(engine, daemon, 0, 24)
    known(daemon, lambda store: store.evicts)
    first = [hashlib.sha256(bytes([i])).digest() for i in range(4)]
    assert nowhere(engine, daemon, first[:1], "evicted")["nowhere"] == "evicted"
    engine.close()

    daemon = serve(memory="64MiB")
    engine, kept = engine_with(daemon, "kept", 1)
    said(daemon, "store", "purge", "--prefix", "u", "--yes")
    assert nowhere(engine, daemon, list(kept), "purged")["nowhere"] == "evicted"
    engine.close()


def test_a_store_without_a_disk_evicts_from_memory_and_one_with_a_disk_from_the_disk() -> None:
    memory, disk = StoreFill(memory_bytes=100), StoreFill(memory_bytes=100, disk_bytes=1000)
    assert not memory.evicts
    assert not disk.evicts
    assert memory.model_copy(update={"memory_evicted_bytes": 1}).evicts
    assert memory.model_copy(update={"memory_used_bytes": 90}).evicts
    assert not disk.model_copy(update={"memory_evicted_bytes": 1, "memory_used_bytes": 100}).evicts
    assert disk.model_copy(update={"disk_evictions": 1}).evicts
    assert disk.model_copy(update={"disk_used_bytes": 900}).evicts
