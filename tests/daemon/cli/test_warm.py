"""`kvprefetchd warm` with a real daemon and a real store: blocks staged, found by the next hint, and refusals."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from kvprefetch.daemon.cli.main import main
from kvprefetch.shmring.wire import admin
from kvprefetch.shmring.wire.admin import MAX_WARM_DIGESTS, Warm, Warmed
from kvprefetch.shmring.wire.attach import Refused
from kvprefetch.shmring.wire.codec import Message, receive_message, send_message
from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.cli.test_mode import switch
from tests.daemon.stores import blocks, stored
from tests.lab.daemon import Daemon
from tests.lab.process import frozen
from tests.support.auditor import Auditor, ask_daemon
from tests.support.command import kvprefetchd, run
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

Serve = Callable[..., Daemon]


def warm(path: Path, text: str | bytes, *options: str) -> CompletedProcess[str]:
    return kvprefetchd("warm", "-", "--socket", path, *options, given=text)


def listing(*chains: list[bytes]) -> str:
    return "".join(json.dumps([digest.hex() for digest in chain]) + "\n" for chain in chains)


def counted(path: Path, text: str, status: int = 0) -> dict[str, Any]:
    result = warm(path, text, "--json")
    assert result.returncode == status, result
    counts: dict[str, Any] = json.loads(result.stdout)
    return {name: counts[name] for name in ("staged", "fetched", "absent", "no_room", "failed") if counts[name]}


def last_line(daemon: Daemon, name: str) -> dict[str, Any]:
    def line() -> dict[str, Any] | None:
        return next((line for line in daemon.records("request.done") if line["request_id"] == name), None)

    return eventually(line, what=f"the line of {name}")


def test_what_was_warmed_is_a_hit_without_a_fetch(serve: Serve, auditor: Auditor, tmp_path: Path) -> None:
    daemon = serve()
    engine = FakeEngine(daemon.socket, prefix="warm")
    values = blocks("warm", 40)
    engine.save(values)
    stored(daemon, 40)
    chain = list(values)
    file = tmp_path / "list.jsonl"
    file.write_text(listing(chain[:30], chain[:10] + list(blocks("nowhere", 5)), chain[30:]))
    result = kvprefetchd("warm", file, "--socket", daemon.socket)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "engine engine: 3 lines; 55 blocks: 50 found (10 staged already, 40 fetched, 0 without room), "
        "5 not in the store\n"
    )
    gauges = ask_daemon(daemon.socket).engines[0]
    assert (gauges["slots_idle"], gauges["blocks_pinned"], gauges["orders"]) == (40, 0, 0)
    assert engine.load(chain, name="after") == list(values.values())
    line = last_line(daemon, "after")
    assert (line["found_blocks"], line["bytes"], line["outcome"]) == (40, 0, "loaded")
    assert counted(daemon.socket, listing(chain)) == {"staged": 40}
    done = daemon.wait_record("warm.done")
    assert done is not None
    assert (done["fetched_blocks"], done["absent_blocks"]) == (40, 5)
    auditor.assert_idle(daemon.pid, daemon.socket)
    engine.close()


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
    assert counted(daemon.socket, listing(chain[:580]), 1) == {"fetched": slots - 20, "no_room": 580 - (slots - 20)}
    assert engine.flag(held).state == FlagState.READY, "nobody's room was taken"
    first = chain[: slots - 20]
    assert engine.load(first, name="first") == [values[digest] for digest in first]
    assert last_line(daemon, "first")["bytes"] == 0, "the file's beginning is what was kept"
    engine.cancel(held)
    assert counted(daemon.socket, listing(chain[580:])) == {"staged": 20}
    assert counted(daemon.socket, listing(chain[300:400])) == {"fetched": 100}, "another run replaces what is old"
    assert not [line for line in daemon.records("request.done") if line["taken_back"]]
    auditor.assert_idle(daemon.pid, daemon.socket)
    engine.close()


def test_bad_lines_are_named_and_good_ones_done(serve: Serve) -> None:
    daemon = serve()
    engine = FakeEngine(daemon.socket, prefix="bad")
    values = blocks("bad", 2)
    engine.save(values)
    stored(daemon, 2)
    first, second = (listing([digest]) for digest in values)
    result = warm(daemon.socket, f'{first}["zz"]\n{{"hashes": 5}}\n{second}' + "x\n" * 10, "--json")
    assert result.returncode == 65
    assert (json.loads(result.stdout)["fetched"], json.loads(result.stdout)["bad_lines"]) == (2, 12)
    errors = result.stderr.splitlines()
    assert len(errors) == 6
    assert "line 2: hashes.0" in errors[0]
    assert "line 3: hashes" in errors[1]
    assert "7 more bad lines" in errors[5]
    result = warm(daemon.socket, "[1, 2, 3]\n" + first)
    assert result.returncode == 65
    assert "did not say how" in result.stderr, "this engine published nothing of its hashing"
    assert "1 staged already" in result.stdout
    engine.close()


def test_only_where_it_can_be_done(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = serve()
    file = tmp_path / "list"
    file.write_text(listing(list(blocks("refused", 1))))

    def status(*options: str) -> int:
        return main(["warm", "--socket", str(daemon.socket), *options])

    def refused(*options: str) -> str:
        assert status(str(file), *options) == 69
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        return error

    assert "attached: none" in refused()
    one = FakeEngine(daemon.socket, engine_id="one", prefix="one")
    two = FakeEngine(daemon.socket, engine_id="two", prefix="two")
    assert "attached: one, two" in refused()
    assert "engine='three'" in refused("--engine", "three")
    assert status(str(file), "--engine", "two") == 0
    capsys.readouterr()
    switch(daemon.socket, "shadow")
    assert "mode is shadow" in refused("--engine", "one")
    file.unlink()
    assert f"{file} cannot be read: No such file" in refused()
    one.close()
    two.close()


def test_orders_that_are_too_large_or_too_many_are_refused_and_hurt_nobody(shared_daemon: Daemon) -> None:
    engine = FakeEngine(shared_daemon.socket, engine_id="bounds", prefix="bounds")
    sock = engine.connect()

    def send(*chains: list[str]) -> None:
        send_message(sock, Warm(name="list", engine="bounds", chains=list(chains)))

    def answer() -> Message:
        received = receive_message(sock)
        assert received is not None
        return received[0]

    for _ in range(20):
        send(["ab" * 32] * MAX_WARM_DIGESTS)
    answers = [answer() for _ in range(20)]
    assert sum(isinstance(each, Warmed) for each in answers) >= 1
    assert {type(each) for each in answers} <= {Warmed, admin.Report}
    send(["ab"] * (MAX_WARM_DIGESTS + 1))
    refusal = answer()
    assert isinstance(refusal, Refused)
    assert f"hashes={MAX_WARM_DIGESTS + 1} max={MAX_WARM_DIGESTS}" in refusal.error
    sock = engine.connect()
    send(["ab", "abcd"])
    refusal = answer()
    assert isinstance(refusal, Refused)
    assert "differ in length: bytes=[1, 2]" in refusal.error
    assert engine.load(list(blocks("bounds", 2))) is None
    engine.close()


def test_an_engine_that_goes_ends_its_orders(serve: Serve) -> None:
    """The store hangs, so that the order waits; then the engine leaves."""
    daemon = serve(extra=("--call-timeout-ms", "30000", "--rpc-timeout-ms", "20000"))
    engine = FakeEngine(daemon.socket, prefix="going")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect(str(daemon.socket))
        master = int(daemon.records("master.started")[0]["pid"])
        with frozen(master):
            chain = [digest.hex() for digest in blocks("going", 3)]
            send_message(sock, Warm(name="list", chains=[chain]))
            ask_daemon(daemon.socket)  # by then it has read the order, which came before
            engine.close()
            received = receive_message(sock)
    assert received is not None
    assert received[0] == admin.Report(ok=False, text="the engine is gone")


def test_a_stranger_may_not(shared_daemon: Daemon) -> None:
    """A user who may attach, as a group member would, may not have anything staged for another user's engine."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    os.chmod(shared_daemon.socket.parent, 0o755)
    engine = FakeEngine(shared_daemon.socket, engine_id="strange", prefix="strange")
    order = Warm(name="list", engine="strange", chains=[["ab" * 32]]).model_dump_json()
    script = (
        "import os, socket, sys\n"
        "os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n"
        "s.send(sys.argv[3].encode()); print(s.recv(65536).decode())\n"
    )
    group = os.stat(shared_daemon.socket).st_gid
    result = run([sys.executable, "-c", script, str(shared_daemon.socket), str(group), order])
    assert "not one engine but 0: engine='strange'; attached: none" in result.stdout, result
    engine.close()
