"""Orders to a running daemon that need no daemon to be judged."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import structlog

from kvprefetch.daemon.control.admin import Purges
from kvprefetch.daemon.store.buckets import Removal
from kvprefetch.daemon.store.namespaces import Namespaces
from kvprefetch.shmring.wire.admin import Purge

ALICE, BOB = 1000, 1001


def test_a_user_has_one_purge_at_a_time_and_an_operator_any_number() -> None:
    """Saves of all engines wait behind it."""
    begun: list[Callable[[Future[Removal]], None]] = []
    store: Any = SimpleNamespace(remove_matching=print)
    pools: Any = SimpleNamespace(save=lambda work, done: begun.append(done))
    known = Namespaces(None, structlog.get_logger())
    known.claim(ALICE, {"alice@": {}}, shared=False, in_use=())
    known.claim(BOB, {"bob@": {}}, shared=False, in_use=())
    purges, said = Purges(store, pools, known), []

    def purge(uid: int | None, prefix: str) -> int:
        purges.start([], [], Purge(prefixes=[prefix], timeout_ms=1000), uid, said.append)
        return len(begun)

    assert purge(ALICE, "alice@") == 1
    assert purge(ALICE, "alice@") == 1
    assert "another purge of this user is running: uid=1000" in said.pop().text
    assert purge(BOB, "bob@") == 2
    assert purge(None, "alice@") == purge(None, "bob@") - 1 == 3
    gone: Future[Removal] = Future()
    gone.set_result(Removal(True, 1))
    begun[0](gone)
    assert said.pop().text == "every key is gone; 1 removed: alice@"
    assert purge(ALICE, "alice@") == 4, "it belongs to nobody now"
    assert "may remove what is another's: uid=1000: alice@" in said.pop().text
