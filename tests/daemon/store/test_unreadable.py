"""A value whose file the disk cannot read: real files and real faults cost that value alone."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.store.unreadable import read_apart, shortened
from tests.daemon.stores import blocks, stored
from tests.lab.daemon import Daemon
from tests.lab.store import Store
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

VALUES = blocks("unreadable", 12)
BAD = 5
# Run in the daemon at its start: root reads a file of any mode with these two capabilities.
ORDINARY = """
import ctypes, struct
libc = ctypes.CDLL(None)
header, data = struct.pack("<Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
libc.capget(header, data)
words = list(struct.unpack("<6I", data.raw))
words[0] &= ~0b110
libc.capset(header, struct.pack("<6I", *words))
"""
Start = Callable[..., Daemon]


@pytest.fixture
def mounts() -> Iterator[list[Path]]:
    made: list[Path] = []
    yield made
    for each in made:
        subprocess.run(["umount", "-l", each], check=True)


def file_of(folder: Path, digest: bytes) -> Path:
    """Return the file with this value; a bucket has one."""
    [meta] = [each for each in folder.glob("*.meta") if digest.hex().encode() in each.read_bytes()]
    return meta.with_suffix(".bucket")


def values_on_disk_alone(daemon: Daemon) -> None:
    """Store the values, and start the daemon anew, so that its memory has none."""
    engine = FakeEngine(daemon.socket)
    engine.save(VALUES)
    stored(daemon, len(VALUES))
    engine.close()
    assert daemon.sigterm(30) == 0
    daemon.start()


def spoil(fault: str, file: Path, daemon: Daemon, mounts: list[Path]) -> None:
    if fault == "a folder in its place":
        file.unlink()
        file.mkdir()
    elif fault == "gone":
        file.unlink()
    elif fault == "truncated":
        os.truncate(file, 1000)
    elif fault == "mode 000":
        file.chmod(0)
    elif subprocess.run(["mount", "--bind", f"/proc/{daemon.pid}/mem", file], check=False).returncode:
        pytest.skip("may not mount here")
    else:  # address 0 of a process: every read is an EIO
        mounts.append(file)


@pytest.mark.store
@pytest.mark.parametrize(
    "fault",
    [
        "a folder in its place",
        "EIO",
        *(pytest.param(each, marks=pytest.mark.stress) for each in ("gone", "truncated", "mode 000")),
    ],
)
def test_a_value_that_cannot_be_read_costs_no_other_one_and_is_stored_anew(
    patched: Start, tmp_path: Path, mounts: list[Path], fault: str
) -> None:
    folder = tmp_path / "disk"
    daemon = patched(ORDINARY, disk=f"{folder}:256MiB")
    values_on_disk_alone(daemon)
    engine, names = FakeEngine(daemon.socket), list(VALUES)
    spoil(fault, file_of(folder, names[BAD]), daemon, mounts)
    assert engine.load(names) == list(VALUES.values())[:BAD], "all before it"
    line = daemon.wait_record("store.unreadable")
    assert line is not None
    assert (line["value"].rpartition("@")[2], line["removed"]) == (names[BAD].hex()[:16], True)
    assert engine.load(names[BAD + 1 :]) == list(VALUES.values())[BAD + 1 :], "all behind it"
    engine.save({names[BAD]: VALUES[names[BAD]]})
    assert eventually(lambda: engine.load(names) == list(VALUES.values()), what="a hit of all")
    engine.close()


@pytest.mark.store
def test_a_fault_of_the_disk_that_passes_costs_no_value(serve: Start, tmp_path: Path) -> None:
    """Without a free descriptor no file can be opened, and each value fails alone, too."""
    daemon = serve(disk=f"{tmp_path / 'disk'}:256MiB")
    values_on_disk_alone(daemon)
    engine, names = FakeEngine(daemon.socket), list(VALUES)
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir(f"/proc/{daemon.pid}/fd"))) + 1
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (min(used, 3), limits[1]))
    assert engine.load(names) is None
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
    assert eventually(lambda: engine.load(names) == list(VALUES.values()), 40, what="a hit of all")
    assert not daemon.records("store.unreadable")
    engine.close()


@pytest.mark.stress
@pytest.mark.store
def test_of_a_cluster_the_only_replica_is_removed_once_its_fault_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miss for this client before; then the value is stored anew."""
    monkeypatch.setenv("MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT", "1")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1")
    values = {digest: digest * 8192 for digest in blocks("cold", 224)}  # 56 MiB
    with (
        Store(memory="32 MB", disk=tmp_path / "cold", lease_ms=1000) as cluster,
        Daemon(mooncake_config=cluster.config, staging="128MiB") as daemon,
    ):
        engine = FakeEngine(daemon.socket, block_bytes=256 << 10)
        for start in range(0, len(values), 16):
            engine.save(dict(islice(values.items(), start, start + 16)))
            stored(daemon, start + 16)
        written = b"".join(each.read_bytes() for each in (tmp_path / "cold").glob("*.meta"))
        names = [each for each in values if each.hex().encode() in written][:12]
        file_of(tmp_path / "cold", names[BAD]).unlink()
        assert engine.load(names) == [values[each] for each in names[:BAD]]

        def removed() -> list[bool]:
            engine.load(names)
            return [each["removed"] for each in daemon.records("store.unreadable")]

        assert not any(removed())
        eventually(lambda: removed()[-1], 60, "the end of the value")
        engine.save({names[BAD]: values[names[BAD]]})
        assert eventually(lambda: engine.load(names) == [values[each] for each in names], what="a hit of all")
        engine.close()


OPEN, READ, SPOILED = -1101, -1102, {2: -1102}


def apart(codes: list[int], alone: dict[int, int], works: Callable[[], bool] | None) -> tuple[list[int], list[int]]:
    read = read_apart(codes, lambda at: alone.get(at, 64), works, lambda: False)
    return read, codes


def test_of_a_cluster_a_value_is_unreadable_only_where_others_can_be_read() -> None:
    assert apart([OPEN] * 4, SPOILED, None) == ([2], [64, 64, READ, 64])
    assert apart([OPEN] * 4, dict.fromkeys(range(4), OPEN), None) == ([], [OPEN] * 4), "the node, perhaps"
    assert apart([OPEN], SPOILED, None) == ([], [OPEN])
    assert read_apart([OPEN], lambda _: OPEN, None, lambda: False, lambda _: True) == [0], "it was before"
    assert apart([64, -704, -800], {}, None) == ([], [64, -704, -800]), "no file is the reason"


def test_a_value_of_the_own_disk_is_unreadable_where_the_disk_works() -> None:
    assert apart([OPEN] * 4, SPOILED, lambda: True) == ([2], [64, 64, READ, 64])
    assert apart([OPEN], {0: OPEN}, lambda: True) == ([0], [OPEN])
    assert apart([OPEN], {0: OPEN}, lambda: False) == ([], [OPEN])
    assert apart([OPEN], {0: 64}, lambda: True) == ([], [64]), "over when the disk was tried"


def test_nothing_is_read_apart_that_nobody_waits_for() -> None:
    codes = [OPEN] * 4
    assert read_apart(codes, lambda _: 64, None, lambda: True) == []
    assert codes == [OPEN] * 4


def test_the_log_has_no_whole_hash() -> None:
    assert shortened("u0@model@tp_rank:0@" + 64 * "a") == "u0@model@tp_rank:0@" + 16 * "a"
    assert ErrorClass.UNREADABLE.value == "unreadable"
