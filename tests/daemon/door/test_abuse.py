"""The HTTP door of a real daemon under abuse: wrong requests, slow clients, floods, changed bytes."""

from __future__ import annotations

import contextlib
import io
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from kvprefetch.client.door import Door
from kvprefetch.daemon.config.model import hints_socket
from kvprefetch.daemon.door.__main__ import CONNECTIONS
from kvprefetch.daemon.door.app import CALLER, MAX_BODY, MAX_WAIT_MS, App
from kvprefetch.daemon.door.envelope import MAX_ACTIONS, Prefetch
from kvprefetch.daemon.door.messages import Messages
from kvprefetch.shmring.wire.admin import Caller
from tests.daemon.door.test_door import announce, message
from tests.daemon.stores import engine_with
from tests.lab.daemon import Daemon
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]


def test_bad_requests_are_one_line_each_and_cost_nobody_else(serve: Serve) -> None:
    daemon = serve()
    engine, values = engine_with(daemon, "abuse", 8)
    door = Door(daemon.socket)

    def error(status: int, method: str, path: str, body: object = None) -> str:
        found, answer = door.ask(method, path, body)
        assert found == status, answer
        return str(answer["error"])

    hints = "/v1/kv_hints"
    assert "token_ids" in error(400, "POST", hints, message("m", {}))
    assert "block_hashes.0" in error(400, "POST", hints, message("m", {"block_hashes": ["x"]}))
    assert f"should be 0 to {MAX_WAIT_MS}" in error(400, "GET", f"{hints}/m?wait_ms=999999")
    assert "message_id='m'" in error(404, "GET", f"{hints}/m")
    assert "no such path" in error(404, "GET", "/v2")
    assert "another method" in error(405, "DELETE", f"{hints}/m")
    assert "did not say how it does" in error(422, "POST", hints, message("m", {"token_ids": [1] * 99}))
    too_long = {"block_hashes": ["ab" * 32] * 5000}
    assert "is longer than engine abuse takes: hashes=5000" in error(400, "POST", hints, message("m", too_long))
    assert engine.load(list(values), name="after") == list(values.values())


def test_a_body_that_is_too_large_is_refused_before_it_is_read(serve: Serve) -> None:
    daemon = serve()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(20)
        sock.connect(str(hints_socket(daemon.socket)))
        head = f"POST /v1/kv_hints HTTP/1.1\r\nHost: x\r\nContent-Length: {100 << 20}\r\n\r\n"
        sock.sendall(head.encode())
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    assert b" 413 " in answer.splitlines()[0]
    assert str(MAX_BODY).encode() in answer


@pytest.mark.parametrize("field", ["token_ids", "block_hashes"])
def test_a_check_ends_at_the_first_bad_item(field: str) -> None:
    """An error for each of a million would take a gigabyte."""
    with pytest.raises(ValidationError) as error:
        Prefetch.model_validate({field: ["no", "no"]})
    assert error.value.error_count() == 1


def test_slow_and_silent_clients_keep_nobody_out(serve: Serve) -> None:
    daemon = serve()
    engine, values = engine_with(daemon, "slow", 4)
    clients = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(CONNECTIONS + 50)]
    try:
        for number, each in enumerate(clients):
            each.connect(str(hints_socket(daemon.socket)))
            if number % 2:
                each.sendall(b"POST /v1/kv_hints HTTP/1.1\r\nContent-Length: 900\r\n\r\n{")
        assert announce(daemon, "m", list(values))["outcome"] in ("accepted", "completed")
    finally:
        for each in clients:
            each.close()
    assert engine.load(list(values)) == list(values.values())


def test_a_flood_of_prompts_that_never_come_leaves_hints_their_time(serve: Serve) -> None:
    """A thousand announcements of what the store has, and none is asked for: the neighbour's loads go on."""
    daemon = serve()
    flooded, values = engine_with(daemon, "flooded", 32)
    neighbour, own = engine_with(daemon, "neighbour", 16)
    chain, stop = list(values), threading.Event()
    statuses: list[int] = []

    def flood() -> None:
        door, number = Door(daemon.socket), 0
        while not stop.is_set():
            number += 1
            hashes = [digest.hex() for digest in chain[: 1 + number % 32]]
            prompt = {"block_hashes": hashes, "engine": "flooded", "ttl_ms": 600_000}
            name = f"{threading.get_ident()}-{number}"
            statuses.append(door.ask("POST", "/v1/kv_hints", message(name, *[prompt] * MAX_ACTIONS))[0])

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: len(statuses) > 8, what="the flood has begun")
        for number in range(50):
            began = time.monotonic()
            assert neighbour.load(list(own), name=f"n{number}") == list(own.values())
            assert time.monotonic() - began < 5
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(statuses) <= {202, 429}
    assert len(statuses) * MAX_ACTIONS > 500
    flooded.close()
    neighbour.close()


def test_each_user_has_a_rate_of_its_own() -> None:
    nobody: Any = None  # asked for no engine: actions of another type are ignored
    app, statuses = App(nobody, Messages()), list[str]()

    def announced(uid: int, name: str) -> str:
        body = io.BytesIO(json.dumps(message(name, *[{}] * MAX_ACTIONS)).replace("kv.prefetch", "kv.pin").encode())
        said = {"wsgi.input": body, CALLER: Caller(uid=uid, groups=[])}
        route = {"REQUEST_METHOD": "POST", "PATH_INFO": "/v1/kv_hints"}
        app({**route, **said}, lambda status, _: statuses.append(status))
        return statuses[-1]

    assert announced(1, "first") == "202 Accepted"
    assert {announced(1, str(number)) for number in range(20)} == {"202 Accepted", "429 Too Many Requests"}
    assert announced(2, "first") == "202 Accepted"


def test_no_bytes_end_the_process(serve: Serve) -> None:
    """Seeded: cut, doubled and changed requests. JSON of every shape is in tests/fuzz."""
    daemon, choice = serve(), random.Random(33)
    engine, values = engine_with(daemon, "fuzzed", 4)
    body = json.dumps(message("m", {"block_hashes": ["ab" * 32], "ttl_ms": 5})).encode()
    request = b"POST /v1/kv_hints HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    for _ in range(150):
        changed = bytearray(request)
        for _ in range(choice.randrange(1, 6)):
            at = choice.randrange(len(changed))
            changed[at : at + choice.randrange(4)] = choice.randbytes(choice.randrange(4))
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(0.05)
            sock.connect(str(hints_socket(daemon.socket)))
            sock.sendall(changed[: choice.randrange(len(changed))] if choice.random() < 0.3 else changed)
            sock.recv(4096)
    assert not daemon.records("door.failed")
    assert engine.load(list(values)) == list(values.values())
