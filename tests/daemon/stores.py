"""Makes blocks for a store, and the configuration of an absent cluster."""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path

from tests.lab.daemon import Daemon
from tests.support.fake_engine import BLOCK_BYTES
from tests.support.waiting import eventually


def blocks(name: str, count: int) -> dict[bytes, bytes]:
    """Return `count` digests, each with a value that no other block has."""
    digests = [hashlib.sha256(f"{name}-{i}".encode()).digest() for i in range(count)]
    return {digest: (digest * (BLOCK_BYTES // 32)) for digest in digests}


def stored(daemon: Daemon, count: int) -> None:
    """Wait until `count` blocks in all were stored."""
    eventually(lambda: sum(line["stored_blocks"] for line in daemon.records("save.done")) >= count, what="the save")


def absent_cluster(folder: Path, *, metadata_server: str = "P2PHANDSHAKE", master: str = "") -> Path:
    """Return the JSON file of a cluster with an absent `master`: by default a local port without a listener."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    config = folder / "mooncake.json"
    settings = {
        "metadata_server": metadata_server,
        "master_server_address": master or f"127.0.0.1:{port}",
        "protocol": "tcp",
        "mode": "standalone-store",
        "global_segment_size": 0,
    }
    config.write_text(json.dumps(settings))
    return config
