"""The HTTP door of a real daemon with a real store: announcements before requests, and all kinds of callers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvprefetch.client.door import Door
from kvprefetch.daemon.config.model import DaemonConfig, door_socket
from kvprefetch.daemon.control.door import PAUSE_NS, DoorSockets
from kvprefetch.daemon.door.envelope import MAX_ACTIONS, Answered, Bad
from kvprefetch.daemon.door.link import DaemonConnection
from kvprefetch.daemon.door.messages import MAX_ANSWERS, Messages
from kvprefetch.shmring.wire.admin import Announce, AnnounceStep, Caller, EngineQuery
from kvprefetch.shmring.wire.attach import Refused
from kvprefetch.shmring.wire.records import session_digest
from tests.daemon.cli.test_mode import switch
from tests.daemon.control.test_users import OPEN, OTHER, ask
from tests.daemon.stores import blocks, engine_with, request_line
from tests.lab.daemon import Daemon
from tests.lab.process import free_ports, frozen
from tests.support.auditor import Auditor, ask_daemon
from tests.support.command import kvprefetchd
from tests.support.fake_engine import FakeEngine
from tests.support.ordinary import effective_user
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]
Answer = tuple[int, dict[str, Any]]
TOKEN = "a token of sixteen bytes or more"


def token_file(folder: Path, text: str = TOKEN, mode: int = 0o600) -> Path:
    """Write the file that `door_token` names."""
    file = folder / "token"
    file.write_text(text)
    file.chmod(mode)
    return file


def message(name: str, *prompts: dict[str, Any]) -> dict[str, Any]:
    common = {"action_type": "kv.prefetch", "action_version": "1.0"}
    actions = [{"action_id": str(number), **common, "payload": prompt} for number, prompt in enumerate(prompts)]
    return {"protocol_version": "0.1", "message_id": name, "actions": actions}


def announce(daemon: Daemon, name: str, chain: list[bytes], **fields: Any) -> dict[str, Any]:
    """Announce one prompt, and return its first outcome."""
    hashes = [digest.hex() for digest in chain]
    status, answer = Door(daemon.socket).ask("POST", "/v1/kv_hints", message(name, {"block_hashes": hashes, **fields}))
    assert status == 202, answer
    [action] = answer["actions"]
    assert answer["message_id"] == name
    found: dict[str, Any] = action
    return found


def became(daemon: Daemon, name: str, outcome: str) -> dict[str, Any]:
    """Return the answer about a message, once it has this outcome."""

    def looked() -> dict[str, Any] | None:
        status, answer = Door(daemon.socket).ask("GET", f"/v1/kv_hints/{name}?wait_ms=1000")
        assert status == 200, answer
        [action] = answer["actions"]
        return action if action["outcome"] == outcome else None

    return eventually(looked, what=f"{name} is {outcome}")


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Daemon:
    """Of these tests, without an engine of the test before."""
    eventually(lambda: not ask_daemon(shared_daemon.socket).engines, what="the end of the engines before")
    return shared_daemon


def test_a_tool_s_end_is_announced_by_the_session_alone(daemon: Daemon) -> None:
    engine, values = engine_with(daemon, "tool", 12)
    chain = list(values)
    ask_door = Door(daemon.socket).ask
    status, unknown = ask_door("POST", "/v1/kv_hints", message("m0", {"session_id": "run-42"}))
    assert (status, unknown["actions"][0]["outcome"]) == (202, "missing")
    assert unknown["actions"][0]["reason"] == "no request of this session came lately"
    engine.load(chain[:10], session=session_digest("run-42"))
    assert ask_door("POST", "/v1/kv_hints", message("m1", {"session_id": "run-42", "expected_in_ms": 50}))[0] == 202
    done = became(daemon, "m1", "completed")
    assert (done["blocks"]["announced"], done["blocks"]["staged"]) == (10, 10)
    assert engine.load(chain, name="again", session=session_digest("run-42")) == list(values.values())
    line = request_line(daemon, "again")
    assert (line["announced_blocks"], line["announced_staged"]) == (10, 10)
    assert line["session_gap_ms"] > 0
    became(daemon, "m1", "used")
    engine.close()


def test_what_was_announced_is_a_hit_and_its_line_says_since_when(serve: Serve, auditor: Auditor) -> None:
    daemon = serve()
    engine, values = engine_with(daemon, "router", 40)
    chain, name = list(values), "router/1"  # a slash is no end of a name
    first = announce(daemon, name, chain, expected_in_ms=200)
    assert (first["outcome"] in ("accepted", "completed"), first["engine"]) == (True, "router")
    assert (first["blocks"]["started"], first["blocks"]["missing"]) == (40, 0)
    assert first["bytes"] == sum(map(len, values.values()))
    done = became(daemon, name, "completed")
    assert (done["blocks"]["fetched"], done["blocks"]["no_room"]) == (40, 0)
    again = announce(daemon, name, chain, expected_in_ms=200)
    assert again["outcome"] == "completed", "a message that came already is answered as it stands"
    for other in (message(name, {"block_hashes": [each.hex() for each in chain[:3]]}), message(name, {"engine": "x"})):
        status, answer = Door(daemon.socket).ask("POST", "/v1/kv_hints", other)
        assert (status, answer["error"].partition(":")[0]) == (409, "another body had this message_id")
    assert engine.load(chain, name="request") == list(values.values())
    line = request_line(daemon, "request")
    assert (line["announced_blocks"], line["announced_staged"], line["bytes"]) == (40, 40, 0)
    assert line["announced_ms"] > 0
    became(daemon, name, "used")
    [written] = daemon.records("announcement.done")
    assert (written["name"], written["outcome"], written["fetched_blocks"]) == (name, "used", 40)
    auditor.assert_idle(daemon.pid, daemon.socket)
    engine.close()


def test_every_outcome_has_its_word(serve: Serve) -> None:
    daemon = serve()
    engine, values = engine_with(daemon, "words", 8)
    chain = list(values)
    block = len(next(iter(values.values())))
    assert announce(daemon, "absent", list(blocks("nowhere", 3)))["outcome"] == "missing"
    clipped = announce(daemon, "clipped", chain, max_bytes=3 * block + 1)
    assert clipped["outcome"] in ("clipped", "completed")
    assert (clipped["reason"], clipped["blocks"]["started"]) == ("blocks=8 max=3", 3)
    assert announce(daemon, "part", chain[:6] + list(blocks("else", 2)))["blocks"]["missing"] == 2
    announce(daemon, "forgotten", chain[:5], ttl_ms=1)
    became(daemon, "forgotten", "expired")
    status, answer = Door(daemon.socket).ask(
        "POST",
        "/v1/kv_hints",
        {**message("other", {}), "actions": [{"action_id": "x", "action_type": "kv.pin", "action_version": "1.0"}]},
    )
    assert (status, answer["actions"][0]["outcome"]) == (202, "ignored")
    switch(daemon.socket, "shadow")
    shadow = announce(daemon, "shadow", chain)
    assert (shadow["outcome"], shadow["reason"]) == ("rejected", "nothing is staged for this engine now: mode=shadow")
    switch(daemon.socket, "on")
    with frozen(int(daemon.records("master.started")[0]["pid"])):
        assert announce(daemon, "later", chain)["outcome"] == "deferred", "the store does not say yet what it has"
        engine.close()
        assert became(daemon, "later", "rejected")["reason"] == "the engine is gone"


def test_a_prompt_that_names_a_block_twice_is_refused(daemon: Daemon) -> None:
    FakeEngine(daemon.socket)
    prompt = {"block_hashes": ["ab" * 32, "cd" * 32, "ab" * 32]}
    status, answer = Door(daemon.socket).ask("POST", "/v1/kv_hints", message("twice", prompt))
    assert (status, answer) == (400, {"error": "block_hashes: name a block twice, as no prompt does: hashes=3"})


def test_one_of_several_engines_is_named(daemon: Daemon) -> None:
    door = Door(daemon.socket)
    hashes = {"block_hashes": ["ab" * 32]}

    def refused(name: str, **fields: Any) -> str:
        status, answer = door.ask("POST", "/v1/kv_hints", message(name, {**hashes, **fields}))
        assert status == 404
        return str(answer["error"])

    assert "not one engine but 0" in refused("none")
    for name in ("one_dp0", "one_dp1"):
        FakeEngine(daemon.socket, engine_id=name, prefix=name)
    assert "attached: one_dp0 (model 'one_dp0'), one_dp1 (model 'one_dp1')" in refused("both")
    assert "engine='three'" in refused("three", engine="three")
    assert "model='llama'" in refused("model", model="llama")
    for name, fields in (("id", {"engine": "one_dp1"}), ("rank", {"dp_rank": 1})):
        _, answer = door.ask("POST", "/v1/kv_hints", message(name, {**hashes, **fields}))
        assert answer["actions"][0]["engine"] == "one_dp1"
    status, answer = door.ask(
        "POST", "/v1/kv_hints", message("mixed", {**hashes, "engine": "x"}, {**hashes, "dp_rank": 0})
    )
    assert status == 202
    assert [each["outcome"] for each in answer["actions"]] == ["rejected", "missing"]


def test_a_model_is_named_by_its_path_by_its_last_part_or_as_callers_do(daemon: Daemon) -> None:
    paths = [f"/models/{each}/{'long' * 100}/Llama-3-8B" for each in ("a", "b")]
    for number, path in enumerate(paths):
        models = (path, f"served-{number}")
        FakeEngine(daemon.socket, engine_id=f"engine{number}", prefix="Llama-3-8B", models=models)
    door, prompt = Door(daemon.socket), {"block_hashes": ["ab" * 32]}
    for number, model in ((1, paths[1]), (0, paths[0]), (1, "served-1")):
        status, answer = door.ask(
            "POST", "/v1/kv_hints", message(f"of-{model[-9:]}-{number}", {**prompt, "model": model})
        )
        assert (status, answer["actions"][0]["engine"]) == (202, f"engine{number}"), model
    for model, found in (("Llama-3-8B", 2), ("Llama", 0), ("served", 0)):
        status, answer = door.ask("POST", "/v1/kv_hints", message(f"not-{model}", {**prompt, "model": model}))
        assert (status, f"not one engine but {found}: model={model!r}" in answer["error"]) == (404, True)
        assert "engine1 (model 'Llama-3-8B', '/models/b/long" in answer["error"]
        assert "'served-1')" in answer["error"]
        assert len(answer["error"]) < 1000


def test_an_answer_that_comes_too_late_is_nobody_else_s(serve: Serve) -> None:
    daemon = serve()
    engines = [FakeEngine(daemon.socket, engine_id=name, prefix=name) for name in ("one", "two")]
    gone = threading.Event()
    link = DaemonConnection(daemon.socket, lambda _: None, gone.set)
    with ThreadPoolExecutor(1) as thread:
        with frozen(daemon.pid):
            with pytest.raises(Bad, match="did not answer"):
                link.engine(EngineQuery(engine="one"))
            second = thread.submit(link.engine, EngineQuery(engine="two"))
            time.sleep(0.2)  # it is on its way when the daemon goes on
        assert second.result().engine == "two"
    for engine in engines:
        engine.close()
    daemon.sigkill()
    assert gone.wait(10)


def processes(daemon: Daemon) -> list[int]:
    """The processes of its door."""
    found = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    return [int(each) for each in found if b"kvprefetch.daemon.door" in Path(f"/proc/{each}/cmdline").read_bytes()]


def test_outcomes_wait_for_a_process_that_does_not_read(daemon: Daemon) -> None:
    """A socket has room for some 270 of them."""
    engine, values = engine_with(daemon, "many", 1)
    prompt = {"block_hashes": [digest.hex() for digest in values], "ttl_ms": 3_000}
    for name in "abcdef":
        status, _ = Door(daemon.socket).ask("POST", "/v1/kv_hints", message(name, *[prompt] * MAX_ACTIONS))
        assert status == 202
    [pid] = processes(daemon)
    with frozen(pid):
        eventually(lambda: ask_daemon(daemon.socket).engines[0]["announcements_open"] == 0, 20, "the end of their time")
    for name in "abcdef":

        def outcomes(name: str = name) -> set[str]:
            _, answer = Door(daemon.socket).ask("GET", f"/v1/kv_hints/{name}")
            return {each["outcome"] for each in answer["actions"]}

        eventually(lambda: outcomes() == {"expired"}, what=lambda: f"each outcome of {name}: {outcomes()}")  # noqa: B023
    engine.close()


def test_a_process_that_dies_is_begun_again_and_dies_with_its_daemon(serve: Serve) -> None:
    daemon = serve()
    engine, values = engine_with(daemon, "phoenix", 8)
    chain = list(values)
    assert processes(daemon) == [], "nobody has knocked yet"
    announce(daemon, "first", chain)
    [pid] = processes(daemon)
    os.kill(pid, signal.SIGKILL)
    assert daemon.wait_record("door.failed") is not None
    assert announce(daemon, "second", chain)["outcome"] in ("accepted", "completed")
    [another] = processes(daemon)
    assert another != pid
    assert engine.load(chain) == list(values.values())
    engine.close()
    daemon.sigkill()
    eventually(lambda: not Path(f"/proc/{another}").exists(), what="it ends with its daemon")


def test_without_a_place_for_its_socket_the_daemon_serves_on(serve: Serve, tmp_path: Path) -> None:
    control = tmp_path / "daemon.sock"
    door_socket(control).write_text("in the way")
    daemon = serve(socket=control)
    closed = daemon.wait_record("door.closed")
    assert closed is not None
    assert "not a socket" in closed["error"]
    engine, values = engine_with(daemon, "closed", 2)
    assert engine.load(list(values)) == list(values.values())


def test_a_port_wants_the_token(serve: Serve, tmp_path: Path) -> None:
    file, port = token_file(tmp_path, f"{TOKEN}\n"), free_ports(1)[0]
    daemon = serve(extra=("--door-port", str(port), "--door-token", str(file)))
    engine, values = engine_with(daemon, "port", 3)
    body = json.dumps(message("m", {"block_hashes": [digest.hex() for digest in values]}))

    def post(**headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/kv_hints", body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        status, answer = post(**headers)
        assert (status, "Bearer TOKEN" in answer["error"]) == (401, True)
    status, answer = post(Authorization=f"Bearer {TOKEN}")
    assert (status, answer["actions"][0]["outcome"] in ("accepted", "completed")) == (202, True)
    engine.close()


@pytest.mark.parametrize(
    ("mode", "text", "wrong"), [(0o644, TOKEN, "other users may read it"), (0o600, "short", "16 to 4096 bytes")]
)
def test_a_bad_token_file_ends_the_start(tmp_path: Path, mode: int, text: str, wrong: str) -> None:
    file = token_file(tmp_path, text, mode)
    for command in ("check-config", "serve"):
        said = kvprefetchd(command, "--door-port", free_ports(1)[0], "--door-token", file)
        assert said.returncode == 78
        assert f"door_token: should have {wrong}" in said.stderr or f"door_token: {wrong}" in said.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_each_user_announces_for_its_own_engines(serve: Serve) -> None:
    daemon = serve(extra=OPEN)
    daemon.socket.parent.chmod(0o755)
    _, values = engine_with(daemon, "ours", 3)
    hashes = {"block_hashes": [digest.hex() for digest in values]}
    with effective_user(OTHER):
        theirs = FakeEngine(daemon.socket, engine_id="theirs", prefix="ours")

    def post(name: str, uid: int, **fields: Any) -> Answer:
        groups = os.getgroups()
        os.setgroups([])
        os.setegid(uid)
        try:
            with effective_user(uid):
                return Door(daemon.socket).ask("POST", "/v1/kv_hints", message(name, {**hashes, **fields}))
        finally:
            os.setegid(0)
            os.setgroups(groups)

    status, answer = post("m", OTHER, engine="ours")
    assert (status, "attached: theirs" in answer["error"]) == (404, True)
    status, answer = post("m", OTHER)
    assert (status, answer["actions"][0]["outcome"]) == (202, "missing"), "the same digests, another user's values"
    status, answer = post("m", 4243)
    assert (status, "may not attach" in answer["error"]) == (403, True)
    with effective_user(OTHER):
        assert Door(daemon.socket).ask("GET", "/v1/kv_hints/m")[0] == 200
    assert Door(daemon.socket).ask("GET", "/v1/kv_hints/m")[0] == 404, "a message is its caller's"
    without = Announce(
        caller=Caller(uid=0, groups=[]), number=1, name="m", engine="e", epoch=1, hashes=1, hash_bytes=32
    )
    assert "descriptor" in ask(daemon.socket, without, Refused, uid=0).error
    outcomes, gone = list[AnnounceStep](), threading.Event()
    link = DaemonConnection(daemon.socket, outcomes.append, gone.set)
    link.announce(without.model_copy(update={"caller": Caller(uid=4243, groups=[])}), bytes(32))
    eventually(lambda: outcomes, what="an answer")
    assert (outcomes[0].outcome, "may not attach" in outcomes[0].reason) == ("rejected", True), "it might a moment ago"
    assert not gone.is_set(), "and costs other callers nothing"
    theirs.close()


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DaemonConfig.model_validate({"socket": str(tmp_path / "control.sock")})
    with select.epoll() as epoll, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        door = DoorSockets(config, epoll, structlog.get_logger())
        caller.connect(str(config.door_socket))
        monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
        [(fd, _)] = epoll.poll(10)
        door.ready([fd], 1)
        assert epoll.poll(0) == [], "no loop around what fails"
        door.tick(1)
        assert epoll.poll(0) == []
        door.tick(1 + PAUSE_NS)
        assert epoll.poll(10) == [(fd, select.EPOLLIN)]
        door.close()


def test_of_each_user_the_newest_answers_are_kept() -> None:
    messages, (one, two) = Messages(), (Caller(uid=uid, groups=[]) for uid in (1, 2))
    first = messages.add(one, "first", b"", [Answered(action_id="a", outcome="deferred")])
    number = messages.number(first, 0, 1)
    messages.add(two, "m", b"", [Answered(action_id="a", outcome="deferred")] * MAX_ANSWERS)
    assert messages.get(one, "first") is first, "another user's messages cost it nothing"
    messages.add(one, "m", b"", [Answered(action_id="a", outcome="deferred")] * MAX_ANSWERS)
    assert messages.get(one, "first") is None
    messages.note(AnnounceStep(number=number, outcome="expired"))
    assert first.answers[0].outcome == "deferred", "nothing keeps it"
