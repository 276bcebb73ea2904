"""An operator with the commands alone finds two faults. tests/test_empty_root.py has those who follow the documents."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.daemon import Daemon
from tests.support.command import COMMAND
from tests.support.ordinary import AS_NOBODY

FAULT_S = 60.0  # until a fault is found
# The only commands that the operator uses.
LOOKS = (("health",), ("status",), ("top", "--once", "--interval", "0.2"))


def find(socket: Path, words: str, *, before: tuple[str, ...] = ()) -> None:
    """Look until one of LOOKS says these words."""
    begun, said = time.monotonic(), ""
    while time.monotonic() < begun + FAULT_S:
        for look in LOOKS:
            done = subprocess.run([*before, *COMMAND, *look, "--socket", socket], capture_output=True, timeout=60)
            said = (done.stdout + done.stderr).decode()
            if words in said:
                return
    raise AssertionError(f"{words!r} not within {FAULT_S:.0f} s; the last look said:\n{said}")


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[Daemon]:
    """A daemon that the operator has seen ready."""
    with Daemon(staging="1MiB", **options) as daemon:
        subprocess.run([*COMMAND, "health", "--wait", "60", "--socket", daemon.socket], check=True, capture_output=True)
        yield daemon


@pytest.mark.store
def test_an_operator_finds_a_full_disk_within_a_minute(tmp_path: Path) -> None:
    """By `health`, `status` or `top` alone, which say it in words; tests/daemon has other faults."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=400m,mode=0700", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        with serving(memory="64MiB", disk=f"{tmp_path}:100MiB") as daemon:
            (tmp_path / "of-another").write_bytes(bytes(300 << 20))
            find(daemon.socket, "make room, or choose a smaller size")
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.store
@pytest.mark.skipif(not AS_NOBODY, reason="needs root, to be another user")
def test_a_user_without_rights_to_the_socket_is_told_so_within_a_minute() -> None:
    with serving(memory="64MiB") as daemon:
        daemon.socket.parent.chmod(0o755)
        find(daemon.socket, "Permission denied", before=tuple(AS_NOBODY))
