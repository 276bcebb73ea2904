"""Where engines, daemons and commands meet: one order for all, of root, of users, and where their folders are lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvprefetch.shmring.wire import control_socket
from kvprefetch.shmring.wire.control_socket import own_socket, sockets
from tests.support.ordinary import NOBODY, effective_user

NAME = "kvprefetchd.sock"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /, with those of the system, of a user who is logged in, and of everybody."""
    for folder in (tmp_path, *tmp_path.parents[:3]):  # pytest's own; with several processes one more
        if folder.stat().st_uid == os.geteuid() and folder.name != "tmp":
            folder.chmod(0o755)
    for name, mode in (("system", 0o755), ("users", 0o755), ("users/65534", 0o700), ("tmp", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    os.chown(tmp_path / "users/65534", NOBODY, NOBODY)
    monkeypatch.setattr(control_socket, "SYSTEM_SOCKET", f"{tmp_path}/system/{NAME}")
    monkeypatch.setattr(control_socket, "USERS_FOLDER", f"{tmp_path}/users")
    monkeypatch.setattr(control_socket, "TEMP_FOLDER", f"{tmp_path}/tmp")
    return tmp_path


def seen(root: Path, **environ: str) -> tuple[str, list[str]]:
    """Where an ordinary user's daemon listens, and where the user's engines look."""
    with effective_user(NOBODY):
        found = own_socket(environ), sockets(environ)
    return found[0].removeprefix(f"{root}/"), [each.removeprefix(f"{root}/") for each in found[1]]


def test_a_user_s_engine_looks_at_the_system_s_place_then_where_the_user_s_daemon_listens(root: Path) -> None:
    """XDG_RUNTIME_DIR is missing under su and cron: the folder that it names is found without, if it is there."""
    system, users, last = f"system/{NAME}", f"users/65534/kvprefetch/{NAME}", f"tmp/kvprefetch-65534/{NAME}"
    for environ in ({}, {"XDG_RUNTIME_DIR": f"{root}/users/65534"}, {"XDG_RUNTIME_DIR": "users/65534"}):
        assert seen(root, **environ) == (users, [system, users, last])
    (root / "mine").mkdir(0o700)
    os.chown(root / "mine", NOBODY, NOBODY)
    mine = f"mine/kvprefetch/{NAME}"
    assert seen(root, XDG_RUNTIME_DIR=f"{root}/mine") == (mine, [system, mine, users, last])
    (root / "users/65534").rmdir()
    assert seen(root) == (last, [system, last])


@pytest.mark.parametrize(("mode", "uid"), [(0o700, 0), (0o770, NOBODY), (0o707, NOBODY)])
def test_a_folder_of_another_user_or_open_to_others_is_passed_over(root: Path, mode: int, uid: int) -> None:
    """As after `su`, which keeps the variable of the user before."""
    folder = root / "users/65534"
    folder.chmod(mode)
    os.chown(folder, uid, uid)
    assert seen(root, XDG_RUNTIME_DIR=str(folder))[0] == f"tmp/kvprefetch-65534/{NAME}"


def test_what_is_named_is_the_only_place(root: Path) -> None:
    """The unit's folder is where its daemon listens, and nothing to an engine: that may be a unit of its own."""
    assert seen(root, KVPREFETCHD_SOCKET="/x/s") == ("/x/s", ["/x/s"])
    own, looked = seen(root, RUNTIME_DIRECTORY="/run/a:/run/b")
    assert own == f"/run/a/{NAME}"
    assert looked == seen(root)[1]


def test_root_and_the_user_of_the_system_s_folder_have_its_place_alone(root: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": f"{root}/users/65534"}
    assert [own_socket(environ)] == sockets(environ) == [f"{root}/system/{NAME}"]
    os.chown(root / "system", NOBODY, NOBODY)
    assert seen(root, **environ) == (f"system/{NAME}", [f"system/{NAME}"])
