"""`kvprefetch.client` against a real daemon and store, and the promise that its names stay."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest

import kvprefetch.client as api
from kvprefetch.client import AsyncClient, Client, Prompt, Unavailable, explain
from kvprefetch.client.door import Door
from kvprefetch.daemon.config.model import door_socket
from tests.daemon.stores import blocks, engine_with
from tests.daemon.telemetry.test_trace_picture import LINE
from tests.lab.daemon import Daemon
from tests.support.command import kvprefetchd, run
from tests.support.fake_engine import FakeEngine
from tests.support.package import copy_package
from tests.support.waiting import eventually

PAGE = (Path(__file__).parents[3] / "docs/reference/python.md").read_text()
# What the API has had since its first version. A name that goes away breaks somebody: raise API_VERSION's first number.
FIRST = "API_VERSION Announced Answered Blocks Busy Client Explanation Health Prompt Span Status Unavailable explain"
NAMES = {(1, 0): FIRST, (1, 1): f"{FIRST} AsyncClient Report"}


def test_it_needs_none_of_the_daemon_s_packages() -> None:
    """Whoever imports it, an engine's process for example, gets pydantic and the standard library."""
    heavy = {"click", "mooncake", "numpy", "prometheus_client", "rich", "structlog", "torch", "vllm", "waitress"}
    said = run([sys.executable, "-c", "import sys, kvprefetch.client; print(*sys.modules)"])
    assert said.returncode == 0, said.stderr
    assert not heavy & set(said.stdout.split())


def test_every_name_is_documented_and_none_went_away() -> None:
    assert sorted(api.__all__) == sorted(NAMES[api.API_VERSION].split())
    assert f"version {'.'.join(map(str, api.API_VERSION))}" in PAGE
    for name in set(api.__all__) - {"API_VERSION"}:
        assert re.search(rf"`{name}\b", PAGE), name


def test_status_and_health_say_what_the_commands_say(serve: Callable[..., Daemon]) -> None:
    daemon = serve()
    client = Client(daemon.socket)
    assert (client.status().pid, client.status().engines) == (daemon.pid, [])
    FakeEngine(daemon.socket, engine_id="seen")
    health = client.health(engines=1, wait_s=60)
    assert (health.well, health.problems) == (True, ())
    assert health.status is not None
    assert [each["engine"] for each in health.status.engines] == ["seen"]
    assert kvprefetchd("health", "--socket", daemon.socket).stdout.startswith(f"ready: pid {daemon.pid}, ")
    few = client.health(engines=2)
    assert (few.well, len(few.problems)) == (False, 1)
    assert client.health(alive=True).well


def test_without_a_daemon_each_call_says_so(tmp_path: Path) -> None:
    client = Client(tmp_path / "none.sock")
    health = client.health()
    assert (health.well, health.status) == (False, None)
    for call in (client.status, lambda: client.prefetch([Prompt(token_ids=[1])])):
        with pytest.raises(Unavailable, match=r"none.*sock.*: No such file or directory; start"):
            call()


def test_a_door_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(door_socket(tmp_path / "d.sock")))
        hung.listen()
        with pytest.raises(Unavailable, match=r"no door answers: .*: timed out"):
            Client(tmp_path / "d.sock", timeout_s=0.2).prefetch([Prompt(token_ids=[1])])


def test_the_words_of_another_release_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    action = {"action_id": "0", "outcome": "postponed"}
    monkeypatch.setattr(Door, "ask", lambda *_, **__: (202, {"message_id": "m", "actions": [action]}))
    with pytest.raises(Unavailable, match=r"something else: actions\.0\.outcome"):
        Client(tmp_path / "d.sock").prefetch([Prompt(token_ids=[1])])


def test_the_socket_is_that_of_the_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPREFETCHD_SOCKET", str(tmp_path / "named.sock"))
    assert Client().socket == tmp_path / "named.sock"


def test_announced_prompts_have_an_outcome_each_and_are_found(serve: Callable[..., Daemon]) -> None:
    """In their order: staged, absent from the store, and refused."""
    daemon = serve()
    engine, values = engine_with(daemon, "one", 12)
    chain = [digest.hex() for digest in values]
    absent = [digest.hex() for digest in blocks("nowhere", 3)]
    sent = Client(daemon.socket, timeout_s=60).prefetch(
        [Prompt(block_hashes=chain), Prompt(block_hashes=absent), Prompt(block_hashes=chain, engine="another")],
        engine="one",
    )
    staged, missing, refused = sent.wait(60)
    assert sent.done
    assert (staged.outcome, staged.engine, staged.blocks.found, staged.blocks.announced) == ("completed", "one", 12, 12)
    assert (missing.outcome, missing.blocks.missing) == ("missing", 3)
    assert refused.outcome == "rejected"
    assert "engine='another'" in refused.reason
    assert engine.load(list(values), name="request") == list(values.values())
    assert eventually(lambda: daemon.records("request.done"), what="its line")[0]["announced_staged"] == 12
    with pytest.raises(Unavailable, match="engine='another'"):
        Client(daemon.socket).prefetch([Prompt(block_hashes=chain)], engine="another")


def test_the_same_for_asyncio_and_the_commands_that_switch(serve: Callable[..., Daemon], tmp_path: Path) -> None:
    """While one waits, the loop goes on."""
    config = tmp_path / "kvprefetchd.toml"
    config.write_text("max_engines = 3\n")
    daemon = serve(extra=("--config", str(config)))
    engine_with(daemon, "one", 4)
    absent = Prompt(block_hashes=[digest.hex() for digest in blocks("nowhere", 3)])

    async def asks() -> None:
        client = AsyncClient(daemon.socket, timeout_s=60)
        status, health = await asyncio.gather(client.status(), client.health(engines=1, wait_s=60))
        assert (status.pid, health.well) == (daemon.pid, True)
        [outcome] = await client.wait(await client.prefetch([absent], engine="one"), 60)
        assert outcome.outcome == "missing"
        late = asyncio.create_task(client.health(engines=9, wait_s=0.5))
        assert (await client.mode("shadow")).text == "mode: shadow (was on)"
        assert not late.done()
        assert (await client.reload()).ok
        config.write_text("max_engine = 3\n")
        refused = await client.reload()
        assert (refused.ok, "max_engines" in refused.text) == (False, True)
        assert not (await late).well

    asyncio.run(asks())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "one of token_ids, block_hashes and session_id is wanted: given=none"),
        ({"token_ids": [1], "block_hashes": ["ab"]}, "given=both"),
        ({"token_ids": [-1]}, "greater than or equal to 0"),
        ({"block_hashes": ["ab", "abcd"]}, "differ in length"),
    ],
)
def test_a_prompt_that_no_door_would_take_is_refused_at_once(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Prompt(**fields)


def test_a_stranger_s_script_is_typed(tmp_path: Path) -> None:
    """The page's example, in strict mode, in an environment with an installed package."""
    checker = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("basedpyright is not installed (make test does it)")
    example = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    copy_package(site)
    (site / "others.pth").write_text(f"{Path(pydantic.__file__).parents[1]}\n")
    (tmp_path / "script.py").write_text(f"prompt = [1, 2]\n{example[1]}\nprint(client.mode('on').ok, announce)\n")
    (tmp_path / "wrong.py").write_text("from kvprefetch.client import Client\n\nClient().status(wait=3)\n")
    config = {"typeCheckingMode": "strict", "include": ["*.py"], "venvPath": str(tmp_path), "venv": "venv"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    said = json.loads(run([checker, "--outputjson", "-p", str(tmp_path)]).stdout)["generalDiagnostics"]
    assert [Path(each["file"]).name for each in said] == ["wrong.py"], said
    assert 'No parameter named "wait"' in said[0]["message"]


def test_a_wait_for_what_does_not_come_ends(serve: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = serve()
    FakeEngine(daemon.socket, prefix="slow")
    sent = Client(daemon.socket, timeout_s=60).prefetch(
        [Prompt(block_hashes=[digest.hex() for digest in blocks("nowhere", 1)])]
    )
    monkeypatch.setattr(api.Answered, "done", False)
    assert [each.outcome for each in sent.wait(0.3)] == ["missing"]


def test_a_request_is_explained_as_data(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"noise\n{json.dumps(LINE)}\n")
    for source in (log, str(log), log.read_bytes().splitlines()):
        [found] = explain("cmpl-7", source)
        assert found.record == LINE
        assert found.text == kvprefetchd("explain", "cmpl-7", log).stdout.rstrip("\n")
        assert found.said == found.text.splitlines()[-len(found.said) :]
        assert [span.name for span in found.spans][:2] == ["in the engine's queue", "hint to daemon"]
    with pytest.raises(Unavailable, match=f"no request.done line in {log} has 'another'"):
        explain("another", log)
