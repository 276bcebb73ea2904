"""Whose namespace it is: the rules on their own, with a store that does as the test says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from benchmarks.lab.daemon import Daemon
from kvprefetch.daemon.engine.namespace import LOOK_NS, PATIENCE, RETRY_NS, TROUBLE_NS, Namespace, Whose
from kvprefetch.daemon.store.client import StoreUnavailable
from kvprefetch.daemon.store.marks import Found, Mark
from kvprefetch.shmring import messages

MINE = {"dtype": "bfloat16", "tp_size": "2"}
Serve = Callable[..., Daemon]


class Store:
    """Holds one value; says nothing when it is `away`, and puts nothing when it is `full`."""

    def __init__(self) -> None:
        self.answering = True
        self.away = self.full = self.unreadable = False
        self.value = b""
        self.calls: list[bytes] = []
        self.glances = 0

    def put_once(self, key: str, value: bytes) -> Found:
        assert key == "k@fingerprint"
        self.calls.append(value)
        if self.away:
            raise StoreUnavailable("away")
        if not self.full:
            self.value = self.value or value
        return Found(b"" if self.unreadable else self.value, bool(self.value), self.mark())

    def unchanged(self, mark: Mark) -> bool:
        self.glances += 1
        if self.away:
            raise StoreUnavailable("away")
        return mark == self.mark()

    def mark(self) -> Mark:
        return Mark("k@fingerprint", (hash(self.value), 0))


class Setup:
    """Jobs are done at once, unless they are `kept`."""

    def __init__(self, fingerprint: dict[str, str] = MINE, store: Store | None = None, *, saves: bool = True) -> None:
        self.now = 0
        self.closing = False
        self.store = store or Store()
        self.kept: list[Callable[[], None]] | None = None
        self.late: list[Callable[[], None]] = []
        self.turns: list[tuple[Whose, Whose]] = []
        store_, jobs, pools = self.store, self, SimpleNamespace(fingerprint=None)
        self.namespace = Namespace(
            store_, "me", "k@", fingerprint, pools, jobs, structlog.get_logger(), lambda: self.now,  # type: ignore[arg-type]
            lambda before: self.turns.append((before, self.namespace.whose)), saves=saves,
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
    assert setup.turns == [(Whose.ASKING, Whose.OURS)]


def test_an_owner_that_cannot_put_it_back_is_none() -> None:
    """Where nothing lies others may come, whose saves it would load."""
    setup = Setup()
    setup.namespace.look()
    setup.store.full, setup.store.value = True, b""
    setup.later()
    assert setup.turns[-1] == (Whose.OURS, Whose.UNKNOWN)
    setup.store.full = False
    setup.later(RETRY_NS)
    assert setup.turns[-1] == (Whose.UNKNOWN, Whose.OURS)


def test_an_owner_reads_it_once_and_then_sees_whether_it_lies_there_still() -> None:
    setup = Setup()
    setup.namespace.look()
    for _ in range(3):
        setup.later()
    assert (len(setup.store.calls), setup.store.glances) == (1, 3)


def test_in_doubt_nothing_is_asked_or_saved_until_the_store_said_who_is_there() -> None:
    setup = Setup()
    setup.namespace.look()
    assert setup.namespace.known
    assert not setup.namespace.saves_wait
    mark = setup.namespace.mark
    setup.store.value, setup.kept = b'{"dtype":"bfloat16"}', []  # one like it, with another mark
    setup.namespace.doubt()
    assert not setup.namespace.known
    assert setup.namespace.saves_wait
    setup.kept.pop()()
    assert setup.namespace.known
    assert not setup.namespace.saves_wait
    assert setup.namespace.mark != mark
    assert setup.turns[-1] == (Whose.OURS, Whose.OURS), "who waited goes on"
    setup.store.value = b'{"dtype":"float16"}'
    setup.namespace.doubt()
    setup.kept.pop()()
    assert setup.turns[-1] == (Whose.OURS, Whose.THEIRS), "what was staged is void"
    assert len(setup.store.calls) == 3


def test_a_look_that_began_before_the_doubt_does_not_end_it() -> None:
    setup = Setup()
    setup.namespace.look()
    setup.kept = []
    setup.later()
    before = setup.kept.pop()
    setup.namespace.doubt()
    before()
    assert not setup.namespace.known
    setup.later(1)
    setup.kept.pop()()
    assert setup.namespace.known


def test_one_in_doubt_that_gets_no_answer_serves_nothing() -> None:
    setup = Setup()
    setup.namespace.look()
    setup.store.away = True
    setup.namespace.doubt()
    assert setup.turns[-1] == (Whose.OURS, Whose.UNKNOWN)


def test_who_saves_nothing_claims_nothing_and_gives_way_to_who_does() -> None:
    reads = Setup(saves=False)
    reads.namespace.look()
    assert (reads.namespace.whose, reads.store.value) == (Whose.OURS, b"")
    saves = Setup({"dtype": "float16"}, reads.store)
    saves.namespace.look()
    assert saves.namespace.whose is Whose.OURS
    reads.later()
    assert reads.turns[-1] == (Whose.OURS, Whose.THEIRS)
    reads.store.value = b""
    for _ in range(PATIENCE + 1):
        reads.later()
    assert (reads.namespace.whose, reads.store.value) == (Whose.OURS, b"")


def test_who_is_switched_to_saving_claims_it_before_anything_is_saved() -> None:
    setup = Setup()
    setup.namespace.switch(False)
    setup.namespace.look()
    assert (setup.namespace.whose, setup.store.value) == (Whose.OURS, b"")
    setup.kept = []
    setup.namespace.switch(True)
    assert setup.namespace.saves_wait
    setup.kept.pop()()
    assert setup.store.value
    assert not setup.namespace.saves_wait


@pytest.mark.parametrize(("fault", "why"), [("unreadable", "cannot be read"), ("full", "takes nothing")])
def test_what_cannot_be_known_for_ten_seconds_is_told_once_and_when_it_is_over(fault: str, why: str) -> None:
    setup = Setup()
    told: list[messages.Notice] = []
    setup.namespace.tell = told.append
    if fault == "unreadable":
        setup.store.value = b"{}"
    setattr(setup.store, fault, True)
    setup.namespace.look()
    while setup.now < TROUBLE_NS:
        assert not setup.namespace.trouble
        setup.later(RETRY_NS)
    setup.later(TROUBLE_NS)
    assert why in setup.namespace.trouble
    assert [notice.refused for notice in told] == [False]
    assert setup.namespace.trouble in told[0].text
    setattr(setup.store, fault, False)
    setup.later(RETRY_NS)
    assert (setup.namespace.whose, setup.namespace.trouble, len(told)) == (Whose.OURS, "", 2)


def test_what_cannot_be_read_is_no_empty_place() -> None:
    setup = Setup()
    setup.store.value = b'{"dtype":"float16"}'
    setup.namespace.look()
    setup.store.unreadable = True
    for _ in range(PATIENCE + 1):
        setup.later()
    setup.store.unreadable, setup.store.value = False, b""
    setup.later()
    assert (setup.namespace.whose, setup.store.value) == (Whose.THEIRS, b""), "its owner has its time to come back"


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
