"""A real daemon with a real Mooncake store, driven over its real sockets and shared memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvprefetch.daemon.cli.main import main
from kvprefetch.shmring.wire import admin
from kvprefetch.shmring.wire.codec import MAX_MESSAGE_BYTES, send_message
from tests.daemon.door.test_door import token_file
from tests.daemon.stores import blocks, stored
from tests.lab import process
from tests.lab.daemon import Daemon
from tests.lab.process import frozen
from tests.support.auditor import Auditor
from tests.support.fake_engine import FakeEngine
from tests.support.ordinary import AS_NOBODY, NOBODY


def test_what_was_saved_is_loaded_with_the_same_bytes(shared_daemon: Daemon, auditor: Auditor) -> None:
    engine = FakeEngine(shared_daemon.socket, prefix="same-bytes")
    assert engine.epoch <= 1 << 53, "jq reads the log's numbers as doubles"
    values = blocks("same", 20)
    assert engine.load(list(values)) is None, "nothing is stored yet"
    before = sum(line["stored_blocks"] for line in shared_daemon.records("save.done"))
    engine.save(values)
    stored(shared_daemon, before + 20)
    assert engine.load(list(values)) == list(values.values())
    assert engine.disk_blocks == 0, "there is no disk"
    assert engine.load(list(values), local=7) == list(values.values())[7:]
    longer = list(values) + list(blocks("absent", 3))
    assert engine.load(longer) == list(values.values()), "the prefix that is there"
    auditor.assert_idle(shared_daemon.pid, shared_daemon.socket)


@pytest.mark.store
@pytest.mark.parametrize(
    ("key", "cure"),
    [
        ("metrics_port", "another one, or 0 for no metrics"),
        ("master_port", "another one, or none"),
        ("door_port", "another one, or 0 for none"),
    ],
)
def test_a_port_that_is_taken_ends_the_start_with_a_line_that_says_which_and_what_to_do(
    tmp_path: Path, key: str, cure: str
) -> None:
    token = token_file(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        extra = ("--metrics-port", "0", "--door-token", str(token), f"--{key.replace('_', '-')}", str(port))
        with closing(Daemon(memory="16MiB", staging="1MiB", extra=extra)) as daemon:
            daemon.launch()
            assert daemon.wait_exit(60) == 69, "systemd tries again: it may be free then"
            [failed] = daemon.records("daemon.failed")
    (line,) = (line for line in daemon.lines if line.startswith("kvprefetchd: "))
    assert line.endswith(failed["error"])
    assert f"{key}: cannot be bound: Address already in use: " in line
    assert f"{key}={port}" in line
    assert cure in line


@pytest.mark.store
def test_a_master_that_is_slow_to_answer_at_first_does_not_end_the_start() -> None:
    extra = ("--log-level", "debug", "--rpc-timeout-ms", "1000")
    with closing(Daemon(memory="64MiB", staging="1MiB", extra=extra)) as daemon:
        daemon.launch()
        started = daemon.wait_record("master.started", timeout_s=30)
        assert started is not None
        with frozen(started["pid"]):
            assert daemon.wait_record("store.retried", timeout_s=20) is not None
        assert daemon.wait_record("daemon.ready", timeout_s=30) is not None


def test_the_auditor_finds_a_planted_leak(shared_daemon: Daemon, auditor: Auditor) -> None:
    engine = FakeEngine(shared_daemon.socket, prefix="leak")
    engine.hint(list(blocks("leak", 3)))
    with pytest.raises(AssertionError, match="flags in use"):
        auditor.assert_idle(shared_daemon.pid, shared_daemon.socket, timeout_s=0.5)
    engine.close()
    engine = FakeEngine(shared_daemon.socket, prefix="leak")
    engine.credits.take(1)
    with pytest.raises(AssertionError, match="credits out"):
        auditor.assert_idle(shared_daemon.pid, shared_daemon.socket, timeout_s=0.5)


def test_stat_reads_the_live_segments_without_disturbing_anyone(
    shared_daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(shared_daemon.socket, engine_id="looked-at", prefix="stat")
    key = engine.hint(list(blocks("stat", 3)))
    engine.settled(key)
    assert main(["stat", "--socket", str(shared_daemon.socket)]) == 0
    [shown] = (each for each in json.loads(capsys.readouterr().out)["engines"] if each["engine"] == "looked-at")
    assert shown["epoch"] == engine.epoch
    assert shown["flags"]["states"]["ready"] == 1
    assert shown["consumer"]["status"] == "alive"
    assert not shown["impossible"]
    send_message(sock := engine.connect(), admin.StatQuery())
    assert socket.recv_fds(sock, MAX_MESSAGE_BYTES, 64)[1] == [], "unread ones would count against the daemon"
    assert engine.load(list(blocks("stat", 2))) is None


def test_an_engine_s_container_needs_the_socket_s_folder_read_only(
    serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Connecting writes nothing: as an ordinary user, in a mount namespace with the folder bound read-only."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    daemon = serve(extra=("--socket-mode", "0666", "--allow-uids", str(NOBODY)))
    daemon.socket.parent.chmod(0o755)
    there = Path(tempfile.mkdtemp(prefix="kvm-"))
    there.chmod(0o755)
    engine = (
        "import sys, os; from tests.support.fake_engine import FakeEngine, Path\n"
        "from tests.support.waiting import eventually\n"
        "path = Path(sys.argv[1])\n"
        "try: path.unlink(); print('removed')\n"
        "except OSError as error: print(error.strerror)\n"
        "engine = FakeEngine(path); engine.save({b'k' * 32: b'v' * 4096})\n"
        "eventually(lambda: engine.load([b'k' * 32]) == [b'v' * 4096]); engine.close(); print('loaded')"
    )
    enter = 'mount --bind "$1" "$2" && mount -o remount,bind,ro "$2" && shift 2 && exec "$@"'
    as_nobody = [*AS_NOBODY, sys.executable, "-c", engine, str(there / daemon.socket.name)]
    unshare = ["unshare", "--mount", "sh", "-c", enter, "sh", str(daemon.socket.parent), str(there)]
    try:
        done = subprocess.run([*unshare, *as_nobody], capture_output=True, text=True, timeout=60, cwd=process.REPO)
    finally:
        there.rmdir()
    assert (done.stdout.split("\n")[:2], done.returncode) == (["Read-only file system", "loaded"], 0), done.stderr
