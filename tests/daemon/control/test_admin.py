"""Commands that need no daemon to be judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import structlog

from kvprefetch.daemon.control.admin import Admin
from kvprefetch.daemon.store.namespaces import Namespaces
from kvprefetch.daemon.store.removal import Removal
from kvprefetch.daemon.work.calls import Call
from kvprefetch.shmring.wire.admin import Purge

ALICE, BOB = 1000, 1001


def test_a_user_has_one_purge_at_a_time_and_an_operator_any_number() -> None:
    """Saves of all engines wait behind it."""
    begun: list[Call] = []
    known = Namespaces(None, structlog.get_logger())
    known.claim(ALICE, {"alice@": {}}, shared=False, in_use=())
    known.claim(BOB, {"bob@": {}}, shared=False, in_use=())
    shared: Any = SimpleNamespace(
        store=SimpleNamespace(remove_matching=print),
        pools=SimpleNamespace(start=begun.append),
        namespaces=known,
    )
    epochs: Any = SimpleNamespace(attached=lambda uid=None: [])
    admin, replies = Admin(shared, epochs), list[Any]()

    def purge(uid: int | None, prefix: str) -> int:
        admin.command(Purge(prefixes=[prefix], timeout_ms=1000), uid, replies.append)
        return len(begun)

    assert purge(ALICE, "alice@") == 1
    assert purge(ALICE, "alice@") == 1
    assert "another purge of this user is running: uid=1000" in replies.pop().text
    assert purge(BOB, "bob@") == 2
    assert purge(None, "alice@") == purge(None, "bob@") - 1 == 3
    begun[0].on_result(Removal(True, 1))
    assert replies.pop().text == "every key is gone; 1 removed: alice@"
    assert purge(ALICE, "alice@") == 4, "it belongs to nobody now"
    assert "may remove another user's namespace: uid=1000: alice@" in replies.pop().text
