"""Engines that differ before a real daemon and store: who is served, what is kept, and what a purge changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.lab.daemon import Daemon
from kvprefetch.daemon.cli import main
from kvprefetch.daemon.client import ask
from kvprefetch.daemon.commands.store import listed
from kvprefetch.shmring import messages
from kvprefetch.shmring.protocol import FlagState
from tests.daemon.fake_engine import FakeEngine, wait_for
from tests.daemon.stores import blocks, stored

Serve = Callable[..., Daemon]


def engine_of(daemon: Daemon, name: str, **fingerprint: str) -> FakeEngine:
    return FakeEngine(daemon.socket, engine_id=name, fingerprint=fingerprint, events=True)


def owner_of(daemon: Daemon, **fingerprint: str) -> tuple[FakeEngine, dict[bytes, bytes]]:
    """The first engine in the namespace, and two blocks that it stored there."""
    first = engine_of(daemon, "first", **fingerprint)
    values = blocks("a", 2)
    first.save(values)
    stored(daemon, 2)
    return first, values


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def keys(daemon: Daemon) -> list[str]:
    return sorted(listed(ask(str(daemon.socket), messages.StatusQuery(), messages.Status).master_http, ""))


def test_an_engine_unlike_those_that_stored_loads_nothing_and_stores_nothing(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = serve()
    _, values = owner_of(daemon, dtype="bfloat16")
    like = engine_of(daemon, "like", dtype="bfloat16")
    assert like.load(list(values)) == list(values.values())
    unlike = engine_of(daemon, "unlike", dtype="float16")
    assert unlike.load(list(values)) is None
    before = keys(daemon)
    unlike.save(blocks("b", 2))
    notice, stored_, *_ = (messages.receive_message(unlike.scheduler) for _ in range(2))
    assert notice is not None
    assert isinstance(notice[0], messages.Notice)
    assert "dtype=bfloat16 here=float16: give it a cache_prefix" in notice[0].text
    assert notice[0].text.endswith(" kvprefetchd store purge --engine unlike --yes")
    assert stored_ is not None
    assert isinstance(stored_[0], messages.Stored)
    assert stored_[0].lost, "its blocks are not in the store"
    assert keys(daemon) == before
    [line] = daemon.records("namespace.refused")
    assert (line["engine"], line["differences"]) == ("unlike", "dtype=bfloat16 here=float16")
    assert "unlike is served nothing: engines unlike it store under its keys: dtype=bfloat16 here=float16 (" in run(
        capsys, "status", "--socket", str(daemon.socket)
    )
    assert like.load(list(values)) == list(values.values())


def test_it_has_the_namespace_once_that_was_purged_and_its_owners_are_gone(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the disk as well: after a restart nobody is in its way."""
    daemon = serve(disk=str(tmp_path / "disk"))
    first, values = owner_of(daemon, dtype="bfloat16")
    first.close()
    wait_for(lambda: daemon.records("engine.detached"), what="its end")
    purge = ("store", "purge", "--prefix", "model@tp_rank:0@", "--yes", "--socket", str(daemon.socket))
    assert "every key is gone" in run(capsys, *purge)
    assert keys(daemon) == []
    assert daemon.sigterm() == 0
    daemon.start()
    second = engine_of(daemon, "second", dtype="float16")
    assert second.load(list(values)) is None
    second.save(values)
    wait_for(lambda: second.load(list(values)) == list(values.values()), what="its own")
    assert not daemon.records("namespace.refused")


def test_a_restart_on_the_same_disk_does_not_forget_whose_it_is(serve: Serve, tmp_path: Path) -> None:
    """Also after the tier evicted it, as it does what is only read from memory: here, its file is gone."""
    daemon = serve(disk=str(tmp_path / "disk"))
    first, values = owner_of(daemon, weights="a")
    first.close()
    assert daemon.sigterm() == 0
    [evicted] = [meta for meta in (tmp_path / "disk").glob("*.meta") if b"@fingerprint" in meta.read_bytes()]
    evicted.unlink()
    daemon.start()
    second = engine_of(daemon, "second", weights="b")
    assert second.load(list(values)) is None
    assert daemon.records("namespace.refused")
    again = engine_of(daemon, "again", weights="a")
    wait_for(lambda: again.load(list(values)) == list(values.values()), what="what is on the disk")


def test_a_reset_takes_the_fingerprint_along_and_the_engine_puts_it_back(serve: Serve) -> None:
    daemon = serve()
    engine = engine_of(daemon, "first", weights="a")
    engine.save(blocks("a", 1))
    stored(daemon, 1)
    messages.send_message(engine.scheduler, messages.Reset(reset_generation=1, timeout_ms=10_000))
    wait_for(lambda: daemon.records("store.reset"), what="the reset")
    wait_for(lambda: keys(daemon) == ["model@tp_rank:0@fingerprint"], what="the fingerprint")
    other = engine_of(daemon, "other", weights="b")
    assert other.load(list(blocks("a", 1))) is None
    wait_for(lambda: daemon.records("namespace.refused"), what="the warning")
    values = blocks("c", 1)
    engine.save(values, reset_generation=1, save_id=2)
    wait_for(lambda: engine.load(list(values)) == list(values.values()), what="what was saved after")
    assert engine.flag(engine.hint(list(values))).state in (FlagState.HINTED, FlagState.READY)


def test_a_reset_of_an_engine_that_is_refused_leaves_the_others_blocks(serve: Serve) -> None:
    daemon = serve()
    first, values = owner_of(daemon, dtype="bfloat16")
    unlike = engine_of(daemon, "unlike", dtype="float16")
    wait_for(lambda: daemon.records("namespace.refused"), what="the warning")
    messages.send_message(unlike.scheduler, messages.Reset(reset_generation=1, timeout_ms=10_000))
    replies = [messages.receive_message(unlike.scheduler) for _ in range(2)]  # the notice before it
    assert replies[1] is not None
    assert replies[1][0] == messages.ResetDone(reset_generation=1, ok=True)
    assert first.load(list(values)) == list(values.values())
