"""Commands that need no daemon to be judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvprefetch.daemon.control.admin import Admin
from kvprefetch.daemon.work.calls import Call
from kvprefetch.shmring.wire.admin import Remove, Removed

ALICE, BOB = 1000, 1001


class Commands:
    """Commands of users, and the store calls that they begin."""

    def __init__(self, namespaces: str = "per_user") -> None:
        self.begun: list[Call] = []
        shared: Any = SimpleNamespace(
            store=SimpleNamespace(remove=print),
            pools=SimpleNamespace(start=self.begun.append),
            config=SimpleNamespace(namespaces=namespaces),
        )
        epochs: Any = SimpleNamespace()
        self.admin, self.replies = Admin(shared, epochs), list[Any]()

    def remove(self, uid: int | None, *keys: str) -> int:
        self.admin.command(Remove(keys=list(keys)), uid, self.replies.append)
        return len(self.begun)


def test_a_user_has_one_removal_at_a_time() -> None:
    """Saves of all engines wait behind it."""
    commands = Commands()
    assert commands.remove(ALICE, "u1000@a") == 1
    assert commands.remove(ALICE, "u1000@b") == 1
    assert "another removal or question of this user is running: uid=1000" in commands.replies.pop().text
    assert commands.remove(BOB, "u1001@a") == 2
    assert commands.remove(None, "u1000@a") == 3
    commands.begun[0].on_result((1, 2))
    assert commands.replies.pop() == Removed(removed=1, failed=2)
    assert commands.remove(ALICE, "u1000@b") == 4
    commands.begun[3].on_result(RuntimeError("the store is not open"))
    assert commands.replies.pop().text == "the store removed nothing: the store is not open"
    assert commands.remove(ALICE, "u1000@b") == 5


@pytest.mark.parametrize("key", ["u1001@m@00", "u10000@m@00", "u1000", "m@00"])
def test_a_user_removes_no_value_of_another_user(key: str) -> None:
    commands = Commands()
    assert commands.remove(ALICE, "u1000@m@00", key) == 0
    assert f"another user's values: uid=1000 key={key!r}" in commands.replies.pop().text
    assert commands.remove(None, "u1000@m@00", key) == 1


def test_where_users_share_values_only_an_operator_removes_them() -> None:
    commands = Commands("shared")
    assert commands.remove(ALICE, "m@00") == 0
    assert "only root and the daemon's user may remove values: uid=1000" in commands.replies.pop().text
    assert commands.remove(None, "m@00") == 1
