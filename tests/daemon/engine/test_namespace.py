"""Whose namespace it is: the rules on their own, and engines that differ before a real daemon and store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from benchmarks.lab.daemon import Daemon
from kvprefetch.daemon.cli import main
from kvprefetch.daemon.client import ask
from kvprefetch.daemon.commands.store import listed
from kvprefetch.daemon.engine.namespace import LOOK_NS, PATIENCE, RETRY_NS, Namespace, Whose
from kvprefetch.daemon.store.client import StoreUnavailable
from kvprefetch.shmring import messages
from kvprefetch.shmring.protocol import FlagState
from tests.daemon.fake_engine import FakeEngine, wait_for
from tests.daemon.stores import blocks, stored

MINE = {"dtype": "bfloat16", "tp_size": "2"}
Serve = Callable[..., Daemon]


class Store:
    """Holds one value; says nothing when it is `away`, and puts nothing when it is `full`."""

    def __init__(self) -> None:
        self.answering = True
        self.away = self.full = False
        self.value = b""
        self.calls: list[bytes] = []

    def put_once(self, key: str, value: bytes) -> bytes:
        assert key == "k@fingerprint"
        self.calls.append(value)
        if self.away:
            raise StoreUnavailable("away")
        if not self.full:
            self.value = self.value or value
        return self.value


class Setup:
    """Jobs are done at once, unless they are `kept`."""

    def __init__(self, fingerprint: dict[str, str] = MINE, store: Store | None = None) -> None:
        self.now = 0
        self.closing = False
        self.store = store or Store()
        self.kept: list[Callable[[], None]] | None = None
        self.late: list[Callable[[], None]] = []
        self.turns: list[tuple[Whose, Whose]] = []
        store_, jobs, pools = self.store, self, SimpleNamespace(fingerprint=None)
        self.namespace = Namespace(
            store_, "me", "k@", fingerprint, pools, jobs, structlog.get_logger(), lambda: self.now,  # type: ignore[arg-type]
            lambda before: self.turns.append((before, self.namespace.whose)),
        )  # fmt: skip

    def start(self, _: Any, job: Callable[[], Any], done: Callable[[Any], None], failed: Any, overdue: Any) -> None:
        self.late.append(overdue)
        if self.kept is None:
            done(job())
        else:
            self.kept.append(lambda: done(job()))

    def later(self, nanoseconds: int = LOOK_NS) -> None:
        self.now += nanoseconds
        self.namespace.tick()


def test_who_comes_first_has_it_and_an_equal_one_shares_it() -> None:
    first = Setup()
    first.namespace.look()
    assert first.turns == [(Whose.ASKING, Whose.OURS)]
    second = Setup(store=first.store)
    second.namespace.look()
    assert second.namespace.whose is Whose.OURS


def test_one_that_differs_is_told_in_what_and_what_only_one_names_is_not_compared() -> None:
    first = Setup({"dtype": "bfloat16", "tp_size": "2", "older": "x"})
    first.namespace.look()
    second = Setup({"dtype": "float16", "tp_size": "2", "newer": "y"}, first.store)
    second.namespace.look()
    assert second.turns == [(Whose.ASKING, Whose.THEIRS)]
    assert second.namespace.differences == "dtype=bfloat16 here=float16"
    assert first.store.calls[-1], "the first look of one who does not know may take the place"
    third = Setup({"tp_size": "2"}, first.store)
    third.namespace.look()
    assert third.namespace.whose is Whose.OURS


@pytest.mark.parametrize("value", [b"{", b"[]", b'{"tp_size": 2}', b'{"X": "2"}', b'{"a": "\\u00e9"}'])
def test_what_is_no_fingerprint_keeps_everybody_out(value: bytes) -> None:
    setup = Setup()
    setup.store.value = value
    setup.namespace.look()
    assert (setup.namespace.whose, setup.namespace.differences) == (Whose.THEIRS, "what lies there is no fingerprint")


def test_one_that_was_kept_out_takes_the_place_only_after_the_owner_had_time_to_come_back() -> None:
    setup = Setup()
    setup.store.value = b'{"dtype":"float16"}'
    setup.namespace.look()
    setup.store.value = b""
    for _ in range(PATIENCE):
        setup.later()
        assert setup.namespace.whose is Whose.THEIRS
    assert not setup.store.value
    setup.later()
    assert setup.namespace.whose is Whose.OURS
    assert setup.namespace.differences == ""
    assert setup.turns == [(Whose.ASKING, Whose.THEIRS), (Whose.THEIRS, Whose.OURS)]


def test_an_owner_that_lives_looks_more_often_than_one_that_was_kept_out_waits() -> None:
    """Each with a clock and a phase of its own, and one that was kept out looks right after a purge."""
    setup = Setup()
    setup.store.value = b'{"dtype":"float16"}'
    setup.namespace.look()
    setup.store.value = b""
    setup.namespace.look()
    for _ in range(PATIENCE * LOOK_NS // RETRY_NS - 1):
        setup.later(RETRY_NS)
        assert setup.namespace.whose is Whose.THEIRS, f"after {setup.now / 1e9} s"
    setup.later(RETRY_NS)
    assert setup.namespace.whose is Whose.OURS


def test_an_engine_that_is_gone_claims_nothing() -> None:
    """A purge that it did not live to see looks at the claims of those that were there when it began."""
    setup = Setup()
    setup.namespace.look()
    setup.store.value = b""
    setup.closing = True
    setup.namespace.look()
    assert not setup.store.value


def test_look_ups_wait_for_the_first_answer_and_not_for_later_ones() -> None:
    setup = Setup()
    assert setup.namespace.whose is Whose.ASKING
    setup.kept = []
    setup.namespace.look()
    setup.late[0]()
    setup.store.away = True
    setup.kept.pop()()
    setup.later()
    assert setup.kept, "it is asked again"
    assert setup.namespace.whose is Whose.UNKNOWN


def test_an_owner_that_finds_another_in_its_place_gives_way() -> None:
    setup = Setup()
    setup.namespace.look()
    setup.store.value = b'{"dtype":"float16"}'
    setup.later(LOOK_NS - 1)
    assert setup.namespace.whose is Whose.OURS, "it is looked at every few seconds"
    setup.later(1)
    assert setup.turns[-1] == (Whose.OURS, Whose.THEIRS)


def test_an_owner_puts_back_what_is_gone_and_stays_one_while_the_store_is_away() -> None:
    setup = Setup()
    setup.namespace.look()
    setup.store.value = b""
    setup.later()
    assert setup.store.value
    setup.store.away = True
    setup.later()
    setup.store.away, setup.store.full, setup.store.value = False, True, b""
    setup.later()
    assert setup.turns == [(Whose.ASKING, Whose.OURS)]


@pytest.mark.parametrize("fault", ["away", "full"])
def test_a_store_that_cannot_say_is_asked_again_soon_and_decides_nothing(fault: str) -> None:
    setup = Setup()
    setattr(setup.store, fault, True)
    setup.namespace.look()
    assert setup.turns == [(Whose.ASKING, Whose.UNKNOWN)]
    setattr(setup.store, fault, False)
    setup.later(RETRY_NS)
    assert setup.namespace.whose is Whose.OURS


def test_a_store_that_is_not_there_is_not_asked() -> None:
    setup = Setup()
    setup.store.answering = False
    setup.namespace.look()
    assert (setup.namespace.whose, setup.store.calls) == (Whose.ASKING, [])
    setup.store.answering = True
    setup.namespace.tick()
    assert setup.namespace.whose is Whose.OURS


def test_a_call_that_hangs_leaves_it_open_until_it_returns() -> None:
    setup = Setup()
    setup.kept = []
    setup.namespace.look()
    assert setup.namespace.whose is Whose.ASKING
    setup.late[0]()
    assert setup.namespace.whose is Whose.UNKNOWN
    setup.later()
    assert len(setup.kept) == 1, "one at a time"
    setup.kept.pop()()
    assert setup.turns == [(Whose.ASKING, Whose.UNKNOWN), (Whose.UNKNOWN, Whose.OURS)]


def test_without_a_fingerprint_nothing_is_asked() -> None:
    setup = Setup({})
    setup.namespace.look()
    assert (setup.namespace.whose, setup.store.calls) == (Whose.OURS, [])


# --- before a real daemon and store -----------------------------------------------------------------------------------


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
