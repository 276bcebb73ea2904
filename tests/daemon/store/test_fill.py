"""How full the store is: as the real master says it, and not known where it says nothing that can be understood."""

from __future__ import annotations

import hashlib
import io
import json
import re
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from kvprefetch.daemon.cli.main import main
from kvprefetch.daemon.store import fill
from kvprefetch.daemon.store.fill import StoreFill, parse, read
from tests.daemon.stores import stored
from tests.daemon.telemetry.test_metrics import scrape, value
from tests.lab.daemon import Daemon
from tests.lab.process import free_ports, frozen
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import FakeEngine
from tests.support.telemetry import answering
from tests.support.waiting import eventually

MIB = 1 << 20
PERIOD_S = 0.4
# A daemon that asks its store as often.
OFTEN = f"from kvprefetch.daemon.store import fill\nfill.PERIOD_S, fill.STALE_S = {PERIOD_S}, 2.0\n"
PAGE = b"".join(name + b" 7\n" for name in fill.NAMES.values())
SEVEN = StoreFill(
    memory_used_bytes=7, memory_bytes=7, memory_evicted_bytes=7, disk_used_bytes=7, disk_bytes=7, disk_evictions=7
)


def said(daemon: Daemon, *arguments: object) -> str:
    """Run a command of kvprefetchd for this daemon, in this process; return its output."""
    with redirect_stdout(io.StringIO()) as output:
        assert main([*map(str, arguments), "--socket", str(daemon.socket)]) == 0
    return output.getvalue()


def save(engine: FakeEngine, daemon: Daemon, first: int, last: int) -> None:
    """Blocks of 1 MiB, four at a time, each set stored before the next."""
    for start in range(first, last, 4):
        digests = [hashlib.sha256(bytes([i])).digest() for i in range(start, min(start + 4, last))]
        engine.save({digest: digest * (MIB // 32) for digest in digests})
        stored(daemon, start + len(digests))


def known(daemon: Daemon, condition: Callable[[StoreFill], bool]) -> StoreFill:
    def look() -> StoreFill | None:
        status = ask_daemon(daemon.socket)
        fill = StoreFill.model_validate(status.store) if status.store is not None else None
        return fill if fill is not None and condition(fill) else None

    return eventually(look, 20, "the store's numbers")


def test_a_memory_that_is_filled_beyond_its_size_shows_it_everywhere(patched: Callable[..., Daemon]) -> None:
    (port,) = free_ports(1)
    daemon = patched(OFTEN, memory="16MiB", staging="16MiB", extra=("--metrics-port", str(port)))
    engine = FakeEngine(daemon.socket, block_bytes=MIB, max_blocks=64)
    save(engine, daemon, 0, 8)
    before = known(daemon, lambda store: store.memory_used_bytes == 8 * MIB)
    assert (before.memory_bytes, before.memory_evicted_bytes, before.disk_bytes) == (16 * MIB, 0, 0)
    half = "store: memory 8 MiB of 16 MiB (50 %), nothing evicted\n"
    eventually(lambda: half in said(daemon, "status"), what="the next picture")

    save(engine, daemon, 8, 24)
    known(daemon, lambda store: store.memory_evicted_bytes >= 8 * MIB)
    time.sleep(3 * PERIOD_S)  # until nothing changes any more
    status = ask_daemon(daemon.socket)
    store = StoreFill.model_validate(status.store)
    assert store.memory_used_bytes + store.memory_evicted_bytes == 24 * MIB
    samples = scrape(port)
    assert value(samples, "store_used_bytes", medium="memory") == store.memory_used_bytes
    assert value(samples, "store_capacity_bytes", medium="memory") == 16 * MIB
    assert value(samples, "memory_evicted_bytes_total") == store.memory_evicted_bytes
    assert not [labels for name, labels in samples if ("medium", "disk") in labels and "store_used" in name]
    assert re.search(r"^store: memory .*evicted", said(daemon, "top", "--once").split("\n\n")[0], re.MULTILINE)
    stat = json.loads(said(daemon, "store", "stat", "--json"))
    assert stat["store"] == store.model_dump()
    assert stat["values"] == sum(stat["namespaces"].values()) == store.memory_used_bytes // MIB
    at = ("store", "stat", "--master-http", status.master_http)
    assert json.loads(said(daemon, *at, "--json")) == stat, "as a cluster's master says it"
    assert said(daemon, *at).splitlines()[-1].startswith("memory ")

    engine.close()


def test_a_disk_shows_what_it_holds_and_that_it_makes_room(patched: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = patched(OFTEN, memory="16MiB", staging="16MiB", disk=f"{tmp_path / 'disk'}:16MiB")
    engine = FakeEngine(daemon.socket, block_bytes=MIB, max_blocks=64)
    save(engine, daemon, 0, 8)
    first = known(daemon, lambda store: store.disk_used_bytes == 8 * MIB)
    assert (first.disk_bytes, first.disk_evictions) == (16 * MIB, 0)
    save(engine, daemon, 8, 24)
    last = known(daemon, lambda store: store.disk_evictions > 0)
    assert last.disk_used_bytes <= 16 * MIB
    eventually(lambda: "made room " in said(daemon, "status"), what="the next picture")
    time.sleep(3 * PERIOD_S)  # until nothing changes any more
    assert 0 < sum(file.stat().st_blocks * 512 for file in (tmp_path / "disk").rglob("*")) <= 20 * MIB
    engine.close()


def test_a_disk_without_a_size_has_room_for_what_is_free(serve: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = serve(memory="16MiB", disk=str(tmp_path / "disk"))
    store = known(daemon, lambda _: True)
    assert 0 < store.disk_bytes < 2 << 40, "Mooncake's own bound is no promise"


def test_a_master_that_hangs_is_not_known_after_a_while_and_keeps_nobody(patched: Callable[..., Daemon]) -> None:
    (port,) = free_ports(1)
    daemon = patched(OFTEN, extra=("--metrics-port", str(port)))
    known(daemon, lambda _: True)
    master = int(daemon.records("master.started")[0]["pid"])
    with frozen(master):
        eventually(lambda: ask_daemon(daemon.socket).store is None, 30, "the end of what is known")
        began = time.monotonic()
        assert ask_daemon(daemon.socket).store is None
        assert time.monotonic() - began < 1
        eventually(lambda: not [name for name, _ in scrape(port) if "store_used" in name], what="the next exposition")
        assert "store: " not in said(daemon, "status")
    known(daemon, lambda _: True)


OK = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"\x00\x01garbage\n\n", OK, OK + b"\xff" * 5000, b"HTTP/1.1 503 no\r\n\r\n" + PAGE,
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + PAGE.replace(b"master_allocated_bytes 7\n", b""), OK + PAGE.replace(b"_bytes 7", b"_bytes -7"),
        OK + PAGE.replace(b"_bytes 7", b"_bytes nan"), OK + PAGE.replace(b"_bytes 7", b"_bytes " + b"9" * 5000),
    ],
)  # fmt: skip
def test_garbage_is_not_known(answer: bytes) -> None:
    with answering(answer) as master:
        assert read(master) is None


def test_the_page_is_understood_and_silence_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(OK + PAGE) as master:
        assert read(master) == parse(PAGE) == SEVEN
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", close=False) as master:
        began = time.monotonic()
        assert read(master, 0.2) is None
        assert time.monotonic() - began < 2
    assert read("127.0.0.1:1") is None
    assert read("127.0.0.1:nonsense") is None
    assert read("\x00:1") is None
