"""Makes blocks for a store and the configuration of an absent cluster, and waits for a daemon's lines."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.settings import MooncakeSettings
from tests.lab.daemon import Daemon, Record
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.waiting import eventually


def blocks(name: str, count: int) -> dict[bytes, bytes]:
    """Return `count` digests, each with a value that no other block has."""
    digests = [hashlib.sha256(f"{name}-{i}".encode()).digest() for i in range(count)]
    return {digest: (digest * (BLOCK_BYTES // 32)) for digest in digests}


def stored(daemon: Daemon, count: int) -> None:
    """Wait until `count` blocks in all were stored."""
    eventually(lambda: sum(line["stored_blocks"] for line in daemon.records("save.done")) >= count, what="the save")


def request_line(daemon: Daemon, name: str) -> Record:
    """Return the line of this request's end."""

    def line() -> Record | None:
        return next((each for each in daemon.records("request.done") if each["request_id"] == name), None)

    return eventually(line, what=f"the line of {name}")


@contextmanager
def another_client(daemon: Daemon, folder: Path) -> Iterator[Store]:
    """Another client of the daemon's embedded store, which does things behind its back."""
    config = folder / "another.json"
    master = f"127.0.0.1:{daemon.records('master.started')[0]['port']}"
    config.write_text(json.dumps(_settings(master)))
    store = Store(MooncakeSettings.from_file(config), structlog.get_logger())
    store.open()
    try:
        yield store
    finally:
        store.close()


def absent_cluster(folder: Path, *, metadata_server: str = "P2PHANDSHAKE", master: str = "") -> Path:
    """Return the JSON file of a cluster with an absent `master`: by default a local port without a listener."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    config = folder / "mooncake.json"
    config.write_text(json.dumps(_settings(master or f"127.0.0.1:{port}", metadata_server)))
    return config


def _settings(master: str, metadata_server: str = "P2PHANDSHAKE") -> dict[str, str | int]:
    return {
        "metadata_server": metadata_server,
        "master_server_address": master,
        "protocol": "tcp",
        "mode": "standalone-store",
        "global_segment_size": 0,
    }


def engine_with(daemon: Daemon, name: str, count: int, **options: Any) -> tuple[FakeEngine, dict[bytes, bytes]]:
    """Attach an engine, and store so many of its blocks."""
    engine, before = FakeEngine(daemon.socket, engine_id=name, prefix=name, **options), daemon.records("save.done")
    values = blocks(name, count)
    engine.save(values)
    stored(daemon, count + sum(int(each["stored_blocks"]) for each in before))
    return engine, values
