"""Values with checksums: a flipped bit is a miss, and the value is removed; disks, ranks, and values without."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.engine.memory import EngineInfo, EngineMemory
from kvprefetch.daemon.store import checksums
from kvprefetch.daemon.store.checksums import SUM_BYTES
from kvprefetch.daemon.store.errors import ErrorClass
from tests.daemon.store.test_fill import said
from tests.daemon.stores import another_client, blocks, stored
from tests.lab.daemon import Daemon
from tests.support.engine_side import BLOCK_BYTES, ONE_GROUP, EngineSpec
from tests.support.fake_engine import FakeEngine

Serve = Callable[..., Daemon]
ON = ("--checksums", "on")


def keys_of(daemon: Daemon) -> list[str]:
    found: list[str] = json.loads(said(daemon, "store", "ls", "--json"))["keys"]
    return found


def flip_a_bit(daemon: Daemon, folder: Path, key: str, size: int) -> None:
    """Put the value again, with another bit in its middle."""
    memory = (ctypes.c_char * size)()
    address = ctypes.addressof(memory)
    with another_client(daemon, folder) as store:
        store.register(address, size)
        assert store.get_into([key], [address], [size]) == [ErrorClass.OK]
        memory[size // 2] = bytes([memory[size // 2][0] ^ 1])
        assert store.remove([key]) == (1, 0)
        assert store.put_from([key], [address], [size]) == [ErrorClass.OK]
        store.unregister(address)


@pytest.mark.store
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_value_with_a_flipped_bit_is_a_miss_and_removed(serve: Serve, tmp_path: Path, ranks: int) -> None:
    daemon = serve(memory="64MiB", extra=ON)
    engine, values = FakeEngine(daemon.socket, ranks=ranks), blocks("summed", 2)
    engine.save(values)
    stored(daemon, 2)
    keys = keys_of(daemon)
    assert len(keys) == 2 * ranks
    assert all("@sum:xxh3@" in key for key in keys)
    [bad] = [key for key in keys if key.endswith(list(values)[1].hex()) and f"tp_rank:{ranks - 1}@" in key]
    flip_a_bit(daemon, tmp_path, bad, BLOCK_BYTES + SUM_BYTES)
    assert engine.load(list(values), name="corrupt") == list(values.values())[:1], "what is before it is served"
    assert bad not in keys_of(daemon)
    assert daemon.wait_record("store.corrupt") is not None
    good = FakeEngine(daemon.socket, engine_id="other", ranks=ranks)
    good.save(values)
    stored(daemon, 3)
    assert good.load(list(values)) == list(values.values())
    engine.close()
    good.close()


@pytest.mark.store
def test_values_with_checksums_come_from_a_disk(serve: Serve, tmp_path: Path) -> None:
    size, count = 1 << 20, 24
    options = {"memory": "16MiB", "staging": "64MiB", "disk": f"{tmp_path / 'disk'}:64MiB"}
    daemon = serve(**options, extra=ON)
    engine = FakeEngine(daemon.socket, block_bytes=size)
    values = {digest: digest * (size // 32) for digest in blocks("disk", count)}
    for start in range(0, count, 4):
        engine.save(dict(list(values.items())[start : start + 4]), save_id=start + 1)
        stored(daemon, start + 4)
    assert engine.load(list(values)) == list(values.values())
    assert engine.disk_blocks, "some were on the disk alone"
    engine.close()


@pytest.mark.parametrize("upstream", [False, True])
def test_values_of_vllms_own_connector_have_none(upstream: bool) -> None:
    spec = EngineSpec()
    scheduler = spec.scheduler().model_copy(update={"upstream_keys": upstream})
    engine = EngineInfo("engine", ONE_GROUP, scheduler, [spec.worker()])
    memory = EngineMemory.create(DaemonConfig(checksums="on", staging=1 << 20), 1, engine)
    assert memory.staging.sum_bytes == (0 if upstream else SUM_BYTES)
    memory.close()


def test_each_changed_bit_and_an_exchange_of_values_are_seen() -> None:
    memory = (ctypes.c_char * 80)(*[bytes([number]) for number in range(80)])
    base = ctypes.addressof(memory)
    values = [(base, 24, base + 64), (base + 24, 24, base + 72)]
    checksums.write(values)
    assert list(checksums.wrong(values)) == []
    for at in (0, 23, 64, 71):
        memory[at] = bytes([memory[at][0] ^ 128])
        assert list(checksums.wrong(values)) == [0], at
        memory[at] = bytes([memory[at][0] ^ 128])
    assert list(checksums.wrong([(base, 24, base + 72), (base + 24, 24, base + 64)])) == [0, 1]


def test_checksums_are_part_of_the_budget() -> None:
    """Blocks may be smaller than their checksums."""
    spec = EngineSpec(block_bytes=64, saves=False, max_blocks=16)
    engine = EngineInfo("engine", ONE_GROUP, spec.scheduler(), [spec.worker()])
    memory = EngineMemory.create(DaemonConfig(checksums="on", staging=1 << 20), 1, engine)
    assert sum(segment.size_bytes for segment in memory.staging.segments) == memory.staging.size_bytes <= 1 << 20
    memory.close()
