"""A slowed disk delays each open of the files that were there, one after the other, and nothing afterwards."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.lab.programs import StartError
from tests.lab.slow_disk import SlowDisk, available
from tests.support.waiting import eventually


def seconds_to_read(*paths: Path) -> float:
    """All at once, each on a thread of its own."""
    begun = time.monotonic()
    readers = [threading.Thread(target=path.read_bytes) for path in paths]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return time.monotonic() - begun


def test_opens_are_delayed_one_after_the_other_and_only_while_it_is_entered(tmp_path: Path) -> None:
    if why_not := available(tmp_path):
        pytest.skip(why_not)
    paths = [tmp_path / f"{name}.bucket" for name in range(3)]
    for path in paths:
        path.write_bytes(b"x")
    other = tmp_path / "other"
    other.write_bytes(b"x")
    with SlowDisk(tmp_path, 0.3) as disk:
        assert seconds_to_read(*paths) >= 0.9
        assert disk.opens == 3
        assert other.read_bytes() == b"x"
        eventually(lambda: seconds_to_read(paths[0]) >= 0.3, 10, "a slow open of a file that was closed")
        assert disk.opens == 4
        hung = threading.Thread(target=paths[1].read_bytes)
        hung.start()
    hung.join(10)
    assert not hung.is_alive(), "the end of the slow disk lets everybody through"


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"no \*\.bucket under"):
        SlowDisk(tmp_path, 0.1).__enter__()
