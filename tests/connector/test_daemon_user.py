"""Which daemon an engine speaks to, by the user that the kernel names: another one gets no hello."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvprefetch.connector.attach import link as link_module
from kvprefetch.connector.attach.epoch import SchedulerEpoch
from kvprefetch.connector.attach.link import Link
from kvprefetch.shmring.wire.codec import receive_message
from tests.connector.played_daemon import Server, hello
from tests.support.ordinary import NOBODY
from tests.support.waiting import eventually


def listen_as(server: Server, uid: int) -> None:
    """From now on the kernel says of connections that they are to a process of this user."""
    if (child := os.fork()) == 0:
        try:
            os.setuid(uid)
            server.sock.listen(4)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("trusted", "accepted"), [(NOBODY, True), ("nobody", True), (0, False), ("no-such", False)])
def test_an_engine_speaks_only_to_a_daemon_of_root_its_own_user_or_the_configured_one(
    tmp_path: Path,
    trusted: str | int,
    accepted: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever can put a socket in the daemon's place is handed neither keys nor KV."""

    monkeypatch.setattr(link_module, "FINAL_RETRY_S", 0.05)
    server = Server(tmp_path / "d.sock")

    def heard() -> bool:
        sock, _ = server.sock.accept()
        with sock:
            sock.settimeout(30)
            return receive_message(sock) is not None

    listen_as(server, NOBODY)
    with caplog.at_level(logging.INFO, "vllm.kvprefetch.link"):
        link = Link(str(server.path), lambda: hello("scheduler"), SchedulerEpoch.map, daemon_user=trusted)
        link.start()
        try:
            assert heard() == accepted
            if not accepted:
                eventually(lambda: caplog.records)
                assert not heard()
                [record] = caplog.records
                assert record.levelno == logging.ERROR
                assert f"daemon_user={trusted!r}" in record.message
                assert f"{server.path} does not run" in record.message
                assert f"uid={NOBODY} is neither root" in record.message
                listen_as(server, 0)  # a daemon of root's comes there
                eventually(heard)
        finally:
            link.close()
            server.close()
