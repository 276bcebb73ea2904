"""What is known of sessions: when each is announced, and that all of it is bounded and ends."""

from __future__ import annotations

import random

import pytest

from kvprefetch.daemon.engine import sessions as module
from kvprefetch.daemon.engine.sessions import (
    FORGET_NS,
    MARGIN_NS,
    OWN_GAPS,
    SETTLED_NS,
    TRIES,
    UNKNOWN_NS,
    Chain,
    Due,
    Sessions,
)
from kvprefetch.shmring.wire.admin import AnnounceStep
from tests.daemon.planning.support import ONE_GROUP

SECOND_NS, SIZE = 1_000_000_000, 8
LEASE_NS = 10 * SECOND_NS
GAP_NS = 20 * SECOND_NS


class Setup:
    """Sessions with prompts of letters, a digest for each."""

    def __init__(self, block_ns: float = 0.0, free: int = 0) -> None:
        self.sessions, self.now, self.block_ns, self.free = Sessions(ONE_GROUP), 0, block_ns, free
        self.numbers = 0

    def come(self, session: str, prompt: str, after_ns: int = 0, local: int = 0) -> tuple[int | None, list[int]]:
        self.now += after_ns
        chain = Chain("".join(each * SIZE for each in prompt).encode(), SIZE)
        gap_ns, outdated = self.sessions.arrived(session.encode(), chain, local, self.now, self.block_ns)
        self.sessions.used_blocks += len(prompt) - local
        return gap_ns, list(outdated)

    def due(self, after_ns: int = 0) -> Due | None:
        """Return what is announced then, under the next number."""
        self.now += after_ns
        self.sessions.forget_outdated(self.now)
        due = self.sessions.next_due(self.now, self.free, self.numbers + 1)
        self.numbers += due is not None
        return due

    def learn(self, session: str = "s", times: int = OWN_GAPS) -> None:
        """Let a session come so often, with GAP_NS between; the prompt grows."""
        self.come(session, "a")
        for number in range(times):
            self.come(session, "a" * (number + 2), GAP_NS)

    def told(self, due: Due, outcome: str, number: int = 0, **counts: int) -> None:
        said = AnnounceStep.model_validate({"number": number or self.numbers, "outcome": outcome, **counts})
        self.sessions.told(due, self.now, said)

    def first_due_ns(self, most_ns: int = 10 * GAP_NS) -> int:
        """Return when, from now on, the next announcement comes."""
        begin = self.now
        while self.now < begin + most_ns:
            if self.due(SECOND_NS // 10) is not None:
                return self.now - begin
        raise AssertionError("never")


def test_the_newest_prompt_is_announced_shortly_before_the_session_comes_back() -> None:
    setup = Setup()
    setup.learn()
    due = setup.due(GAP_NS - MARGIN_NS - 1)
    assert due is None
    due = setup.due(1)
    assert due is not None
    assert due.expected_ms == MARGIN_NS // 1_000_000
    assert due.ttl_ms > GAP_NS // 2 // 1_000_000, "a session may be late"
    assert setup.sessions.chain(due.session) == Chain(b"a" * SIZE * (OWN_GAPS + 1), SIZE)
    assert setup.due(GAP_NS) is None, "once"


def test_short_gaps_say_little_of_the_longest() -> None:
    """With pauses of a few seconds the next one may be one of half a minute."""
    setup = Setup()
    setup.come("s", "a")
    for number in range(OWN_GAPS):
        setup.come("s", "a" * (number + 2), 2 * SECOND_NS)
    due = setup.due(2 * SECOND_NS)
    assert due is not None
    assert due.ttl_ms > 30_000


def test_a_fetch_that_takes_longer_begins_earlier() -> None:
    slow = Setup(block_ns=SECOND_NS)
    slow.learn()
    assert slow.first_due_ns() < GAP_NS - MARGIN_NS - OWN_GAPS * SECOND_NS
    endless = Setup(block_ns=100 * SECOND_NS)
    endless.learn()
    assert endless.first_due_ns() == SETTLED_NS, "not at once: others of its turn may come"


def test_with_free_room_it_is_announced_at_once() -> None:
    setup = Setup(free=OWN_GAPS)
    setup.learn()
    assert setup.due(SETTLED_NS) is None, "one block more than free slots"
    setup.free += 1
    setup.learn("t")
    assert setup.due(SETTLED_NS) is not None


def test_what_the_engine_s_own_cache_still_has_is_not_announced() -> None:
    """A prompt was whole there after ten blocks of others, and not after fourteen."""
    setup = Setup()
    setup.learn()
    for used, local in ((10, OWN_GAPS + 1), (14, 1)):
        setup.sessions.used_blocks += used
        setup.come("s", "a" * (OWN_GAPS + 1), GAP_NS, local)
    setup.sessions.used_blocks += 4
    assert setup.due(GAP_NS) is None
    setup.sessions.used_blocks += 1
    assert setup.due(SECOND_NS) is not None
    setup.sessions.used_blocks += 6
    setup.come("s", "a" * (OWN_GAPS + 1), GAP_NS, 1)
    setup.sessions.used_blocks += 4
    assert setup.due(GAP_NS) is None, "five of ten, and what a request of its own used counts not"


def test_without_a_gap_of_its_own_those_of_others_count() -> None:
    setup = Setup()
    setup.come("new", "x")
    assert setup.due(UNKNOWN_NS) is None, "nothing is known"
    setup.learn("s")
    setup.come("new", "xy")
    assert setup.first_due_ns() < GAP_NS


def test_requests_of_one_turn_teach_no_gap() -> None:
    setup = Setup()
    setup.learn()
    for number in range(20):
        assert setup.come("s", "b" * (number + 1), SECOND_NS // 100)[0] == SECOND_NS // 100
    assert setup.first_due_ns() > GAP_NS - 2 * SECOND_NS


@pytest.mark.parametrize(("outcome", "absent"), [("rejected", 0), ("missing", 0), ("completed", 1)])
def test_what_was_not_staged_is_announced_again_a_few_times(outcome: str, absent: int) -> None:
    setup = Setup()
    setup.learn()
    while setup.now < (OWN_GAPS + 10) * GAP_NS:
        if (due := setup.due(SECOND_NS // 10)) is not None:
            setup.told(due, outcome, absent=absent)
    assert 1 < setup.numbers <= TRIES


def test_the_newest_prompt_alone_is_expected_until_it_is_not_likely_to_come() -> None:
    setup = Setup()
    setup.come("s", "a")
    setup.come("s", "ab")
    sessions, came = setup.sessions, setup.now
    assert sessions.expected(b"s", 1, came) is None
    newest = sessions.expected(b"s", 2, came + UNKNOWN_NS - 1)
    assert newest is not None and newest[1] == SIZE + 1 and len(newest[0]) == 2 * newest[1]  # noqa: PT018
    assert sessions.expected(b"s", 2, came + UNKNOWN_NS) is None


def test_a_session_that_comes_after_more_than_an_hour_is_a_new_one() -> None:
    """However many are outdated at that moment, and when it was looked at last: no gap is longer than an hour."""
    setup = Setup(free=9)
    for name in "abcs":
        setup.come(name, name)
    assert setup.come("s", "s", FORGET_NS + 1) == (None, [])
    assert len(setup.sessions) == 1
    assert setup.due(SETTLED_NS) is None, "nothing is known of when it comes"
    assert setup.come("s", "s", FORGET_NS - SETTLED_NS) == (FORGET_NS, [])
    due = setup.due(SETTLED_NS)
    assert due is not None
    assert due.expected_ms == (FORGET_NS - SETTLED_NS) // 1_000_000


@pytest.mark.parametrize("seed", range(20))
def test_any_history_keeps_its_bounds_and_ends(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each announcement is told its end, in any order and late; in the end nothing is asked for any more."""
    monkeypatch.setattr(module, "MAX_SESSIONS", 8)
    monkeypatch.setattr(module, "MAX_BYTES", 40 * SIZE)
    source = random.Random(seed)
    setup = Setup(block_ns=source.choice([0, 1e6, 1e9]), free=3)
    ends = ["expired", "used", "late", "missing", "rejected"]
    open_: list[tuple[Due, int]] = []
    for _ in range(2000):
        setup.now += source.choice([0, 1, SECOND_NS // 10, 3 * SECOND_NS, 100 * SECOND_NS] * 20 + [FORGET_NS - 1])
        if source.random() < 0.001:
            setup.sessions.clear()
        if source.random() < 0.5:
            name = source.choice("abcdefghijklmnop")
            setup.come(name, name * source.randrange(1, 30))
        while (due := setup.due()) is not None:
            assert max(due.expected_ms, due.ttl_ms) <= FORGET_NS // 1_000_000, "the bound of an announcement"
            open_.append((due, setup.numbers))
            if source.random() < 0.7:
                setup.told(due, "completed", setup.numbers, absent=source.randrange(2))
        while open_ and source.random() < 0.6:
            due, number = open_.pop(source.randrange(len(open_)))
            setup.told(due, source.choice(ends), number)
        assert len(setup.sessions) <= 8
        chains = [setup.sessions.chain(name.encode()) for name in "abcdefghijklmnop"]
        assert sum(len(chain.hashes) for chain in chains if chain is not None) <= 40 * SIZE
    announced = setup.numbers
    for _ in range(10_000):
        setup.now += SECOND_NS
        if (due := setup.due()) is not None:
            setup.told(due, "expired")
    assert setup.numbers - announced <= 8 * TRIES
    assert len(setup.sessions) == 0, "forgotten by age"
