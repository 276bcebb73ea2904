"""Look-ups: batches, what needs no question, and deadlines, on a clock of the test."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.engine.lookups import FIRST_DIGESTS, GIVE_UP_NAMES, MOST_KEYS, SLICE_DIGESTS
from kvprefetch.daemon.engine.transfers import Found
from kvprefetch.kv.prompts import GIVE_UP_SLICE, GIVE_UP_SLICES, Prompt
from tests.daemon.engine.asking import SECOND, Setup
from tests.daemon.planning.support import block


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


def test_the_keys_of_a_question_are_bounded_whatever_the_shards_of_a_block() -> None:
    """A question of 520,000 keys takes seconds, and the next one of every engine waits for it."""
    setup = Setup(shards=128)
    names = [str(i) for i in range(1000)]
    setup.store(*names)
    keys = [setup.hint(1, *names), *(setup.hint(number, *names[:number]) for number in range(2, 200))]
    setup.ask()
    while len(setup.answers) < len(keys):
        setup.answer()
    assert setup.answers[keys[0]] == (1000, False)
    assert MOST_KEYS // 128 <= max(sum(map(len, batch.digests)) for batch in setup.sent) < 2 * MOST_KEYS // 128


def test_a_prompt_of_any_length_is_asked_for_slice_by_slice_up_to_its_first_absent_block() -> None:
    setup = Setup()
    names = [str(i) for i in range(20_000)]
    setup.store(*names[:12_000])
    key = setup.hint(1, *names)
    setup.ask(0)
    while key not in setup.answers:
        setup.answer()
    assert setup.sizes == [FIRST_DIGESTS, *[SLICE_DIGESTS] * 3]
    assert setup.answers == {key: (12_000, False)}
    miss = setup.hint(2, *reversed(names))
    setup.ask(0)
    setup.answer()
    assert setup.answers[miss] == (0, False)
    assert [len(question.names) for question in setup.sent[-1].questions] == [FIRST_DIGESTS]


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
    setup.answered(setup.sent[0], [Found(b"\0", b"\0"), *slices], 1)
    setup.up = False
    setup.answered(setup.sent[1], None, 2)
    assert setup.answers[failed] == setup.answers[waits] == (FIRST_DIGESTS, True)
    assert setup.planner.requests[failed].on_disk == b"\1" * FIRST_DIGESTS
    setup.up, names = True, [str(i) for i in range(1000, 1100)]
    late = setup.hint(3, *names)
    setup.ask(3)
    setup.answered(setup.sent[2], [Found(b"\1" * FIRST_DIGESTS, bytes(FIRST_DIGESTS))], 4)
    setup.look_ups.asked(setup.planner.requests[late])
    setup.tick(4 * SECOND + 4)
    assert late not in setup.answers, "its second slice is out"
    setup.answered(setup.sent[3], [Found(b"\1" * 36, bytes(36))], 5)
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
    assert not setup.sent[-1].parts
    setup.tick(5 * SECOND)
    assert setup.renewed() == [key]


def test_a_value_that_is_known_to_be_bad_ends_a_prompt_whatever_the_store_says() -> None:
    setup = Setup()
    setup.store("a", "b", "c")
    setup.bad_values.add(block("b"), 0, asked_ns=0)
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
    setup.answered(setup.sent[0], None, 4 * SECOND)
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
    setup.answered(setup.sent[0], None, 4 * SECOND)
    key = setup.hint(2, "x", "y")
    setup.ask(4 * SECOND)
    assert len(setup.sent) == 2
    setup.answered(setup.sent[0], [Found(b"\1\1", bytes(2))], 5 * SECOND)
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


def test_a_late_answer_answers_no_request_twice_that_found_a_part() -> None:
    setup = Setup()
    names = [str(i) for i in range(100)]
    setup.store(*names)
    key = setup.hint(1, *names)
    setup.ask(0)
    setup.answered(setup.sent[0], [Found(b"\1" * 64, bytes(64))], 1)
    setup.answered(setup.sent[1], None, 4 * SECOND)
    assert setup.answers[key] == (64, True)
    setup.hint(2, "x")
    setup.ask(4 * SECOND)
    setup.answered(setup.sent[1], [Found(b"\1" * 36, bytes(36))], 5 * SECOND)
    assert len(setup.sent) == 3, "one batch is out at a time"


@pytest.mark.parametrize("late", [False, True])
def test_no_event_gives_up_more_names_than_its_bound(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """A thousand long prompts wait as the store goes away, or as their time is over."""
    setup, looked_at = Setup(), [0]
    keys = {setup.hint(number, *(f"{number}-{block}" for block in range(100))) for number in range(1000)}
    give_up = Prompt.give_up

    def counted(prompt: Prompt) -> int:
        looked_at[0] += (names := give_up(prompt))
        return names

    monkeypatch.setattr(Prompt, "give_up", counted)
    parts, now = 0, 5 * SECOND
    while keys - setup.answers.keys():
        looked_at[0] = 0
        setup.apply(setup.look_ups.tick(now) if late else setup.look_ups.give_up(now))
        assert 0 < looked_at[0] < GIVE_UP_NAMES + GIVE_UP_SLICE * GIVE_UP_SLICES
        parts += 1
    assert parts >= 3
    assert not setup.look_ups.waiting
    assert {setup.answers[key] for key in keys} == {(0, True)}
