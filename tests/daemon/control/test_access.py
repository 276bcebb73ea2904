"""The control socket's file: one daemon gets the path, another one's operator reads why it does not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvprefetch.daemon.config.model import ConfigError, DaemonConfig
from kvprefetch.daemon.control import access
from kvprefetch.daemon.control.listener import listen
from kvprefetch.daemon.store.disk import open_folder

NOBODY = 65534


def test_of_daemons_that_start_at_once_one_gets_the_path(tmp_path: Path) -> None:
    """Also over a dead socket. None takes another's, bound and not yet listening, for dead."""
    start = threading.Barrier(8)

    def begin(path: Path) -> socket.socket | str:
        start.wait(10)
        try:
            return listen(DaemonConfig.model_validate({"socket": str(path)}))
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        for turn in range(60):
            path = tmp_path / f"{turn}.sock"
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
                dead.bind(str(path))
            results = list(threads.map(begin, [path] * 8))
            [winner] = [result for result in results if isinstance(result, socket.socket)]
            winner.close()
            results.remove(winner)
            another = f"socket: another daemon is serving: socket={str(path)!r}; --socket names another place"
            assert set(results) == {another}


def test_all_processes_of_many_engines_may_come_at_once(tmp_path: Path) -> None:
    """Before the loop has accepted one of them: eight engines with eight ranks each, and more."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(listen(DaemonConfig.model_validate({"socket": str(tmp_path / "s")})))
        for _ in range(200):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.settimeout(1)
            sock.connect(server.getsockname())


def test_a_lock_on_the_folder_delays_a_start_for_a_moment_only(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        listen(DaemonConfig.model_validate({"socket": str(tmp_path / "s")}), 0.05).close()
    finally:
        os.close(folder)


def test_a_daemon_that_hangs_with_a_full_queue_still_serves_there(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hangs:
        hangs.bind(str(path))
        hangs.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waits:
            waits.connect(str(path))
            with pytest.raises(ConfigError, match="another daemon is serving"):
                listen(DaemonConfig.model_validate({"socket": str(path)}))


@pytest.mark.parametrize("group", ["4294967295", "9" * 5000, "²"])
def test_a_group_that_cannot_be_is_one_line(tmp_path: Path, group: str) -> None:
    with pytest.raises(ConfigError, match=r"^socket_group: .{,200}$"):
        listen(DaemonConfig.model_validate({"socket": str(tmp_path / "s"), "socket_group": group}))


def as_nobody(work: Callable[[], object], number: int = NOBODY) -> str:
    """Return the error that `work` raises in a child of user and group nobody, or of this number."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(number)
            os.setuid(number)
            work()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def test_a_user_of_a_high_number_is_known_by_it() -> None:
    """Directories give such numbers; as signed ones they would match no configured user."""

    def look() -> None:
        ours, _theirs = socket.socketpair()
        raise ValueError(access.credentials_of(ours)[1:])

    text = as_nobody(look, 3_000_000_000)
    if text.startswith("OSError"):
        pytest.skip("this machine has no such user number")
    assert text == "ValueError: (3000000000, frozenset({3000000000}))"


def test_a_group_that_is_not_ones_own_leaves_no_socket_behind() -> None:
    with tempfile.TemporaryDirectory(prefix="kva-") as folder:
        os.chmod(folder, 0o777)
        path = Path(folder) / "s"
        text = as_nobody(lambda: listen(DaemonConfig.model_validate({"socket": str(path), "socket_group": "0"})))
        assert text.startswith("ConfigError: socket: cannot be bound: Operation not permitted: ")
        assert text.endswith("socket_group='0'; the daemon's user must be a member of that group")
        assert not path.exists()


def test_a_folder_for_the_disk_that_one_may_not_make_is_a_setting() -> None:
    with tempfile.TemporaryDirectory(prefix="kva-") as folder:
        os.chmod(folder, 0o755)
        text = as_nobody(lambda: open_folder(Path(folder, "kv"), structlog.get_logger()))
        assert text.startswith("ConfigError: disk: cannot be used: Permission denied; make a folder that belongs to ")
        assert f"(uid={NOBODY})" in text


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root is led astray by links of others")


@needs_root
@pytest.mark.parametrize(("uid", "mode"), [(NOBODY, 0o755), (0, 0o777), (0, 0o775)])
def test_root_binds_in_no_folder_where_another_user_could_replace_the_socket(
    tmp_path: Path, uid: int, mode: int
) -> None:
    os.chown(tmp_path, uid, -1)
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"^socket: other users could replace it .* folder_uid={uid} folder_mode=0"):
        listen(DaemonConfig.model_validate({"socket": str(tmp_path / "s")}))
    assert list(tmp_path.iterdir()) == []
    os.chown(tmp_path, 0, -1)
    tmp_path.chmod(0o1777)  # as /tmp: others cannot replace root's files there
    listen(DaemonConfig.model_validate({"socket": str(tmp_path / "s")})).close()


def test_a_link_in_the_socket_s_place_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user swaps the file between bind and chmod: only a patched bind meets that moment reliably."""
    secret, path = tmp_path / "secret", tmp_path / "s"
    secret.touch(mode=0o600)

    class Swapped(socket.socket):
        def bind(self, address: Any) -> None:
            super().bind(address)
            path.rename(tmp_path / "away")
            path.symlink_to(secret)

    monkeypatch.setattr(socket, "socket", Swapped)
    with pytest.raises(ConfigError, match=r"^socket: cannot be bound: another file is in its place: "):
        listen(
            DaemonConfig.model_validate({"socket": str(path), "socket_mode": "0666", "socket_group": str(os.getegid())})
        )
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="the path exists and is not a socket"):
        listen(DaemonConfig.model_validate({"socket": str(path)}))
    assert secret.exists()


def test_mode_and_folder_are_as_configured_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        for name, mode in (("a", 0o660), ("b", 0o666), ("c", 0o600)):
            path = tmp_path / "run" / name
            with listen(DaemonConfig.model_validate({"socket": str(path), "socket_mode": f"{mode:04o}"})):
                assert stat.S_IMODE(path.stat().st_mode) == mode
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755, "others pass through it to the socket"
