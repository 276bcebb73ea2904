"""The door's messages, of several threads, and its connection to a daemon that reads none."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

from kvprefetch.daemon.door.envelope import Bad
from kvprefetch.daemon.door.link import DaemonConnection
from kvprefetch.daemon.door.messages import Messages
from kvprefetch.shmring.wire.admin import Announce, Caller


def test_a_message_that_is_forgotten_leaves_the_one_of_the_same_id_that_came_at_the_same_time() -> None:
    messages, caller = Messages(), Caller(uid=0, groups=[])
    first, second = (messages.add(caller, "m", b"", []) for _ in range(2))
    messages.forget(first)
    assert messages.get(caller, "m") is second
    messages.forget(second)
    assert messages.get(caller, "m") is None


def test_callers_do_not_wait_for_a_daemon_that_stands_still(tmp_path: Path) -> None:
    order = Announce(caller=Caller(uid=0, groups=[]), number=1, name="m", engine="e", epoch=1, hashes=1, hash_bytes=8)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(tmp_path / "d.sock"))
        server.listen()
        link = DaemonConnection(tmp_path / "d.sock", lambda _: None, lambda: None)

        def announce() -> None:
            with contextlib.suppress(Bad):
                while True:
                    link.announce(order, bytes(8))

        caller = threading.Thread(target=announce, daemon=True)
        caller.start()
        caller.join(20)
        assert not caller.is_alive()
