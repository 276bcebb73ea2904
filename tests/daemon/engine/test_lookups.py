"""Look-ups: batches, what needs no question, deadlines, the negative cache and leases, on a clock of the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.daemon.engine.lookups import (
    BATCH_DIGESTS,
    FIRST_DIGESTS,
    RENEWED_AT_ONCE,
    SLICE_DIGESTS,
    Answer,
    Batch,
    LookUps,
    Lost,
)
from kvprefetch.daemon.engine.neighbours import NegativeCaches
from kvprefetch.daemon.engine.transfers import Found
from kvprefetch.daemon.planning.negative import LASTING_NS, MAX_ENTRIES, MISS_NS, NegativeCache
from kvprefetch.daemon.planning.requests import Key, Request
from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.planning.support import FlagsModel, Planner, block, digests

SECOND = 1_000_000_000


class Setup:
    """Look-ups before a planner without room, so that hits wait; `stored` is what the store has."""

    def __init__(self) -> None:
        self.up = True
        self.sent: list[Batch] = []
        self.answers: dict[Key, tuple[int, bool]] = {}
        self.renewals: dict[Key, int] = {}
        self.stored: set[bytes] = set()
        self.planner = Planner(1, FlagsModel(), chunk_blocks=1)
        self.negative = NegativeCache()
        self.look_ups = LookUps(self.planner.requests, self.negative, timeout_ns=4 * SECOND, lease_ns=10 * SECOND)

    def apply(self, answers: Sequence[Answer | Lost]) -> None:
        for answer in answers:
            key = answer.request.key
            if isinstance(answer, Lost):
                self.renewals[key] = answer.block
                self.planner.lost(answer.request, answer.block)
            else:
                assert key not in self.answers, "a request is answered once"
                self.answers[key] = (self.planner.choose(answer.request).blocks, answer.unavailable)

    def ask(self, now: int = 0) -> None:
        """Send what is to be asked, as an epoch does after every event."""
        if not self.up:
            self.apply(self.look_ups.give_up(now))
        elif (batch := self.look_ups.next_batch(now)) is not None:
            self.sent.append(batch)

    def tick(self, now: int) -> None:
        self.apply(self.look_ups.tick(now))
        self.ask(now)

    def answered(self, number: int, found: Sequence[Found] | None, now: int) -> None:
        self.apply(self.look_ups.answered(number, found, now))
        self.ask(now)

    def add(self, request: Request, now: int = 0) -> None:
        if (answer := self.look_ups.add(request, now, answering=self.up)) is not None:
            self.apply([answer])

    def hint(self, number: int, *names: str, priority: int = 0, now: int = 0) -> Key:
        request = self.planner.hinted((number, 1), digests(*names), priority=priority)
        self.add(request, now)
        return request.key

    def store(self, *names: str) -> None:
        self.stored.update(map(block, names))

    def renewed(self) -> list[Key]:
        """The requests for which the last batch renews leases."""
        assert self.sent[-1].renewal
        return [question.request.key for question in self.sent[-1].questions]

    def answer(self, now: int = 0) -> None:
        batch, runs = self.sent[-1], list[Found]()
        for question in batch.questions:
            present = bytes(digest in self.stored for digest in question.digests)
            runs.append(Found(present, bytes(len(present))))
        self.answered(batch.number, runs, now)


def test_an_answer_is_the_request_s_that_asked_also_where_another_has_its_key() -> None:
    """An engine that uses a flag's generation again must not end the daemon."""
    setup = Setup()
    key = setup.hint(1, "a", "b")
    setup.ask(0)
    setup.planner.finish(key)
    again = setup.planner.hinted(key, b"c" * 24, local=2)
    setup.add(again)
    setup.answer()
    assert setup.answers == {}
    setup.answer()
    assert setup.answers == {key: (2, False)}


def test_hints_that_come_while_a_question_is_out_are_one_question_more_the_asked_for_first() -> None:
    setup = Setup()
    first = setup.hint(1, "a")
    setup.ask(0)
    later = [setup.hint(number, f"b{number}") for number in range(2, 50)]
    setup.planner.ask(later[30])
    setup.look_ups.asked(setup.planner.requests[later[30]])
    setup.ask(0)
    assert len(setup.sent) == 1
    setup.answer()
    assert setup.answers == {first: (0, False)}
    assert len(setup.sent) == 2
    assert setup.sent[1].questions[0].request.key == later[30]
    assert len(setup.sent[1].questions) == 48
    setup.answer()
    assert len(setup.answers) == 49
    assert len(setup.look_ups) == 0


def test_a_question_is_bounded() -> None:
    setup = Setup()
    for number in range(40):
        setup.hint(number, *[f"{number}-{i}" for i in range(256)])
    setup.ask(0)
    assert sum(len(question.digests) for question in setup.sent[0].questions) == BATCH_DIGESTS


def test_a_prompt_of_any_length_is_asked_for_slice_by_slice_up_to_its_first_absent_block() -> None:
    setup = Setup()
    names = [str(i) for i in range(20_000)]
    setup.store(*names[:12_000])
    key = setup.hint(1, *names)
    setup.ask(0)
    while key not in setup.answers:
        setup.answer()
    sizes = [len(question.digests) for batch in setup.sent for question in batch.questions]
    assert sizes == [FIRST_DIGESTS, *[SLICE_DIGESTS] * 3]
    assert setup.answers == {key: (12_000, False)}
    miss = setup.hint(2, *reversed(names))
    setup.ask(0)
    setup.answer()
    assert setup.answers[miss] == (0, False)
    assert [len(question.digests) for question in setup.sent[-1].questions] == [FIRST_DIGESTS]


def test_many_long_prompts_that_the_store_lacks_hold_up_a_short_one_by_one_question() -> None:
    """A miss asks for few digests: with a whole slice of each, 16 of them would be 65,536 digests, some 160 ms."""
    setup = Setup()
    for number in range(16):
        setup.hint(number, *[f"{number}-{i}" for i in range(SLICE_DIGESTS)])
    setup.store("short")
    short, asked = setup.hint(16, "short"), 0
    setup.ask(0)
    while short not in setup.answers:
        asked += sum(len(question.digests) for question in setup.sent[-1].questions)
        setup.answer()
    assert asked <= BATCH_DIGESTS + 1


def test_between_two_slices_of_a_prompt_what_is_more_urgent_is_asked_for() -> None:
    setup = Setup()
    names = [str(i) for i in range(SLICE_DIGESTS)]
    setup.store(*names)
    long = setup.hint(1, *names)
    setup.ask(0)
    urgent = setup.hint(2, "a", priority=-1)
    setup.answer()
    assert [question.request.key for question in setup.sent[-1].questions] == [urgent, long]


def test_of_a_prompt_whose_next_slice_fails_the_slices_before_count() -> None:
    """Also while it waits for its turn; the medium of each slice is kept."""
    setup = Setup()
    setup.planner.looked_up(setup.hint(0, "x"), 1)
    names = [str(i) for i in range(100)]
    failed, waits = setup.hint(1, *names), setup.hint(2, *names[1:])
    setup.ask(0)
    slices = [Found(b"\1" * FIRST_DIGESTS, b"\1" * FIRST_DIGESTS), Found(b"\1" * FIRST_DIGESTS, bytes(FIRST_DIGESTS))]
    setup.answered(setup.sent[0].number, [Found(b"\0", b"\0"), *slices], 1)
    setup.up = False
    setup.answered(setup.sent[1].number, None, 2)
    assert setup.answers[failed] == setup.answers[waits] == (FIRST_DIGESTS, True)
    assert setup.planner.requests[failed].on_disk == b"\1" * FIRST_DIGESTS
    setup.up, names = True, [str(i) for i in range(1000, 1100)]
    late = setup.hint(3, *names)
    setup.ask(3)
    setup.answered(setup.sent[2].number, [Found(b"\1" * FIRST_DIGESTS, bytes(FIRST_DIGESTS))], 4)
    setup.look_ups.asked(setup.planner.requests[late])
    setup.tick(4 * SECOND + 4)
    assert late not in setup.answers, "its second slice is out"
    setup.answered(setup.sent[3].number, [Found(b"\1" * 36, bytes(36))], 5)
    assert setup.answers[late] == (100, False)


def test_the_lease_of_a_prompt_counts_from_its_first_slice() -> None:
    setup = Setup()
    setup.planner.looked_up(setup.hint(0, "x"), 1)
    setup.planner.next_order()
    names = [str(i) for i in range(100)]
    setup.store(*names)
    key = setup.hint(1, *names)
    setup.ask(0)
    setup.answer(SECOND)
    setup.answer(2 * SECOND)
    assert setup.answers[key] == (100, False)
    setup.tick(5 * SECOND - 1)
    assert not setup.sent[-1].renewal
    setup.tick(5 * SECOND)
    assert setup.renewed() == [key]


def test_a_value_that_is_known_to_be_bad_ends_a_prompt_whatever_the_store_says() -> None:
    setup = Setup()
    setup.store("a", "b", "c")
    setup.negative.add(block("b"), 0, lasting=True)
    key = setup.hint(1, "a", "b", "c")
    setup.ask(0)
    setup.answer()
    assert setup.answers == {key: (1, False)}


def test_a_store_that_stops_answering_makes_all_who_wait_misses_at_once() -> None:
    setup = Setup()
    setup.hint(0, "a")
    setup.ask(0)
    keys = [setup.hint(number, f"b{number}") for number in range(1, 1001)]
    setup.up = False
    setup.answered(setup.sent[0].number, None, 4 * SECOND)
    assert len(setup.answers) == 1001
    assert all(setup.answers[key] == (0, True) for key in keys)
    assert len(setup.sent) == 1
    late = setup.hint(2000, "c")
    assert setup.answers[late] == (0, True)
    setup.answer()  # the call returns at last, too late
    setup.up = True
    setup.hint(2001, "d")
    setup.ask(5 * SECOND)
    assert len(setup.sent) == 2


def test_an_answer_that_comes_past_its_deadline_is_not_taken_for_the_next_question_s() -> None:
    setup = Setup()
    setup.store("a", "b")
    setup.hint(1, "a", "b")
    setup.ask(0)
    setup.answered(setup.sent[0].number, None, 4 * SECOND)
    key = setup.hint(2, "x", "y")
    setup.ask(4 * SECOND)
    assert len(setup.sent) == 2
    setup.answered(setup.sent[0].number, [Found(b"\1\1", bytes(2))], 5 * SECOND)
    assert key not in setup.answers
    setup.answer(5 * SECOND)
    assert setup.answers[key] == (0, False)


def test_no_request_waits_for_its_turn_past_the_deadline() -> None:
    setup = Setup()
    for number in range(21):
        setup.hint(number, *[f"{number}-{i}" for i in range(256)])
    setup.ask(0)
    setup.tick(4 * SECOND - 1)
    assert not setup.answers
    setup.tick(4 * SECOND)
    assert len(setup.answers) == 5, "all but those of the question that is out"


def test_a_known_miss_is_not_asked_for_again_until_it_is_old_or_we_store_it() -> None:
    setup = Setup()
    setup.store("a")
    setup.hint(1, "a", "b", "c")
    setup.ask(0)
    setup.answer()
    again = setup.hint(2, "b", "c")
    assert setup.answers[again] == (0, False), "answered without a question"
    setup.hint(3, "a", "b", "c")
    setup.ask(0)
    setup.answer()
    setup.negative.stored([block("b")], 0)
    setup.hint(4, "b")
    setup.ask(0)
    assert len(setup.sent) == 3
    setup.answer()
    setup.hint(5, "b", now=MISS_NS)
    setup.ask(MISS_NS)
    assert len(setup.sent) == 4


def test_what_is_staged_needs_no_question() -> None:
    setup = Setup()
    setup.store("a")
    setup.hint(1, "a")
    setup.ask(0)
    setup.answer()
    assert setup.planner.next_order() is not None
    setup.up = False
    shared = setup.hint(2, "a", "b")
    assert setup.answers[shared] == (1, True)
    assert setup.answers[setup.hint(3, "a")] == (1, False)


def test_hits_that_wait_longer_than_half_their_lease_are_asked_for_again() -> None:
    setup = Setup()
    setup.store("x", "a", "b", "c")
    setup.hint(1, "x")
    waiting = setup.hint(2, "a", "b", "c")
    setup.ask(0)
    setup.answer()
    setup.planner.next_order()
    setup.planner.next_order()
    setup.tick(5 * SECOND - 1)
    assert len(setup.sent) == 1
    setup.tick(5 * SECOND)
    assert setup.renewed() == [waiting]
    setup.stored.discard(block("c"))
    setup.answer(5 * SECOND)
    assert setup.renewals == {waiting: 2}
    assert setup.planner.requests[waiting].limit == 2, "shorter, not failed"
    setup.tick(10 * SECOND)
    assert len(setup.sent) == 3, "and again half a lease later"


def test_the_lease_of_blocks_that_are_taken_back_is_renewed_and_their_medium_kept() -> None:
    """Also when it was staged for a long time before, or never looked up; the last block lies only on disk."""
    setup = Setup()
    setup.store("x", "y")
    first = setup.hint(1, "x")
    setup.ask(0)
    setup.answer()
    planner = setup.planner
    planner.fetched(planner.next_order().number, [True], 1)  # type: ignore[union-attr]
    found = setup.hint(2, "x", priority=1)
    setup.tick(5 * SECOND)
    assert len(setup.sent) == 1, "nothing waits for a fetch"
    planner.finish(first)
    planner.looked_up(setup.hint(3, "y"), 1, b"\1")
    assert planner.next_order(Lane.DISK) is not None
    assert planner.requests[found].taken_back == 1
    setup.tick(10 * SECOND)
    assert setup.sent[-1].renewal
    assert [(q.request.key, q.digests) for q in setup.sent[-1].questions] == [(found, (b"x.......\0",))]


def test_a_renewal_keeps_what_is_known_of_the_blocks_before_it() -> None:
    setup = Setup()
    key = setup.hint(1, "a", "b", "c")
    setup.ask(0)
    setup.answered(setup.sent[-1].number, [Found(b"\1\1\1", b"\1\0\1")], 0)
    assert setup.planner.next_order(Lane.DISK) is not None
    setup.tick(5 * SECOND)
    assert setup.sent[-1].questions[0].start == 1
    setup.answered(setup.sent[-1].number, [Found(b"\1\0", bytes(2))], 5 * SECOND)
    assert setup.planner.requests[key].limit == 2
    assert setup.planner.requests[key].on_disk == b"\1\0"


def test_a_renewal_that_fails_takes_nothing_away() -> None:
    setup = Setup()
    setup.store("x", "a")
    setup.hint(1, "x")
    waiting = setup.hint(2, "a")
    setup.ask(0)
    setup.answer()
    setup.planner.next_order()
    setup.tick(5 * SECOND)
    setup.answered(setup.sent[-1].number, None, 5 * SECOND)
    assert setup.planner.requests[waiting].limit == 1
    setup.up = False
    setup.tick(10 * SECOND)
    setup.tick(15 * SECOND - 1)
    assert len(setup.sent) == 2
    setup.up = True
    setup.tick(15 * SECOND)
    assert setup.renewed() == [waiting], "tried again when it is due again"
    assert len(setup.sent) == 3


PROMPT = 8192  # blocks: 128k tokens of 16 each
MS = 1_000_000


def held(prompts: int, *, new_ms: int = 0) -> list[int]:
    """Hint so many long prompts, which wait for six seconds with a lease of two; return those that never lost it.

    `new_ms`: another prompt of 1,024 blocks comes each so many milliseconds.  A call takes 1 ms, and for each digest of
    a new prompt 8 us, for each that is renewed 1.5 us, as measured with the medium and without it.
    """
    planner = Planner(1, FlagsModel(), chunk_blocks=1)
    look_ups = LookUps(planner.requests, NegativeCache(), timeout_ns=4 * SECOND, lease_ns=2 * SECOND)

    def hint(number: int, blocks: int, now: int) -> None:
        digests = b"".join(block.to_bytes(8, "big") for block in range(number << 20, (number << 20) + blocks))
        assert look_ups.add(planner.hinted((number, 1), digests), now, answering=True) is None

    for number in range(prompts):
        hint(number, PROMPT, 0)
    ends = np.full((prompts, PROMPT), np.iinfo(np.int64).max)  # of each digest's lease
    lost: set[int] = set()
    slices = Counter[int]()  # digests that were asked for the first time
    batch, back, new, before = None, 0, 1000, 0
    for now in range(0, 6 * SECOND, MS):
        if new_ms and now % (new_ms * MS) == 0:
            hint(new, BATCH_DIGESTS, now)
            planner.finish((new - 100, 1))
            new += 1
        if batch is not None and now >= back:
            for question in batch.questions:
                number, start = question.request.key[0], question.start
                if not batch.renewal:
                    start, slices[number] = slices[number], slices[number] + len(question.digests)
                if number < prompts:
                    ends[number, start : start + len(question.digests)] = batch.asked_ns + 2 * SECOND
            found = [Found(b"\1" * len(question.digests), b"") for question in batch.questions]
            for answer in look_ups.answered(batch.number, found, now):
                if isinstance(answer, Answer):
                    planner.choose(answer.request)
            batch = None
        if now % (100 * MS) == 0:
            lost.update(np.flatnonzero((ends < now).any(axis=1)).tolist())
            assert not look_ups.tick(now)
        if batch is None and (batch := look_ups.next_batch(now)) is not None:
            count = sum(len(question.digests) for question in batch.questions)
            most = max(before, RENEWED_AT_ONCE) + BATCH_DIGESTS
            assert not batch.renewal or count < most, "new requests wait longer for each other"
            before = 0 if batch.renewal else count
            back = now + MS + count * (1500 if batch.renewal else 8000)
    return [number for number in range(prompts) if number not in lost]


@pytest.mark.parametrize(("prompts", "new_ms"), [(16, 0), (4, 12)])
def test_a_lease_of_two_seconds_holds_many_prompts_of_128k_tokens(prompts: int, new_ms: int) -> None:
    """Also beside new prompts that take nearly all of the look-ups' time."""
    assert held(prompts, new_ms=new_ms) == list(range(prompts))


def test_of_more_prompts_than_can_be_renewed_the_most_urgent_keep_their_lease() -> None:
    kept = held(40)
    assert kept == list(range(len(kept)))
    assert len(kept) >= 10


def test_a_foreign_object_stays_known_after_we_stored_the_key() -> None:
    cache = NegativeCache()
    cache.add(b"foreign", 0, lasting=True)
    cache.add(b"miss", 0)
    cache.stored([b"foreign", b"miss"], 0)
    assert cache.first([b"miss", b"foreign"], 1) == 1
    assert cache.first([b"foreign"], LASTING_NS) == 1
    cache.add(b"foreign", 0, lasting=True)
    cache.add(b"foreign", 0)
    assert cache.first([b"foreign"], MISS_NS) == 0, "a look-up that misses it meanwhile makes it no plain miss"
    cache.clear(5)
    assert cache.first([b"foreign"], 1) == 1
    cache.add(b"foreign", 6, asked_ns=5, lasting=True)
    assert cache.first([b"foreign"], 7) == 1, "the store was asked for an older key"
    cache.add(b"foreign", 7, asked_ns=6)
    assert cache.first([b"foreign"], 8) == 0


def test_what_an_engine_stores_is_no_plain_miss_to_its_neighbours() -> None:
    caches = NegativeCaches()
    one, neighbour, stranger = (caches.join(names) for names in (["a", "b"], ["b", "c"], ["c"]))
    for cache in (one, neighbour, stranger):
        cache.add(b"miss", 0)
        cache.add(b"foreign", 0, lasting=True)
    caches.stored(one, [b"miss", b"foreign"], 1)
    assert [cache.first([b"miss"], 2) for cache in (one, neighbour, stranger)] == [1, 1, 0]
    assert [cache.first([b"foreign"], 2) for cache in (one, neighbour, stranger)] == [0, 0, 0], "each engine's own"
    caches.leave(one)
    caches.leave(stranger)
    neighbour.add(b"miss", 2)
    caches.stored(neighbour, [b"miss"], 3)
    assert neighbour.first([b"miss"], 4) == 1


def test_a_miss_of_before_the_put_that_comes_after_it_is_none() -> None:
    """The neighbour stored the block while the question was out."""
    setup = Setup()
    setup.hint(1, "a", now=1)
    setup.ask(1)
    setup.negative.stored([block("a")], 2)
    setup.answer(now=3)
    setup.hint(2, "a", now=4)
    setup.ask(4)
    assert len(setup.sent) == 2
    setup.answer(now=5)
    again = setup.hint(3, "a", now=6)
    assert setup.answers[again] == (0, False), "it was asked for after the put"
    setup.negative.add(b"a", 1, asked_ns=1, lasting=True)
    setup.negative.stored([b"a"], 2)
    setup.negative.add(b"a", 3, asked_ns=1, lasting=True)
    assert setup.negative.first([b"a"], 4) == 0, "of a foreign one this says nothing"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3 * MISS_NS), st.booleans())), st.integers(0, 3 * MISS_NS))
def test_the_cache_knows_exactly_what_is_young(entries: list[tuple[int, int, bool]], now: int) -> None:
    cache = NegativeCache()
    until = dict.fromkeys(range(10), -1)
    lasting: set[int] = set()
    for digest, at, long in sorted(entries, key=lambda entry: entry[1]):
        lasting |= {digest} if long else set()
        cache.add(bytes([digest]), at, lasting=long)
        until[digest] = at + (LASTING_NS if digest in lasting else MISS_NS)
    known = [digest for digest in range(10) if until[digest] > now]
    assert cache.first([bytes([digest]) for digest in range(10)], now) == min(known, default=10)


def test_the_cache_is_bounded() -> None:
    cache = NegativeCache()
    for number in range(MAX_ENTRIES + 10):
        cache.add(number.to_bytes(4, "big"), 0)
    assert len(cache) == MAX_ENTRIES
    cache.stored((number.to_bytes(4, "big") for number in range(MAX_ENTRIES + 10)), 2)
    first, last = ((number).to_bytes(4, "big") for number in (0, MAX_ENTRIES + 9))
    for each in (first, last):
        cache.add(each, 3, asked_ns=1)
    assert [cache.first([each], 4) for each in (first, last)] == [0, 1], "the oldest puts are forgotten"


def test_a_look_up_waits_for_the_one_before_it_no_longer_than_its_time() -> None:
    setup = Setup()
    setup.store("a")
    setup.hint(1, "a")
    setup.ask(0)
    second = setup.hint(2, "a")
    setup.ask(0)
    assert len(setup.sent) == 1
    assert second not in setup.answers
    setup.tick(4 * SECOND)
    assert setup.answers == {second: (0, True)}
