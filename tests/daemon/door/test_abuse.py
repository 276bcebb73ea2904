"""The HTTP door of a real daemon under abuse: wrong requests, slow clients, floods, changed bytes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvprefetch.client.door import Door
from kvprefetch.daemon.config.model import door_socket
from kvprefetch.daemon.door import app as app_module
from kvprefetch.daemon.door.__main__ import BODIES, CONNECTIONS, SLOW_S
from kvprefetch.daemon.door.app import CALLER, MAX_BODY, MAX_WAIT_MS, WAITERS, App
from kvprefetch.daemon.door.envelope import MAX_ACTIONS, MAX_TOKENS, Answered, Prefetch
from kvprefetch.daemon.door.messages import Messages
from kvprefetch.shmring.wire.admin import Announce, AnnounceStep, Caller, Engine, EngineQuery
from tests.daemon.door.test_door import announce, message, token_file
from tests.daemon.stores import engine_with, stored
from tests.lab.daemon import Daemon
from tests.lab.passes import percentile
from tests.lab.process import descendants, free_ports
from tests.support.fake_engine import FakeEngine
from tests.support.package import ROOT
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]


def test_bad_requests_are_one_line_each_and_cost_nobody_else(shared_daemon: Daemon) -> None:
    daemon = shared_daemon
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


def test_a_body_that_is_too_large_is_refused_before_it_is_read(shared_daemon: Daemon) -> None:
    daemon = shared_daemon
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(20)
        sock.connect(str(door_socket(daemon.socket)))
        head = f"POST /v1/kv_hints HTTP/1.1\r\nHost: x\r\nContent-Length: {100 << 20}\r\n\r\n"
        sock.sendall(head.encode())
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert " 413 " in head.splitlines()[0]
    wrong = f"Request Entity Too Large: exceeds max_body of {MAX_BODY}: bytes={100 << 20}"
    assert json.loads(body) == {"error": wrong}


@pytest.mark.parametrize(
    ("unit", "count", "status"),
    [
        pytest.param("[0]", 1_800_000, 400, id="lists"),
        pytest.param('{"a":0}', 900_000, 400, id="objects"),
        pytest.param("1", 3_600_000, 400, id="numbers"),
        pytest.param('"%05x"', 1_800_000, 404, id="strings"),
        pytest.param("%d", MAX_TOKENS, 404, id="tokens"),
    ],
)
def test_bodies_of_any_kind_take_a_bounded_memory(serve: Serve, unit: str, count: int, status: int) -> None:
    """Five at a time, each within the bound of one. Parsed, some have thirty times their size."""
    daemon = serve()
    assert Door(daemon.socket).ask("GET", "/v1/kv_hints/none")[0] == 404
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(daemon.pid)}
    [process] = [pid for pid, command in commands.items() if b"kvprefetch.daemon.door" in command]
    values = ",".join(unit % number for number in range(count)) if "%" in unit else ",".join([unit] * count)
    prompt = {"token_ids": None} if unit == "%d" else {"unread": None, "session_id": "s"}
    body = json.dumps(message("m", prompt)).replace("null", f"[{values}]").encode()
    assert len(body) < MAX_BODY
    head = f"POST /v1/kv_hints HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"

    def post(_: int) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(60)
            sock.connect(str(door_socket(daemon.socket)))
            sock.sendall(head.encode() + body)
            return int(b"".join(iter(lambda: sock.recv(4096), b"")).split()[1])

    with ThreadPoolExecutor(5) as pool:
        assert set(pool.map(post, range(5))) == {status}
    most = next(line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert int(most.split()[1]) < 256 << 10, most


def test_bodies_that_still_come_are_bounded_over_all_connections(serve: Serve) -> None:
    """The door keeps them in files that have no name; beyond the bound the longest one is refused."""
    daemon = serve()
    engine, values = engine_with(daemon, "bodies", 4)
    assert announce(daemon, "before", list(values))["outcome"] in ("accepted", "completed")
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(daemon.pid)}
    [process] = [pid for pid, command in commands.items() if b"kvprefetch.daemon.door" in command]

    def kept() -> int:
        files = [file.stat() for file in Path(f"/proc/{process}/fd").iterdir()]
        return sum(each.st_size for each in files if stat.S_ISREG(each.st_mode))

    head = f"POST /v1/kv_hints HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY - 1}\r\n\r\n".encode()
    count, part = BODIES // MAX_BODY + 2, b" " * (MAX_BODY - (1 << 20))
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(count)]
        answers = []
        for each in callers:
            each.settimeout(20)
            each.connect(str(door_socket(daemon.socket)))
            with contextlib.suppress(ConnectionError):
                each.sendall(head + part)
            assert kept() <= BODIES + MAX_BODY // 16
        for each in callers:
            each.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                answers.append(each.recv(4096))
        assert answers
        assert {each.split()[1] for each in answers} == {b"503"}
        assert "the bodies of all callers" in json.loads(answers[0].partition(b"\r\n\r\n")[2])["error"]
        assert announce(daemon, "after", list(values))["outcome"] in ("accepted", "completed"), "a short one is served"
    engine.close()


def test_a_caller_that_still_sends_gets_the_answer_to_too_large_a_message(serve: Serve) -> None:
    """The door answers after the header, and reads no further."""
    prompt = {"token_ids": [123456] * (MAX_BODY // 8)}
    status, answer = Door(serve().socket).ask("POST", "/v1/kv_hints", message("m", prompt))
    assert (status, f"max_body of {MAX_BODY}" in answer["error"]) == (413, True)


@pytest.mark.parametrize("field", ["token_ids", "block_hashes"])
def test_a_check_ends_at_the_first_bad_item(field: str) -> None:
    """An error for each of a million would take a gigabyte."""
    with pytest.raises(ValidationError) as error:
        Prefetch.model_validate({field: ["no", "no"]})
    assert error.value.error_count() == 1


def test_slow_and_silent_clients_keep_nobody_out(serve: Serve, tmp_path: Path) -> None:
    """On the Unix socket and on the port, which share a process."""
    (port,) = free_ports(1)
    daemon = serve(extra=("--door-port", str(port), "--door-token", str(token_file(tmp_path))))
    engine, values = engine_with(daemon, "slow", 4)
    places: dict[int, Any] = {socket.AF_UNIX: str(door_socket(daemon.socket)), socket.AF_INET: ("127.0.0.1", port)}
    clients = [socket.socket(family, socket.SOCK_STREAM) for family in places for _ in range(CONNECTIONS - 1)]
    clients += [socket.socket(family, socket.SOCK_STREAM) for family in places for _ in range(51)]
    try:
        for number, each in enumerate(clients):
            each.connect(places[each.family])
            if number % 2:
                each.sendall(b"POST /v1/kv_hints HTTP/1.1\r\nContent-Length: 900\r\n\r\n{")
            if number == 2 * CONNECTIONS - 3:
                began = time.monotonic()
                assert announce(daemon, "full", list(values))["outcome"] in ("accepted", "completed")
                assert time.monotonic() - began < SLOW_S / 2, "without waiting until one is closed"
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


# Offers a thousand prompts a second, from a process of its own; at its end it prints how many had an answer.
FLOOD = """
import json, sys, threading, time
from pathlib import Path
from kvprefetch.client.door import Door
from tests.daemon.door.test_door import message
path, size, threads, hashes = Path(sys.argv[1]), 16, 64, sys.argv[2:]
statuses = []
def flood(name):
    door, number, began = Door(path), 0, time.monotonic()
    while True:
        time.sleep(max(0.0, began + number * size * threads / 1000 - time.monotonic()))
        number += 1
        prompt = {"block_hashes": hashes[: 1 + number % 32], "engine": "flooded", "ttl_ms": 1000}
        statuses.append(door.ask("POST", "/v1/kv_hints", message(f"{name}-{number}", *[prompt] * size))[0])
for name in range(threads):
    threading.Thread(target=flood, args=(name,), daemon=True).start()
began = time.monotonic()
sys.stdin.read()
count, refused, s = len(statuses), statuses.count(429), time.monotonic() - began
print(f"{count * size / s:.0f} answered a second, {refused / count:.0%} refused")
"""


# Computes as a neighbour would: what any process costs the requests of a machine with two cores.
COMPUTE = """
import os, sys, threading
os.nice(10)
def compute():
    while True:
        pass
threading.Thread(target=compute, daemon=True).start()
print("computing", flush=True)
sys.stdin.read()
"""


@pytest.mark.stress
def test_requests_are_answered_as_soon_beside_a_busy_door(serve: Serve) -> None:
    """More announcements of what never comes than the door takes; printed: how soon hinted requests are answered.

    Beside the door, and beside a process that computes with the door's priority.
    """
    daemon, size, own = serve(memory="512MiB", staging="24MiB"), 256 << 10, list[dict[bytes, bytes]]()
    flooded, values = engine_with(daemon, "flooded", 32)
    neighbour = FakeEngine(daemon.socket, engine_id="neighbour", prefix="neighbour", block_bytes=size)
    for number in range(16):  # more than staging has room for: each request fetches its prompt
        digests = [hashlib.sha256(f"{number}-{block}".encode()).digest() for block in range(16)]
        own.append({digest: digest * (size // 32) for digest in digests})
        neighbour.save(own[-1])
        stored(daemon, 32 + 16 * len(own))

    def times(name: str, count: int = 1000) -> dict[str, list[float]]:
        for number in range(count):
            prompt = own[number % len(own)]
            assert neighbour.load(list(prompt), name=f"{name}{number}") == list(prompt.values())
        said = [line for line in daemon.records("request.done") if line["request_id"].startswith(name)]
        assert len(said) > 0.9 * count, "the last ones are about to come"
        return {field: sorted(line[field] for line in said) for field in ("hint_seen_ms", "answered_ms")}

    times("warm", 100)
    found = {"quiet": times("quiet")}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", COMPUTE], stdin=pipe, stdout=pipe, text=True) as neighbours:
        assert neighbours.stdout is not None
        assert neighbours.stdout.readline() == "computing\n"
        found["beside a process that computes"] = times("computed")
        neighbours.communicate()
    command = [sys.executable, "-c", FLOOD, str(daemon.socket), *(digest.hex() for digest in values)]
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as flood:
        eventually(lambda: daemon.records("announcement.done"), what="the flood has begun")
        found["busy"] = times("busy")
        said = flood.communicate()[0]
    print(said)
    for name, each in found.items():
        print(name, {field: [round(percentile(ms, at), 1) for at in (0.5, 0.9, 0.99, 1)] for field, ms in each.items()})
    assert "% refused" in said
    assert percentile(found["busy"]["answered_ms"], 0.99) < 3 * percentile(found["quiet"]["answered_ms"], 0.99) + 20
    computed = percentile(found["beside a process that computes"]["answered_ms"], 0.99)
    assert percentile(found["busy"]["answered_ms"], 0.99) < 2 * computed + 10
    flooded.close()
    neighbour.close()


def test_callers_that_wait_for_an_end_take_nobody_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "FIRST_S", 20.0)
    messages, caller = Messages(), Caller(uid=1, groups=[])

    class Late:
        """The daemon, which answers a moment later."""

        def engine(self, _: EngineQuery) -> Engine:
            sizes = {"block_tokens": 1, "block_bytes": 1, "max_blocks": 9, "hash_tokens": 1}
            return Engine.model_validate({"engine": "e", "epoch": 1, **sizes, "hash_algorithm": "", "hash_probe": ""})

        def announce(self, order: Announce, _: bytes) -> None:
            accepted = AnnounceStep(number=order.number, outcome="accepted")
            threading.Timer(0.1, messages.note, [accepted]).start()

    link: Any = Late()
    app = App(link, messages)
    opened = messages.add(caller, "open", b"", [Answered(action_id="a", outcome="deferred")])

    def ask(method: str, path: str, query: str = "", body: object = None) -> Any:
        said = {"REQUEST_METHOD": method, "PATH_INFO": f"/v1/kv_hints{path}", "QUERY_STRING": query, CALLER: caller}
        return json.loads(b"".join(app({**said, "wsgi.input": io.BytesIO(json.dumps(body).encode())}, lambda *_: None)))

    with ThreadPoolExecutor(2 * WAITERS) as threads:
        waiting = [threads.submit(ask, "GET", "/open", "wait_ms=20000") for _ in range(2 * WAITERS)]
        eventually(lambda: sum(each.done() for each in waiting) == WAITERS, what="the others have the answer of now")
        prompt = message("m", {"block_hashes": ["ab" * 32]})
        assert ask("POST", "", body=prompt)["actions"][0]["outcome"] == "accepted"
        assert sum(each.done() for each in waiting) == WAITERS, "they still wait"
        messages.note(AnnounceStep(number=messages.number(opened, 0, 1), outcome="expired"))


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
            sock.connect(str(door_socket(daemon.socket)))
            sock.sendall(changed[: choice.randrange(len(changed))] if choice.random() < 0.3 else changed)
            sock.recv(4096)
    assert not daemon.records("door.failed")
    assert engine.load(list(values)) == list(values.values())
