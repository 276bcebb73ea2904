"""What a program reads of the commands: JSON from each that shows something, and no colours where none are wanted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.daemon.cli import main
from kvprefetch.daemon.cli.help_page import CommandGroup
from tests.daemon.stores import blocks
from tests.lab.daemon import Daemon
from tests.support.command import COMMAND, kvprefetchd
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

# These do something, and write no more than a line about it; or their output is a file by itself.
WITHOUT = {"serve", "mode", "reload", "docs", "store purge", "install-unit", "config init", "completion"}
DONE = {
    "ts": "2026-11-21T07:30:00.000000Z", "level": "warning", "event": "request.done", "engine": "e",
    "outcome": "loaded", "request_id": "cmpl-7", "hint_blocks": 4, "loaded_blocks": 4,
    "ended_ms": 5.0, "looked_up_ms": 2.0,
}  # fmt: skip


def test_each_command_has_json_or_shows_nothing() -> None:
    commands = {name: each for name, each in main.build().all_commands().items() if not isinstance(each, CommandGroup)}
    assert {name for name, each in commands.items() if "json" not in [param.name for param in each.params]} == WITHOUT


SMALL = "--memory 64MiB --staging 1MiB --metrics-port 0"
EXAMPLES = {
    "status": "", "health": "", "stat": "", "top": "--interval 0.2", "store ls": "", "store stat": "",
    "prefetch": "LIST", "explain": "cmpl-7 LOG", "check-config": SMALL, "doctor": f"{SMALL} --measure 0",
    "estimate": "--token-bytes 2048 --tokens 1500 --link 1",
}  # fmt: skip


def test_json_of_every_command_is_one_object_with_the_same_first_keys(
    shared_daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for `tail`, which prints the log's lines as they are."""
    commands = {name: each for name, each in main.build().all_commands().items() if not isinstance(each, CommandGroup)}
    assert EXAMPLES.keys() == commands.keys() - WITHOUT - {"tail"}
    monkeypatch.setenv("KVPREFETCHD_SOCKET", str(shared_daemon.socket))
    engine = FakeEngine(shared_daemon.socket, engine_id="shown", prefix="json")
    values = blocks("json", 2)
    engine.save(values)
    eventually(lambda: engine.load(list(values)), what="a hit")
    (tmp_path / "LOG").write_text(json.dumps(DONE) + "\n")
    (tmp_path / "LIST").write_text(json.dumps([digest.hex() for digest in values]))

    def said(name: str) -> dict[str, Any]:
        words = [str(tmp_path / word) if word in ("LOG", "LIST") else word for word in EXAMPLES[name].split()]
        done = kvprefetchd(*name.split(), *words, "--json")
        found: dict[str, Any] = json.loads(done.stdout)
        assert [*found][:3] == ["command", "ok", "problems"]
        assert (found["command"], found["ok"]) == (name, done.returncode == 0), done
        return found

    found = {name: said(name) for name in EXAMPLES}
    assert found["status"]["pid"] == shared_daemon.pid
    assert found["health"]["ready"]
    assert [each["engine"] for each in found["stat"]["engines"]] == ["shown"]
    # The first look may be at a picture from before the hints.
    top = eventually(lambda: next((top for top in [said("top")] if not top["now"]["hints"]), None), what="rest")
    assert top["now"] == {"hints": 0.0, "fetched_bytes": 0.0, "hidden": None}
    keys = found["store ls"]["keys"]
    assert len(keys) == found["store stat"]["values"] == 2
    assert all(key.startswith(f"u{os.getuid()}@json") for key in keys)
    assert found["prefetch"]["staged"] == 2
    [request] = found["explain"]["requests"]
    assert request["record"] == DONE
    assert all(span["start_ms"] <= span["end_ms"] for span in request["spans"])
    assert found["check-config"]["keys"]["memory"]["value"] == 64 << 20
    assert {"python", "kvprefetch"} <= found["doctor"]["versions"].keys()
    findings = found["doctor"]["findings"]
    assert {"libraries", "store"} <= {finding["check"] for finding in findings}
    bad = [f"{each['check']}: {each['what']}" for each in findings if each["level"] == "bad"]
    assert bad == found["doctor"]["problems"]
    assert {"socket", "master", "put"} < {row["what"] for row in found["doctor"]["measured"]}


def test_what_is_wrong_is_in_the_json_and_on_the_terminal(tmp_path: Path) -> None:
    absent = ("--socket", tmp_path / "none.sock")
    health = json.loads(kvprefetchd("health", "--json", *absent).stdout)
    assert (health["ok"], health["ready"], len(health["problems"])) == (False, False, 1)
    for given, status in (('["zz"]\n', 65), ('["abab"]\n', 69)):
        done = kvprefetchd("prefetch", "-", "--json", *absent, given=given)
        assert done.returncode == status
        assert json.loads(done.stdout)["problems"] == [done.stderr.strip().removeprefix("kvprefetchd: ")]


@pytest.mark.parametrize(("value", "colours"), [(None, True), ("", True), ("1", False)])
def test_no_color_takes_colours_away_unless_it_is_empty(tmp_path: Path, value: str | None, colours: bool) -> None:
    """As no-color.org has it, on a terminal."""
    log = tmp_path / "kvprefetchd.log"
    log.write_text(json.dumps(DONE) + "\n")
    environ = {name: text for name, text in os.environ.items() if name != "NO_COLOR"}
    environ |= {} if value is None else {"NO_COLOR": value}
    primary, secondary = os.openpty()
    done = subprocess.run([*COMMAND, "tail", str(log)], stdout=secondary, env=environ, timeout=60, check=True)
    os.close(secondary)
    said = os.read(primary, 1 << 16)
    os.close(primary)
    assert done.returncode == 0
    assert b"cmpl-7" in said
    assert (b"\x1b[33m" in said) == colours
