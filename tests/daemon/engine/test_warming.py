"""Warming, without a daemon: the room that it takes, the requests that it waits for, and its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest

from kvprefetch.daemon.engine.transfers import Found
from kvprefetch.daemon.engine.warming import MAX_WAITING, PATIENCE_NS, QUIET_NS, Warming
from kvprefetch.daemon.planning.negative import NegativeCache
from kvprefetch.daemon.planning.requests import Order
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.shmring.wire.admin import Report, Warm, Warmed
from kvprefetch.shmring.wire.codec import Message
from tests.daemon.planning.support import FlagsModel, Planner, block, digests, hint, hit, run, shown

ABOUT = Warmed(engine="e", epoch=1, block_tokens=32, hash_algorithm="", hash_probe="")
ONE, OTHER = "1" * 32, "2" * 32


def names(text: str) -> list[bytes]:
    return [block(name) for name in text]


class Setup:
    """`held` is what the store has, `on_disk` what it has only there."""

    def __init__(
        self, slots: int = 8, *, held: str = "", on_disk: str = "", chunk: int = 8, share: float = 1.0
    ) -> None:
        self.flags = FlagsModel()
        self.planner = Planner(slots, self.flags, chunk_blocks=chunk, wasted_share=share)
        self.now = 0
        self.held, self.on_disk = set(names(held + on_disk)), set(names(on_disk))
        self.negative = NegativeCache()
        self.questions: list[Sequence[Sequence[bytes]]] = []
        self.pending: list[int] = []
        self.answering = True
        self.totals: Counter[str] = Counter()
        self.warming = Warming(self.planner, self.negative, ABOUT)
        self.replies: list[Message] = []
        self.numbers = count(1)

    def carry_on(self) -> None:
        """Ask and reply what there is to ask and to reply, as an epoch does after every event."""
        while (question := self.warming.next_question(self.now)) is not None:
            if self.answering:
                self.questions.append(question.digests)
                self.pending.append(question.number)
            else:
                self.warming.answered(question.number, None, self.now)
        while (answer := self.warming.next_answer()) is not None:
            self.totals.update(answer.counts)
            self.replies.append(answer.message)

    def answered(self, found: Sequence[Found] | None) -> None:
        self.warming.answered(self.pending.pop(), found, self.now)
        self.carry_on()

    def next_order(self, lane: Lane) -> Order | None:
        order = self.warming.next_order(lane, self.now)
        self.carry_on()
        return order

    def fetched(self, order: Order, good: int) -> None:
        self.warming.fetched(order, good, self.now)
        self.carry_on()

    def tick(self) -> Counter[str] | None:
        counts = self.warming.tick(self.now)
        self.carry_on()
        return counts

    def stop(self, why: str) -> None:
        self.warming.stop(why)
        self.carry_on()

    def order(self, *chains: str, run: str = ONE) -> None:
        warm = Warm(run=run, chains=[[digests(name).hex() for name in chain] for chain in chains])
        self.warming.add(next(self.numbers), warm)
        self.carry_on()

    def answer(self) -> None:
        """What the store says to the questions that are out."""
        answers = []
        for chain in self.questions[-1]:
            present = bytes(digest in self.held for digest in chain)
            answers.append(Found(present, bytes(digest in self.on_disk for digest in chain)))
        self.answered(answers)

    def found(self, *chains: str, run: str = ONE) -> None:
        """An order whose look-up has ended."""
        self.order(*chains, run=run)
        self.answer()

    def warm(self, *chains: str, run: str = ONE) -> list[str]:
        """An order that is carried out; the blocks of each fetch."""
        self.found(*chains, run=run)
        return self.fetch()

    def fetch(self, *, fail: str = "") -> list[str]:
        """Carry out every fetch; the blocks of each."""
        done = []
        for lane in Lane:
            while (order := self.next_order(lane)) is not None:
                results = [digest not in names(fail) for digest in order.digests]
                self.planner.fetched(order.number, results, 1)
                done.append("".join(shown(digest) for digest in order.digests))
                self.fetched(order, sum(results))
        return done

    def last(self) -> dict[str, int]:
        answer = self.replies[-1]
        assert isinstance(answer, Warmed), answer
        return {
            name: count
            for name in ("staged", "fetched", "absent", "no_room", "failed")
            if (count := getattr(answer, name))
        }

    def staged(self, text: str, key: int = 99) -> bool:
        """Whether a hint now finds all of these without a fetch."""
        found = hint(self.planner, key, *text)
        request = self.planner.finish(found)
        assert request is not None
        return request.issued == len(text)


def test_the_next_hint_finds_warmed_blocks_that_no_request_holds() -> None:
    setup = Setup(held="abc")
    assert setup.warm("abcd") == ["ab", "c"], "a quarter of a call, and of the slots, at a time"
    assert setup.last() == {"fetched": 3, "absent": 1}
    assert isinstance(setup.replies[0], Warmed)
    assert setup.replies[0].found == [3]
    assert setup.planner.gauges()["blocks_pinned"] == 0
    assert setup.planner.gauges()["slots_idle"] == 3
    key = hint(setup.planner, 1, "a", "b", "c")
    setup.planner.looked_up(key, 3)
    assert setup.flags.count[key] == 3
    assert run(setup.planner) == []


def test_what_is_staged_already_is_not_asked_for() -> None:
    setup = Setup(held="abc")
    setup.warm("ab")
    setup.order("ab")
    assert setup.last() == {"staged": 2}
    assert len(setup.questions) == 1
    setup.order("abc", "ab")
    assert setup.questions[-1] == [names("c"), []]
    setup.answer()
    assert setup.fetch() == ["c"]
    assert setup.last() == {"staged": 4, "fetched": 1}
    assert +setup.totals == {"staged": 6, "fetched": 3}


def test_a_block_that_two_chains_share_is_fetched_once() -> None:
    setup = Setup(held="abxy")
    assert "".join(setup.warm("ax", "ay", "ab")) == "axyb"
    assert setup.last() == {"fetched": 4, "staged": 2}


def test_it_takes_only_room_that_no_request_holds() -> None:
    setup = Setup(slots=4, held="wxyz")
    key = hint(setup.planner, 1, "a", "b", "c", priority=100)
    setup.planner.looked_up(key, 3)
    run(setup.planner)
    assert setup.warm("wxyz") == ["w"]
    assert setup.last() == {"fetched": 1, "no_room": 3}
    assert not setup.flags.expired
    assert setup.flags.count[key] == 3


def test_it_replaces_what_was_used_longest_ago_but_nothing_of_its_own_run() -> None:
    setup = Setup(slots=4, held="stuvwxyz")
    setup.warm("stuv", run=ONE)
    assert setup.last() == {"fetched": 4}
    setup.found("swxyz", run=OTHER)  # `s` is staged and listed: used now
    assert setup.fetch() == ["w", "x", "y"]
    assert setup.last() == {"staged": 1, "fetched": 3, "no_room": 1}
    assert setup.staged("swxy")


def test_a_request_goes_first_and_finds_room_at_once() -> None:
    setup = Setup(slots=4, held="wxyzab", chunk=4)
    setup.found("wxyz")
    first = setup.next_order(Lane.MEMORY)
    assert first is not None
    key = hint(setup.planner, 1, "a", "b", "c", "d")
    setup.planner.looked_up(key, 4)
    setup.planner.fetched(first.number, [True], 1)
    setup.fetched(first, 1)
    assert setup.next_order(Lane.MEMORY) is None, "a request wants its blocks"
    assert setup.replies == []
    assert run(setup.planner) == [["a", "b", "c", "d"]], "the warmed block gives its slot"
    assert setup.fetch() == []
    assert setup.last() == {"fetched": 1, "no_room": 3}


def test_requests_that_come_too_early_do_not_hold_it_up() -> None:
    """Past the ceiling of waste (ceiling.py): their blocks wait for the scheduler, not for the link."""
    setup = Setup(held="ab", share=0.0)
    key = hit(setup.planner, 1, "w")
    assert run(setup.planner) == [["w"]]
    setup.planner.finish(key)
    first, second = hit(setup.planner, 2, "x"), hit(setup.planner, 3, "y")
    assert run(setup.planner) == [["x"]]
    assert setup.warm("ab") == ["ab"]
    assert setup.last() == {"fetched": 2}
    setup.planner.finish(first)
    assert run(setup.planner) == [["y"]]
    setup.planner.finish(second)


def test_a_block_that_a_request_fetched_meanwhile_counts_as_staged() -> None:
    setup = Setup(held="ab")
    setup.found("ab")
    key = hint(setup.planner, 1, "a", "b")
    setup.planner.looked_up(key, 2)
    run(setup.planner)
    assert setup.fetch() == []
    assert setup.last() == {"staged": 2}


def test_blocks_on_disk_go_in_their_lane_and_within_its_share() -> None:
    setup = Setup(slots=8, held="a", on_disk="xyz", chunk=32)
    setup.found("axyz")
    order = setup.next_order(Lane.DISK)
    assert order is not None
    assert (order.lane, len(order.slots)) == (Lane.DISK, 2)
    assert setup.next_order(Lane.MEMORY) is None, "one fetch at a time"


def test_a_block_that_does_not_arrive_leaves_its_slot() -> None:
    setup = Setup(held="ab")
    setup.found("ab")
    setup.fetch(fail="b")
    assert setup.last() == {"fetched": 1, "failed": 1}
    assert setup.planner.gauges()["slots_free"] == 7


def test_a_fetch_that_hangs_fails_its_blocks_and_is_forgotten() -> None:
    setup = Setup(held="ab")
    setup.found("ab")
    order = setup.next_order(Lane.MEMORY)
    assert order is not None
    setup.planner.overdue(order.number, 1)
    setup.fetched(order, 0)
    assert setup.last() == {"failed": 2}
    setup.planner.fetched(order.number, [True] * 2, 2)
    setup.fetched(order, 2)
    assert len(setup.replies) == 1
    assert setup.planner.gauges()["slots_free"] == 8


def test_known_misses_and_a_silent_store() -> None:
    setup = Setup(held="abc")
    setup.negative.add(block("b"), 0)
    setup.warm("abc")
    assert setup.last() == {"fetched": 1, "absent": 2}
    setup.order("xyz")
    setup.order("c", run=OTHER)
    setup.answered(None)
    assert isinstance(setup.replies[-1], Report)
    assert "store" in setup.replies[-1].text
    setup.answer()  # to the order that waited behind it
    assert setup.fetch() == ["c"]
    assert setup.last() == {"fetched": 1}
    setup.answering = False
    setup.order("xyz")
    assert isinstance(setup.replies[-1], Report)


def test_orders_of_several_connections_take_turns_and_are_bounded() -> None:
    setup = Setup(held="abcdefgh")
    for name in "abcde"[: MAX_WAITING + 1]:
        setup.order(name)
    assert setup.replies == []
    setup.order("f")
    assert isinstance(setup.replies[-1], Report)
    while setup.pending:
        setup.answer()
        setup.fetch()
    assert [type(reply) for reply in setup.replies] == [Report] + [Warmed] * (MAX_WAITING + 1)


def test_an_order_without_a_turn_is_answered_in_time() -> None:
    setup = Setup(slots=2, held="ab")
    key = hint(setup.planner, 1, "x")
    setup.planner.looked_up(key, 1)
    assert setup.warm("ab") == []
    setup.now = PATIENCE_NS - 1
    setup.tick()
    assert setup.replies == []
    setup.now = PATIENCE_NS
    setup.tick()
    assert setup.last() == {"no_room": 2}


@pytest.mark.parametrize("moment", ["asked", "looked up", "in flight"])
def test_a_reset_or_the_end_answers_all_orders(moment: str) -> None:
    setup = Setup(held="ab")
    setup.order("ab")
    setup.order("ba")
    order = None
    if moment != "asked":
        setup.answer()
    if moment == "in flight":
        order = setup.next_order(Lane.MEMORY)
    setup.planner.reset()
    setup.stop("its weights changed")
    assert [type(reply) for reply in setup.replies] == [Report, Report]
    if setup.pending:
        setup.answer()
    if order is not None:
        setup.planner.fetched(order.number, [True] * 2, 2)
        setup.fetched(order, 2)
    assert len(setup.replies) == 2
    assert setup.fetch() == []
    assert setup.planner.gauges()["slots_free"] == 8, "void blocks are not kept"


def test_what_was_done_is_summed_up_once_when_no_order_comes_any_more() -> None:
    setup = Setup(held="ab")
    setup.warm("a")
    assert setup.tick() is None
    setup.order("bc")
    setup.now = 10 * QUIET_NS
    setup.answer()
    setup.fetch()
    assert setup.tick() is None
    setup.now += QUIET_NS
    done = setup.tick()
    assert done is not None
    assert +done == {"fetched": 2, "absent": 1}
    assert setup.tick() is None
