"""`kvprefetchd prefetch` with a real daemon and a real store: blocks staged, found by the next hint, and refusals."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from kvprefetch.client import Client, Prompt
from kvprefetch.client.door import Door
from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.cli.prefetch import MAX_LINE_BYTES, Sender, lines, parse
from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.stores import blocks, engine_with, request_line, stored
from tests.lab.daemon import Daemon
from tests.lab.process import descendants, frozen
from tests.support.auditor import Auditor, ask_daemon
from tests.support.command import kvprefetchd
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]


def prefetch(path: Path, text: str, *options: str) -> CompletedProcess[str]:
    return kvprefetchd("prefetch", "-", "--socket", path, *options, given=text)


def listing(*chains: list[bytes]) -> str:
    return "".join(json.dumps([digest.hex() for digest in chain]) + "\n" for chain in chains)


def counted(path: Path, text: str, status: int = 0, *options: str) -> dict[str, Any]:
    result = prefetch(path, text, "--json", *options)
    assert result.returncode == status, result
    counts: dict[str, Any] = json.loads(result.stdout)
    assert (counts["blocks"], counts["absent"]) == (counts["announced"], counts["missing"]), "the former names"
    return {name: counts[name] for name in ("staged", "fetched", "missing", "no_room", "failed") if counts[name]}


def test_what_was_staged_is_a_hit_without_a_fetch(serve: Serve, auditor: Auditor, tmp_path: Path) -> None:
    daemon = serve()
    engine, values = engine_with(daemon, "warm", 40)
    chain = list(values)
    file = tmp_path / "list.jsonl"
    file.write_text(listing(chain[:30], chain[:10] + list(blocks("nowhere", 5)), chain[30:]))
    result = kvprefetchd("warm", file, "--socket", daemon.socket)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "engine warm: 3 lines; 55 blocks: 50 found (10 staged already, 40 fetched, 0 without room), "
        "5 not in the store\n"
    )
    gauges = ask_daemon(daemon.socket).engines[0]
    assert (gauges["slots_idle"], gauges["blocks_pinned"], gauges["orders"]) == (40, 0, 0)
    assert engine.load(chain, name="after") == list(values.values())
    line = request_line(daemon, "after")
    assert (line["found_blocks"], line["bytes"], line["outcome"]) == (40, 0, "loaded")
    assert counted(daemon.socket, listing(chain)) == {"staged": 40}
    written = eventually(lambda: daemon.records("announcement.done"), what="an announcement has its request")
    assert "used" in {line["outcome"] for line in written}
    auditor.assert_idle(daemon.pid, daemon.socket)


def test_a_file_with_more_prompts_than_the_door_takes_in_a_second_is_sent_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real door refuses a message only after hundreds of prompts, and how fast they come is the machine's."""

    ask, refusals = Door.ask, [429, 429]

    def busy(self: Door, method: str, path: str, body: object = None, **more: float) -> tuple[int, dict[str, Any]]:
        if method == "POST" and refusals:
            return refusals.pop(), {"error": "too many actions: uid=0 actions=1 max_a_second=200"}
        return ask(self, method, path, body, **more)

    monkeypatch.setattr(Door, "ask", busy)
    daemon = serve()
    FakeEngine(daemon.socket, prefix="many")
    sender = Sender(Client(daemon.socket, timeout_s=60), "", 1000, progress=False)
    sender.add(1, listing(list(blocks("nowhere", 3))).encode())
    sender.flush()
    assert (sender.counts["missing"], sender.refused) == (3, [])


def test_a_file_larger_than_staging_fills_it_and_takes_nothing_from_requests(serve: Serve, auditor: Auditor) -> None:
    """1 MiB of staging are 192 slots for loads; the chain has several orders' length and gaps nowhere."""
    daemon = serve(memory="64MiB")
    engine = FakeEngine(daemon.socket, prefix="large", max_blocks=1024)
    values: dict[bytes, bytes] = {}
    for part in range(10):
        some = blocks(f"large-{part}", 60)
        engine.save(some, save_id=part)
        values |= some
        stored(daemon, len(values))
    chain = list(values)
    held = engine.hint(chain[-20:], name="held")
    engine.settled(held)
    eventually(lambda: engine.flag(held).count == 20, what="what the request wants")
    slots = int(ask_daemon(daemon.socket).engines[0]["slots"])
    all_but_held = listing(chain[:580])
    assert counted(daemon.socket, all_but_held, 1, "--ttl", "1") == {
        "fetched": slots - 20,
        "no_room": 580 - (slots - 20),
    }
    assert engine.flag(held).state == FlagState.READY, "nobody's room was taken"
    first = chain[: slots - 20]
    assert engine.load(first, name="first") == [values[digest] for digest in first]
    assert request_line(daemon, "first")["bytes"] == 0, "the file's beginning is what was kept"
    engine.cancel(held)
    assert counted(daemon.socket, listing(chain[580:])) == {"staged": 20}
    eventually(lambda: daemon.records("announcement.done"), what="its time is over")
    assert counted(daemon.socket, listing(chain[300:400])) == {"fetched": 100}, "another run replaces what is old"
    assert not [line for line in daemon.records("request.done") if line["taken_back"]]
    auditor.assert_idle(daemon.pid, daemon.socket)


def test_what_ends_before_its_blocks_have_come_is_no_success(serve: Serve) -> None:
    daemon = serve()
    _engine, values = engine_with(daemon, "early", 8)
    (master,) = descendants(daemon.pid)
    with frozen(master):
        assert counted(daemon.socket, listing(list(values)), 1, "--ttl", "1") == {"failed": 8}


def test_bad_lines_are_named_and_good_ones_done(serve: Serve) -> None:
    daemon = serve()
    _, values = engine_with(daemon, "bad", 2)
    first, second = (listing([digest]) for digest in values)
    text = f'{first}\n["zz"]\n{{"hashes": 5}}\n{second}' + "x\n" * 10
    result = prefetch(daemon.socket, text, "--json")
    assert result.returncode == 65
    assert (json.loads(result.stdout)["fetched"], json.loads(result.stdout)["bad_lines"]) == (2, 12)
    errors = result.stderr.splitlines()
    assert len(errors) == 6
    assert "line 3: block_hashes.0" in errors[0]
    assert "line 4: block_hashes" in errors[1]
    assert "7 more lines" in errors[5]
    result = prefetch(daemon.socket, "[1, 2, 3]\n" + first)
    assert result.returncode == 69
    assert "line 1: engine bad: prompts cannot be hashed: the engine did not say how it does" in result.stderr
    assert "1 staged already" in result.stdout


def test_only_where_it_can_be_done(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    daemon, file = serve(), tmp_path / "list"

    def refused() -> str:
        assert main(["prefetch", "--socket", str(daemon.socket), "--engine", "three", str(file)]) == 69
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        return error

    assert f"{file} cannot be read: No such file" in refused()
    file.write_text(listing(list(blocks("refused", 1))))
    assert "engine='three'" in refused()
    daemon.close()
    assert "no door answers" in refused()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("what", ["not JSON"]),
        ("7", ["a list or an object"]),
        ('{"hashes": ["ab"], "prompt_token_ids": [1]}', ["one of token_ids, block_hashes and session_id"]),
        ('["ab", 7]', ["block_hashes.1", "7"]),
        ("[]", ["token_ids", "at least 1"]),
        ("[" * 100_000, ["not JSON"]),
        ("[" + "1, " * MAX_LINE_BYTES + "1]", [f"too long: max_bytes={MAX_LINE_BYTES}"]),
    ],
)
def test_a_bad_line_is_one_error_and_the_next_ones_count(line: str, words: list[str]) -> None:
    file = io.BytesIO(f'\n{line}\n  \n{{"hashes": ["abab"], "ttl_ms": 5}}'.encode())
    (number, bad), (next_number, good) = lines(file)
    assert (number, next_number, parse(good)) == (2, 4, Prompt(block_hashes=["abab"], ttl_ms=5))
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        parse(bad)
    assert len(str(error.value).splitlines()) == 1
    for word in words:
        assert word in str(error.value)
