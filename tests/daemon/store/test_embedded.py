"""The private master and its disk, with a real mooncake_master and real files."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from kvprefetch.daemon.store import embedded
from kvprefetch.daemon.store.disk import DiskSpec
from kvprefetch.daemon.store.embedded import EmbeddedMaster
from kvprefetch.daemon.store.errors import EmbeddedError
from kvprefetch.daemon.store.settings import SettingsError
from tests.support.descriptors import targets
from tests.support.waiting import eventually

pytest.importorskip("mooncake")

# A daemon of its own for each scenario: Mooncake reads its environment once per process, and some are killed.
DAEMON = """
import ctypes, mmap, os, sys, time
import structlog
from pathlib import Path
from kvprefetch.daemon.store.disk import DiskSpec
from kvprefetch.daemon.store.embedded import EmbeddedMaster
from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.errors import StoreUnavailable
from kvprefetch.daemon.store.errors import ErrorClass
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
log = structlog.get_logger()
directory, disk_bytes, count = Path(sys.argv[1]), int(sys.argv[2]) or None, int(sys.argv[3])
master = EmbeddedMaster(16 << 20, DiskSpec(directory, disk_bytes), log)
store = Store(master.start(), log, rpc_timeout_ms=4000)
begun = time.monotonic(); store.open(); opened_s = time.monotonic() - begun
B = 65536
area = mmap.mmap(-1, count * B)
base = ctypes.addressof(ctypes.c_char.from_buffer(area))
store.register(base, count * B)
keys = [f"m@{i:08x}" for i in range(count)]
def value(i): return (i + 1).to_bytes(4, "little") * (B // 4)
def put(which):
    for i in which: area[i * B:(i + 1) * B] = value(i)
    left, deadline = list(which), time.monotonic() + 30
    while left and time.monotonic() < deadline:
        again = []
        for n in range(0, len(left), 16):
            part = left[n:n + 16]
            done = store.put_from([keys[i] for i in part], [base + i * B for i in part], [B] * len(part))
            again += [i for i, d in zip(part, done) if d is not ErrorClass.OK]
            assert all(d in (ErrorClass.OK, ErrorClass.NO_SPACE) for d in done), done
        left = again
        if left: time.sleep(0.25)
    assert not left
def right():
    area[:] = bytes(count * B); good = 0
    for n in range(0, count, 16):
        part = range(n, min(n + 16, count))
        done = store.get_into([keys[i] for i in part], [base + i * B for i in part], [B] * len(part))
        good += sum(d is ErrorClass.OK and area[i * B:(i + 1) * B] == value(i) for i, d in zip(part, done))
    return good
def end(): store.close(); master.stop(); sys.stdout.flush(); os._exit(0)  # as the daemon does
"""


def daemon(script: str, directory: Path, count: int = 200, disk_bytes: int = 0, **options: Any) -> Any:
    command = [sys.executable, "-c", DAEMON + script, str(directory), str(disk_bytes), str(count)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MOONCAKE_", "MC_"))}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
    )


def run(script: str, directory: Path, count: int = 200, disk_bytes: int = 0) -> list[str]:
    process = daemon(script, directory, count, disk_bytes)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    assert re.findall(r"^I\d{4} .*", err, re.MULTILINE) == [], "Mooncake's libraries write warnings and errors only"
    return [line[4:] for line in out.splitlines() if line.startswith(">>> ")]


@pytest.mark.parametrize(
    ("text", "path", "size"),
    [("/a", "/a", None), ("/a:20GiB", "/a", 20 << 30), ("/a:b/c", "/a:b/c", None), ("/a:1.5gb", "/a", 1_500_000_000)],
)
def test_should_parse_a_disk(text: str, path: str, size: int | None) -> None:
    assert DiskSpec.parse(text) == DiskSpec(Path(path), size)


@pytest.mark.parametrize("text", ["", "a", "/a:", "/a:20XB", "/a:1KiB", "/a/../b", ":1GiB", "/a:" + "9" * 400])
def test_should_refuse_a_wrong_disk_in_one_line(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^disk: .*should be") as caught:
        DiskSpec.parse(text)
    assert "\n" not in str(caught.value)


def test_should_leave_alone_a_disk_that_another_daemon_owns(tmp_path: Path) -> None:
    """Mooncake does not look: a second daemon would write over the files of the first."""
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    master = EmbeddedMaster(1, DiskSpec(tmp_path, None), structlog.get_logger())
    with pytest.raises(EmbeddedError, match=f"^disk: another daemon uses it: disk='{tmp_path}'$"):
        master.start()
    assert master.pid is None
    os.close(other)


@pytest.mark.parametrize("killed", [False, True])
def test_should_tell_a_stop_from_an_end_by_itself(killed: bool) -> None:
    with capture_logs() as log:
        master = EmbeddedMaster(1, None, structlog.get_logger())
        master.start()
        pid = master.pid
        assert pid is not None
        if killed:
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: not master.alive(), what="its end")
        master.stop()
    [stopped] = [line for line in log if line["event"] == "master.stopped"]
    assert stopped == {"event": "master.stopped", "log_level": "info", "pid": pid, **({"code": -9} if killed else {})}


def test_should_start_answer_and_stop() -> None:
    master = EmbeddedMaster(1, None, structlog.get_logger())
    settings = master.start()
    try:
        assert master.alive()
        assert master.pid
        assert settings.global_segment_size == 16 << 20
        host, port = settings.master_server_address.split(":")
        assert host == "127.0.0.1"
        listening = _listening(master.pid)
        assert int(port) in {p for _, p in listening}
        assert {address for address, _ in listening} == {"0100007F"}, "the master must listen on loopback only"
    finally:
        master.stop()
        master.stop()
    assert not master.alive()
    assert master.pid is None


def test_should_take_another_port_where_a_stranger_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger that took the chosen port first is no master, however long the real one takes to notice."""
    slow = tmp_path / "mooncake_master"
    slow.write_text(f'#!/bin/sh\nsleep 0.5\nexec "{embedded.master_program()}" "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(embedded, "master_program", lambda: str(slow))
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        ports = iter([taken])
        free = embedded.free_port
        monkeypatch.setattr(embedded, "free_port", lambda: next(ports, None) or free())
        master = EmbeddedMaster(1, None, structlog.get_logger())
        try:
            address = master.start().master_server_address
            assert address != f"127.0.0.1:{taken}"
            assert master.pid is not None
            assert int(address.rpartition(":")[2]) in {port for _, port in _listening(master.pid)}
        finally:
            master.stop()


def _listening(pid: int) -> set[tuple[str, int]]:
    inodes = {target[8:-1] for target in targets(pid)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(a, int(p, 16)) for r in rows if r[3] == "0A" and r[9] in inodes for a, p in [r[1].split(":")]}


def test_should_name_an_explicit_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedError, match=rf"^master_port: cannot be bound: .* in use: master_port={port}; "):
            EmbeddedMaster(1, None, structlog.get_logger(), master_port=port).start()


def test_should_keep_what_does_not_fit_in_memory_and_find_it_after_a_restart(tmp_path: Path) -> None:
    put = "put(range(count)); assert store.flush(20); print('>>>', right(), set(store.media(keys)) >= {'disk'}); end()"
    assert run(put, tmp_path, 300) == ["300 True"]
    assert run("print('>>>', right(), opened_s < 20); end()", tmp_path, 300) == ["300 True"]


def test_should_keep_what_was_flushed_and_leave_no_master_when_killed(tmp_path: Path) -> None:
    script = "put(range(count)); assert store.flush(20); print(master.pid, flush=True); time.sleep(60)"
    process = daemon(script, tmp_path, 50)
    try:
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
        eventually(lambda: not _runs(pid), 15, "the master's end")
    finally:
        process.kill()
        process.communicate()
    assert run("print('>>>', right()); end()", tmp_path, 50) == ["50"]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_should_bound_the_disk(tmp_path: Path) -> None:
    """To what is written between two looks at the files, which come twice a second: 37 MiB would be there without."""
    limit = 24 << 20
    run("put(range(count)); time.sleep(3); end()", tmp_path, 600, limit)
    used = sum(f.stat().st_blocks * 512 for f in tmp_path.rglob("*"))
    assert 0 < used <= limit + (4 << 20)


def test_should_fail_fast_when_the_master_is_gone(tmp_path: Path) -> None:
    script = (
        "put(range(count)); os.kill(master.pid, 9); begun = time.monotonic()\n"
        "for _ in range(3):\n"
        "    try: store.exist(keys); print('>>> answered')\n"
        "    except StoreUnavailable: pass\n"
        "print('>>>', time.monotonic() - begun < 5); os._exit(0) if not sys.stdout.flush() else None"
    )
    assert run(script, tmp_path, 10) == ["True"]


def test_a_master_without_its_libraries_names_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "mooncake_master"
    broken.write_text("#!/bin/sh\necho error while loading shared libraries: libcurl.so.4: no such file\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "master_program", lambda: str(broken))
    with pytest.raises(EmbeddedError, match=r"libcurl\.so\.4: no such file: on Debian install libibverbs1"):
        EmbeddedMaster(1, None, structlog.get_logger()).start()
