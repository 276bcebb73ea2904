"""The door's messages, of several threads."""

from __future__ import annotations

from kvprefetch.daemon.door.messages import Messages
from kvprefetch.shmring.wire.admin import Caller


def test_a_message_that_is_forgotten_leaves_the_one_of_the_same_id_that_came_at_the_same_time() -> None:
    messages, caller = Messages(), Caller(uid=0, groups=[])
    first, second = (messages.add(caller, "m", b"", []) for _ in range(2))
    messages.forget(first)
    assert messages.get(caller, "m") is second
    messages.forget(second)
    assert messages.get(caller, "m") is None
