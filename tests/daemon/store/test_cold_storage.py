"""A cluster whose storage nodes write to a file system, or to S3: what memory evicted is loaded from there."""

from __future__ import annotations

import hashlib
import sys
import urllib.request
from pathlib import Path

import pytest

from kvprefetch.daemon.store.window import installed
from tests.daemon.stores import stored
from tests.lab import process
from tests.lab.daemon import Daemon
from tests.lab.store import Store
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

BLOCK_BYTES, BLOCKS, PROMPTS = 256 << 10, 16, 14  # 56 MiB, and memory for 32
MOTO = Path(sys.executable).parent / "moto_server"
NODE = {"MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1", "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1"}


def prompt(number: int) -> dict[bytes, bytes]:
    digests = [hashlib.sha256(f"{number}-{block}".encode()).digest() for block in range(BLOCKS)]
    return {digest: digest * (BLOCK_BYTES // len(digest)) for digest in digests}


def what_memory_evicted_is_loaded(cluster: Store, daemon: Daemon) -> list[float]:
    """Return how long, in ms, the daemon took for prompts from there alone."""
    engine = FakeEngine(daemon.socket, engine_id="cold", prefix="cold", block_bytes=BLOCK_BYTES)
    for number in range(PROMPTS):
        engine.save(prompt(number))
        stored(daemon, (number + 1) * BLOCKS)
    assert cluster.keys == PROMPTS * BLOCKS
    for number in range(PROMPTS):
        assert engine.load(list(prompt(number)), name=f"r{number}") == list(prompt(number).values())
    eventually(lambda: len(daemon.records("request.done")) == PROMPTS, what="their lines")
    engine.close()
    lines = daemon.records("request.done")
    assert sum(line["bytes_disk"] for line in lines) > 8 << 20
    return [line["answered_ms"] for line in lines if line["bytes_memory"] == 0]


@pytest.mark.store
def test_a_file_system_behind_the_storage_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NODE.items():
        monkeypatch.setenv(name, value)
    with (
        Store(memory="32 MB", disk=tmp_path / "cold", lease_ms=1000) as cluster,
        Daemon(mooncake_config=cluster.config, staging="32MiB") as daemon,
    ):
        print(what_memory_evicted_is_loaded(cluster, daemon))


def _without_s3() -> str:
    if not any(tuple(map(int, each.split(".")[:3])) >= (0, 3, 14) for each in installed().values()):
        return "Mooncake writes to S3 from 0.3.14 on"
    return "" if MOTO.exists() else "moto is not installed"


@pytest.mark.stress
@pytest.mark.skipif(bool(_without_s3()), reason=_without_s3())
def test_s3_behind_the_storage_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [port] = process.free_ports(1)
    s3 = f"http://127.0.0.1:{port}"
    server = process.spawn([str(MOTO), "-p", str(port)], log=tmp_path / "s3.log")
    try:
        eventually(lambda: process.listens("127.0.0.1", port), what="S3")
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20261127/us-east-1/s3/aws4_request"}
        urllib.request.urlopen(
            urllib.request.Request(f"{s3}/kv-cold", method="PUT", headers=signed), timeout=10
        ).close()
        of_s3 = {
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "distributed_storage_backend",
            "MOONCAKE_DFS_FS_ADAPTER": "s3",
            "MOONCAKE_DFS_ROOT_DIR": "/kv",
            "MOONCAKE_DFS_SINGLE_TENANT": "true",
            "MOONCAKE_S3_ENDPOINT": s3,
            "MOONCAKE_S3_BUCKET": "kv-cold",
            "MOONCAKE_S3_REGION": "us-east-1",
            "MOONCAKE_S3_ACCESS_KEY_ID": "test",
            "MOONCAKE_S3_SECRET_ACCESS_KEY": "test-test",
            "MOONCAKE_S3_PATH_STYLE": "true",
        }
        for name, value in (NODE | of_s3).items():
            monkeypatch.setenv(name, value)
        with (
            Store(memory="32 MB", disk=tmp_path / "unused", lease_ms=1000) as cluster,
            Daemon(mooncake_config=cluster.config, staging="32MiB") as daemon,
        ):
            print(what_memory_evicted_is_loaded(cluster, daemon))
        assert not any((tmp_path / "unused").iterdir())
    finally:
        process.reap(server)
