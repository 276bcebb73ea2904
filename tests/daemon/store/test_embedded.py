"""The private master and the folder of its disk, with a real mooncake_master."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from kvprefetch.daemon.config.model import ConfigError
from kvprefetch.daemon.store import embedded
from kvprefetch.daemon.store.disk import DiskSpec
from kvprefetch.daemon.store.embedded import EmbeddedMaster
from kvprefetch.daemon.store.errors import StoreError
from tests.lab import process
from tests.support.descriptors import targets
from tests.support.waiting import eventually

pytest.importorskip("mooncake")


@pytest.mark.parametrize(
    ("text", "path", "size"),
    [("/a", "/a", None), ("/a:20GiB", "/a", 20 << 30), ("/a:b/c", "/a:b/c", None), ("/a:1.5gb", "/a", 1_500_000_000)],
)
def test_should_parse_a_disk(text: str, path: str, size: int | None) -> None:
    assert DiskSpec.parse(text) == DiskSpec(Path(path), size)


@pytest.mark.parametrize("text", ["", "a", "/a:", "/a:20XB", "/a:1KiB", "/a/../b", ":1GiB", "/a:" + "9" * 400])
def test_should_refuse_a_wrong_disk_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^disk: .*should be") as caught:
        DiskSpec.parse(text)
    assert "\n" not in str(caught.value)


def test_should_leave_alone_a_disk_that_another_daemon_owns(tmp_path: Path) -> None:
    """Mooncake does not look: a second daemon would write over the files of the first."""
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    master = EmbeddedMaster(1, DiskSpec(tmp_path, None), structlog.get_logger())
    with pytest.raises(StoreError, match=f"^disk: another daemon uses it: disk='{tmp_path}'$"):
        master.start()
    assert master.pid is None
    os.close(other)


def test_should_tell_an_end_by_itself_from_a_stop() -> None:
    with capture_logs() as log:
        master = EmbeddedMaster(1, None, structlog.get_logger())
        master.start()
        pid = master.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not master.alive(), what="its end")
        master.stop()
    assert log[-1] == {"event": "master.stopped", "log_level": "info", "pid": pid, "code": -9}


def test_should_start_answer_and_stop() -> None:
    master = EmbeddedMaster(1, None, structlog.get_logger())
    settings = master.start()
    try:
        assert master.alive()
        pid = master.pid
        assert pid
        assert settings.global_segment_size == 16 << 20
        host, port = settings.master_server_address.split(":")
        assert host == "127.0.0.1"
        listening = _listening(pid)
        assert int(port) in {p for _, p in listening}
        assert {address for address, _ in listening} == {"0100007F"}, "the master must listen on loopback only"
    finally:
        with capture_logs() as log:
            master.stop()
            master.stop()
    assert log == [{"event": "master.stopped", "log_level": "info", "pid": pid}]
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
        chosen, draw = iter([taken]), embedded.free_ports

        def ports(asked: int | None) -> tuple[int, int]:
            port, metrics_port = draw(asked)
            return next(chosen, port), metrics_port

        monkeypatch.setattr(embedded, "free_ports", ports)
        master = EmbeddedMaster(1, None, structlog.get_logger())
        try:
            address = master.start().master_server_address
            assert address != f"127.0.0.1:{taken}"
            assert master.pid is not None
            assert int(address.rpartition(":")[2]) in {port for _, port in _listening(master.pid)}
        finally:
            master.stop()


def test_the_ports_of_a_master_differ_however_few_are_free() -> None:
    """With one port for both, a master listens there until its second socket fails, and ends 0.1 s later."""
    draws = "from kvprefetch.daemon.store.embedded import free_ports; print(*(first != second for first, second in "
    draws += "(free_ports(None) for _ in range(50))))"
    few = f"ip link set lo up && echo 40000 40003 >/proc/sys/net/ipv4/ip_local_port_range && exec {sys.executable} -c"
    asked = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    if subprocess.run([*asked, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel gives no network namespace here (unshare --user --net)")
    said = subprocess.run([*asked, f'{few} "{draws}"'], capture_output=True, text=True, check=False, cwd=process.REPO)
    assert said.stdout.split() == ["True"] * 50, said.stderr


def _listening(pid: int) -> set[tuple[str, int]]:
    inodes = {target[8:-1] for target in targets(pid)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {(a, int(p, 16)) for r in rows if r[3] == "0A" and r[9] in inodes for a, p in [r[1].split(":")]}


def test_a_master_without_its_libraries_names_the_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "mooncake_master"
    broken.write_text("#!/bin/sh\necho error while loading shared libraries: libcurl.so.4: no such file\nexit 127\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "master_program", lambda: str(broken))
    with pytest.raises(StoreError, match=r"libcurl\.so\.4: no such file: as root: apt-get install -y libibverbs1"):
        EmbeddedMaster(1, None, structlog.get_logger()).start()
