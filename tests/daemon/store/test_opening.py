"""Opening a store whose servers do not answer: real Mooncake, one line, and soon."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from typing import Any

import pytest
import structlog

from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.errors import StoreError
from tests.daemon.store.test_store import SETTINGS

pytestmark = pytest.mark.store


def test_should_give_up_soon_on_a_master_that_accepts_and_says_nothing() -> None:
    pytest.importorskip("mooncake")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        store = Store(replace(SETTINGS, master_server_address=address), structlog.get_logger(), rpc_timeout_ms=1000)
        begun = time.monotonic()
        with pytest.raises(StoreError, match=f"set-up failed.*{address}"):
            store.open()
        assert time.monotonic() - begun < 15, "each of Mooncake's twenty tries waits, and holds the interpreter's lock"
        store.close()


@pytest.mark.parametrize("key", ["master_server_address", "metadata_server"])
def test_should_open_with_one_line_when_one_of_its_servers_does_not_listen(key: str) -> None:
    """Mooncake waits ten seconds for a metadata server, and holds the interpreter's lock."""
    pytest.importorskip("mooncake")
    with socket.create_server(("127.0.0.1", 0)) as there:
        servers: Any = {"master_server_address": f"127.0.0.1:{there.getsockname()[1]}", key: "127.0.0.1:1"}
        store = Store(replace(SETTINGS, **servers), structlog.get_logger())
        with pytest.raises(StoreError, match=rf"127\.0\.0\.1:1: Connection refused \({key}\)") as caught:
            store.open()
        store.close()
    assert "\n" not in str(caught.value)
