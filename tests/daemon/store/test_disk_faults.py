"""A disk whose folder goes, fills up or fails, or that loses data."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.daemon.cli import findings
from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.store.disk_watch import HUNG_S, DiskWatch
from tests.daemon.stores import blocks, stored
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually


def test_a_disk_that_loses_pages_or_its_folder_costs_its_own_blocks_and_is_logged(
    serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    daemon = serve(disk=f"{folder}:256MiB")
    engine = FakeEngine(daemon.socket)
    values, others = blocks("lost", 6), blocks("others", 6)
    engine.save({**values, **others})
    stored(daemon, 12)
    engine.close()
    assert daemon.sigterm(30) == 0
    third = list(values)[2].hex().encode()
    [meta] = [each for each in folder.glob("*.meta") if third in each.read_bytes()]
    with meta.with_suffix(".bucket").open("r+b") as file:  # as after a write that failed behind everyone's back
        file.write(bytes(4096))

    daemon = serve(disk=f"{folder}:256MiB")
    engine = FakeEngine(daemon.socket)
    found = eventually(lambda: engine.load(list(values)), 30, "a hit after the restart")
    assert found == list(values.values())[:2]
    assert daemon.wait_record("store.corrupt")

    shutil.rmtree(folder)
    assert not engine.load(list(others)), "gone"
    engine.save(blocks("new", 3))
    assert eventually(lambda: engine.load(list(blocks("new", 3))), what="a hit in memory")
    assert not daemon.records("store.failed"), "one node's disk is not the store"
    line = daemon.wait_record("disk.failing", timeout_s=15)
    assert line is not None
    assert line["error"] == f"nothing can be kept on disk: the folder is gone: disk='{folder}': restart the daemon"
    eventually(lambda: ask_daemon(daemon.socket).disk_fault == line["error"], what="the picture of its second")
    config = DaemonConfig.model_validate({"socket": daemon.socket})
    fault = ("bad", line["error"].removesuffix(": restart the daemon"), "restart the daemon")
    assert list(findings.disk(config)) == [fault]
    assert [finding.level for finding in findings.control_socket(config)] == ["ok"]
    engine.close()
    assert daemon.sigterm(10) == 0, "nothing is waited for that cannot come"
    assert daemon.records("store.unflushed")


def test_of_values_with_padding_only_lost_pages_of_what_is_written_cost_blocks(
    serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Two pages of 16 KiB, of which 11,456 bytes are written: a lost page of padding, of a state, and of its end."""
    folder, page, states = tmp_path / "disk", 16384, 11_456
    daemon = serve(disk=f"{folder}:256MiB")
    spec: dict[str, Any] = {"block_bytes": 2 * page, "written": [[0, states, page, page + states]]}
    engine = FakeEngine(daemon.socket, **spec)
    padding = bytes(page - states)
    values = {digest: 2 * ((8 * value)[:states] + padding) for digest, value in blocks("padded", 8).items()}
    engine.save(values)
    stored(daemon, len(values))
    engine.close()
    assert daemon.sigterm(30) == 0
    for block, at in ((3, page - 4096), (5, states - 512), (6, page + 4096)):
        name = list(values)[block].hex().encode()
        [meta] = [each for each in folder.glob("*.meta") if name in each.read_bytes()]
        with meta.with_suffix(".bucket").open("r+b") as file:  # one value in each bucket
            place = file.read().index(list(values)[block])
            file.seek(place + at)
            file.write(bytes(4096))

    daemon = serve(disk=f"{folder}:256MiB")
    engine = FakeEngine(daemon.socket, **spec)
    found = eventually(lambda: engine.load(list(values)), 30, "a hit after the restart")
    assert found == list(values.values())[:5]
    assert engine.load(list(values)[6:]) is None
    assert engine.load(list(values)[7:]) == list(values.values())[7:]
    assert daemon.wait_record("store.corrupt")
    assert sum(line["blocks"] for line in daemon.records("store.corrupt")) == 2
    engine.close()


@contextmanager
def watched(folder: Path, clock: Callable[[], float] = time.monotonic) -> Iterator[DiskWatch]:
    fd = os.open(folder, os.O_RDONLY)
    watch = DiskWatch(folder, fd, clock)
    yield watch
    watch.close()
    os.close(fd)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m,mode=0700", "tmpfs", folder], check=False).returncode:
        pytest.skip("may not mount here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_what_is_wrong_with_the_folder_is_named(tmpfs: Path) -> None:
    def mount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", tmpfs], check=True)

    with watched(tmpfs) as watch:
        assert watch.probe() == ""
        mount("size=150m")
        assert "free=150 MiB min=256 MiB" in watch.probe()
        mount("size=400m,ro")
        assert "Read-only file system" in watch.probe()
        mount("rw")
        assert watch.probe() == ""
        assert os.listdir(tmpfs) == []


def test_a_file_system_with_less_room_than_the_tier_s_size_is_logged(serve: Callable[..., Daemon], tmpfs: Path) -> None:
    (tmpfs / "1.bucket").write_bytes(bytes(16 << 20))  # the store's own values count as room
    daemon = serve(disk=f"{tmpfs}:256MiB")
    line = daemon.wait_record("disk.small")
    assert line is not None
    assert (line["disk_bytes"], line["room_bytes"] >> 20) == (256 << 20, 400 - 256)
    assert daemon.sigterm(30) == 0
    roomy = serve(disk=f"{tmpfs}:100MiB")
    assert not roomy.records("disk.small")
    assert roomy.sigterm(30) == 0


def test_a_folder_that_another_took_the_place_of_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with watched(tmp_path / "disk") as watch:
        (tmp_path / "disk").rename(tmp_path / "away")
        (tmp_path / "disk").mkdir()
        assert "another folder is there now" in watch.probe()


def test_a_disk_that_keeps_its_callers_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    looking = threading.Event()
    now = [0.0]

    def hang(_: DiskWatch) -> str:
        looking.set()
        answer.wait(10)
        return ""

    monkeypatch.setattr(DiskWatch, "probe", hang)
    with watched(tmp_path, lambda: now[0]) as watch:
        assert looking.wait(5)
        assert watch.fault == ""
        now[0] = HUNG_S + 1
        assert "no answer for 30 s" in watch.fault
        answer.set()
        eventually(lambda: not watch.fault, what="the answer")
