"""What a program reads of the commands: JSON from each that shows something, and no colours where none are wanted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.daemon.cli import main
from kvprefetch.daemon.cli.help_page import Group
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
    commands = {name: each for name, each in main.build().all_commands().items() if not isinstance(each, Group)}
    assert {name for name, each in commands.items() if "json" not in [param.name for param in each.params]} == WITHOUT


def test_json_of_commands_that_ask_a_daemon(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, engine_id="shown", prefix="json")
    values = blocks("json", 2)
    engine.save(values)
    eventually(lambda: engine.load(list(values)), what="a hit")

    def said(*arguments: str) -> list[Any]:
        done = kvprefetchd(*arguments, "--json", "--socket", shared_daemon.socket)
        assert done.returncode == 0, done
        return [json.loads(line) for line in done.stdout.splitlines()]

    # The first look may be at a picture from before the hints.
    top = eventually(
        lambda: next((top for top in said("top", "--interval", "0.2") if not top["now"]["hints"]), None), what="rest"
    )
    assert top["pid"] == shared_daemon.pid
    assert top["now"] == {"hints": 0.0, "fetched_bytes": 0.0, "hidden": None}
    keys = said("store", "ls")
    assert len(keys) == 2
    assert all(isinstance(key, str) and key.startswith(f"u{os.getuid()}@json") for key in keys)
    engine.close()


def test_stat_prints_json_with_and_without_the_option(shared_daemon: Daemon) -> None:
    for more in ((), ("--json",)):
        assert json.loads(kvprefetchd("stat", *more, "--socket", shared_daemon.socket).stdout) == []


def test_json_of_one_request(tmp_path: Path) -> None:
    log = tmp_path / "kvprefetchd.log"
    log.write_text(json.dumps(DONE) + "\n")
    done = kvprefetchd("explain", "--json", "cmpl-7", log)
    shown = json.loads(done.stdout)
    assert shown["record"] == DONE
    assert [span["name"] for span in shown["spans"]]
    assert all(span["start_ms"] <= span["end_ms"] for span in shown["spans"])


@pytest.mark.store
def test_json_of_the_doctor(tmp_path: Path) -> None:
    done = kvprefetchd("doctor", "--json", "--memory", "64MiB", "--staging", "1MiB", "--socket", tmp_path / "s.sock")
    found = json.loads(done.stdout)
    assert {"python", "kvprefetch"} <= found["versions"].keys()
    assert {"libraries", "store"} <= {finding["check"] for finding in found["findings"]}
    assert {finding["level"] for finding in found["findings"]} <= {"ok", "note", "bad"}
    assert done.returncode == any(finding["level"] == "bad" for finding in found["findings"])


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
