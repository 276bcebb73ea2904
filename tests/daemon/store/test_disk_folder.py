"""The disk's folder is the daemon's alone, in any state before: real files, written by a real Mooncake."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from kvprefetch.daemon.config.model import ConfigError
from kvprefetch.daemon.store.disk import files_in, look_ms, open_folder
from tests.lab.daemon import Daemon
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.ordinary import NOBODY
from tests.support.waiting import eventually


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def opened(path: Path) -> list[str]:
    """The events of opening it."""
    with capture_logs() as logs:
        os.close(open_folder(path, structlog.get_logger()))
    return [each["event"] for each in logs]


def test_values_are_readable_by_the_daemon_s_user_alone_in_a_folder_that_was_there_before(
    serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "older.bucket").touch(0o600)
    umask = os.umask(0o022)
    try:
        daemon = serve(disk=f"{folder}:64MiB")
    finally:
        os.umask(umask)
    engine = FakeEngine(daemon.socket)
    engine.save({hashlib.sha256(b"x").digest(): b"k" * BLOCK_BYTES})
    eventually(lambda: len(list(folder.glob("*.bucket"))) > 1, 20, "the value on the disk")
    assert mode(folder) == 0o700
    assert {path.name: oct(mode(path)) for path in folder.rglob("*") if mode(path) & 0o077} == {}
    [mended] = daemon.records("disk.mended")
    assert (mended["folder_mode"], mended["files"]) == ("0755", 1)
    engine.close()


def test_a_folder_is_made_closed_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        assert opened(tmp_path / "kv") == []
    finally:
        os.umask(umask)
    assert mode(tmp_path / "kv") == 0o700
    assert opened(tmp_path / "kv") == []


def test_a_missing_parent_is_not_made(tmp_path: Path) -> None:
    """It may be a mount that failed."""
    with pytest.raises(ConfigError, match=r"^disk: cannot be used: the folder above it is not there; .*disk='"):
        open_folder(tmp_path / "mount" / "kv", structlog.get_logger())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_could_write_to_is_taken_only_while_it_is_empty(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert opened(tmp_path) == ["disk.mended"]
    assert mode(tmp_path) == 0o700
    (tmp_path / "value.bucket").touch()
    tmp_path.chmod(0o775)
    with pytest.raises(ConfigError, match=r"others may write to the folder.* mode=0775: empty it, or chmod 700"):
        open_folder(tmp_path, structlog.get_logger())
    assert mode(tmp_path) == 0o775


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=rf"belongs to another user: disk='{tmp_path}' uid={NOBODY} daemon_uid=0"):
        open_folder(tmp_path, structlog.get_logger())


@pytest.mark.parametrize(
    ("size", "pause_ms"), [(16 << 20, 500), (1 << 30, 536), (40 << 30, 21_474), (1 << 40, 60_000), (1 << 50, 60_000)]
)
def test_the_pause_between_two_looks_at_all_files_grows_with_the_disk(size: int, pause_ms: int) -> None:
    """A look at 100,000 files takes as long as half a second's writes; a large disk has room for more in between."""
    assert look_ms(size) == pause_ms


@pytest.mark.stress
def test_a_disk_with_many_small_values_is_written_to_as_fast_as_an_empty_one(serve: Callable[..., Daemon]) -> None:
    """Files of 60,000 values, in memory; at two looks a second Mooncake wrote no value in half of the time."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-", dir="/dev/shm"))
    try:
        seconds = []
        for files in (0, 120_000):
            for number in range(files):
                (folder / f"{number}.other").touch(0o600)
            daemon = serve(disk=f"{folder}:40GiB")
            engine, values = FakeEngine(daemon.socket, block_bytes=64), 1000
            before, began = files_in(folder), time.monotonic()
            for part in range(0, values, 100):
                names = (hashlib.sha256(f"{files}-{part + number}".encode()).digest() for number in range(100))
                engine.save({name: 2 * name for name in names})
            eventually(lambda most=before + 2 * values: files_in(folder) >= most, 60, "all on disk", pause_s=0.2)
            seconds.append(time.monotonic() - began)
            engine.close()
            assert daemon.sigterm(30) == 0
        assert seconds[1] < 3 * seconds[0] + 2, seconds
    finally:
        shutil.rmtree(folder)
