"""Announcements, without a daemon: the room that they take, the requests that they wait for, and their answers."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from kvprefetch.daemon.engine.ahead import AT_WORK, MAX_WAITING, PATIENCE_NS, Ahead
from kvprefetch.daemon.planning.requests import Failure, Request
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.kv.prompts import Prompt
from kvprefetch.shmring.wire.admin import Report, Warm, Warmed
from kvprefetch.shmring.wire.codec import Message
from tests.daemon.planning.support import ONE_GROUP, FlagsModel, Planner, block, digests, hint, hit, run, shown

ABOUT = Warmed(engine="e", epoch=1, block_tokens=32, hash_tokens=32, hash_algorithm="", hash_probe="")


class Setup:
    """`held` is what the store has, `on_disk` what it has only there. It answers at once, unless `silent`."""

    def __init__(self, slots: int = 8, *, held: str = "", on_disk: str = "", chunk: int = 8) -> None:
        self.flags = FlagsModel()
        self.planner = Planner(slots, self.flags, chunk_blocks=chunk)
        self.now = 0
        self.held, self.on_disk = set(map(block, held + on_disk)), set(map(block, on_disk))
        self.silent = False
        self.asked: list[str] = []
        self.waiting: list[Request] = []
        self.ahead = Ahead(ABOUT)
        self.replies: list[Message] = []
        self.totals: Counter[str] = Counter()
        self.numbers = count(1)

    def carry_on(self) -> None:
        """Plan, look up, end and answer what there is, as an epoch does after every event."""
        while True:
            while (wanted := self.ahead.next_wanted()) is not None:
                blocks = range(wanted.blocks)
                prompt = Prompt(ONE_GROUP, wanted.hashes, blocks, room=0, staged=self.planner.blocks.holds)
                self.waiting.append(self.planner.hint(wanted.key, prompt, 0, 0, wanted.announced))
            while self.waiting and not self.silent:
                self.look_up(self.waiting.pop(0))
            if not self.flags.ended:
                break
            request = self.flags.ended.pop(0)
            self.planner.finish(request.key)
            self.ahead.ended(request)
        while (answer := self.ahead.next_answer()) is not None:
            self.totals.update(answer.counts)
            self.replies.append(answer.message)

    def look_up(self, request: Request) -> None:
        while names := request.prompt.next(100):
            self.asked.append("".join(map(shown, names)))
            request.prompt.found(
                bytes(name in self.held for name in names), bytes(name in self.on_disk for name in names)
            )
        choice = self.planner.choose(request)
        self.ahead.looked_up(request, choice.blocks, unavailable=False)

    def announce(self, *prompts: str, deadline_ms: int = 600_000) -> None:
        chains = [[digests(name).hex() for name in prompt] for prompt in prompts]
        self.ahead.add(next(self.numbers), Warm(name="list", chains=chains, deadline_ms=deadline_ms), self.now)
        self.carry_on()

    def fetch(self, *, fail: str = "") -> list[str]:
        """Carry out every fetch that is due while nothing else is; the blocks of each."""
        done = []
        for lane in Lane:
            while (order := self.planner.next_order(lane, ahead=True)) is not None:
                assert self.planner.next_order(lane, ahead=True) is None, "one at a time"
                names = [shown(name) for name in order.digests]
                self.planner.fetched(order.number, [name not in fail for name in names], 1)
                done.append("".join(names))
                self.carry_on()
            self.carry_on()
        return done

    def tick(self) -> None:
        for key in self.ahead.late(self.now):
            self.planner.stop(key)
        self.carry_on()

    def last(self) -> dict[str, int]:
        answer = self.replies[-1]
        assert isinstance(answer, Warmed), answer
        names = ("staged", "fetched", "absent", "no_room", "failed")
        return {name: count for name in names if (count := getattr(answer, name))}

    def staged(self, text: str, key: int = 99) -> bool:
        """Whether a hint now finds all of these without a fetch."""
        request = self.planner.finish(hint(self.planner, key, *text))
        assert request is not None
        return request.issued == len(text)


def test_the_next_hint_finds_what_was_announced_and_no_request_holds() -> None:
    setup = Setup(held="abc")
    setup.announce("abcd")
    assert setup.fetch() == ["ab", "c"], "a quarter of a call at a time"
    assert setup.last() == {"fetched": 3, "absent": 1}
    assert isinstance(setup.replies[0], Warmed)
    assert setup.replies[0].found == [3]
    gauges = setup.planner.gauges()
    assert (gauges["blocks_pinned"], gauges["slots_idle"], gauges["requests"]) == (0, 3, 0)
    key = hint(setup.planner, 1, "a", "b", "c")
    setup.planner.looked_up(key, 3)
    assert setup.flags.count[key] == 3
    assert run(setup.planner) == []


def test_what_is_staged_already_is_neither_asked_for_nor_fetched() -> None:
    setup = Setup(held="abcxy")
    setup.announce("ab")
    setup.fetch()
    setup.announce("ab")
    assert setup.last() == {"staged": 2}
    setup.announce("abc", "ab")
    assert setup.fetch() == ["c"]
    assert setup.last() == {"staged": 4, "fetched": 1}
    assert setup.asked == ["ab", "c"]
    setup.announce("abx", "aby")
    assert "".join(setup.fetch()) == "xy", "what prompts share is fetched once"
    assert +setup.totals == {"staged": 10, "fetched": 5}


def test_a_hinted_request_goes_first_and_takes_the_room() -> None:
    setup = Setup(slots=4, held="wxyzabcd", chunk=4)
    setup.announce("wxyz")
    first = setup.planner.next_order(ahead=True)
    assert first is not None
    hit(setup.planner, 1, *"abcd")
    setup.planner.fetched(first.number, [True], 1)
    assert setup.planner.next_order(ahead=True) is None, "a request wants its blocks"
    assert run(setup.planner) == [["a", "b", "c", "d"]], "the announced block gives its slot"
    assert setup.fetch() == []
    assert setup.last() == {"no_room": 4}
    assert not setup.flags.taken_back


def test_it_takes_no_room_of_requests_nor_of_announcements_before_their_deadline() -> None:
    setup = Setup(slots=4, held="stuvwxyz")
    key = hit(setup.planner, 1, "a")
    run(setup.planner)
    setup.announce("stuv", deadline_ms=1000)
    assert setup.fetch() == ["st", "u"]
    assert setup.last() == {"fetched": 3, "no_room": 1}
    assert setup.flags.count[key] == 1
    setup.announce("wx")
    assert setup.fetch() == []
    assert setup.last() == {"no_room": 2}
    setup.now = 1_000_000_000
    setup.announce("sw")
    assert setup.fetch() == ["w"], "the last block makes room"
    assert setup.last() == {"staged": 1, "fetched": 1}
    assert setup.staged("s")
    assert run(setup.planner) == []


def test_a_block_that_a_request_fetched_meanwhile_counts_as_staged() -> None:
    setup = Setup(held="ab")
    setup.announce("ab")
    key = hit(setup.planner, 1, "a", "b")
    run(setup.planner)
    setup.fetch()
    assert setup.last() == {"staged": 2}
    setup.planner.finish(key)


def test_blocks_on_disk_go_in_their_lane() -> None:
    setup = Setup(slots=8, held="a", on_disk="xyz", chunk=32)
    setup.announce("axyz")
    assert setup.fetch() == ["a", "xyz"]
    assert setup.last() == {"fetched": 4}


@pytest.mark.parametrize("late", [False, True])
def test_a_block_that_does_not_arrive_leaves_its_slot(late: bool) -> None:
    setup = Setup(held="ab")
    setup.announce("ab")
    if late:
        order = setup.planner.next_order(ahead=True)
        assert order is not None
        setup.planner.overdue(order.number, 1, Failure("overdue"))
        setup.carry_on()
        assert setup.last() == {"failed": 2}
        setup.planner.fetched(order.number, [True] * 2, 2)
        assert len(setup.replies) == 1
    else:
        order = setup.planner.next_order(ahead=True)
        assert order is not None
        setup.planner.fetched(order.number, [True, False], 1, Failure("corrupt"))
        setup.carry_on()
        assert setup.last() == {"fetched": 1, "failed": 1}
    assert setup.planner.gauges()["slots_free"] == 8 - (not late)


def test_a_store_that_does_not_answer_is_a_refusal_and_those_behind_it_go_on() -> None:
    setup = Setup(held="ab")
    setup.silent = True
    setup.announce("ab")
    request = setup.waiting.pop()
    request.prompt.give_up()
    choice = setup.planner.choose(request)
    setup.ahead.looked_up(request, choice.blocks, unavailable=True)
    setup.silent = False
    setup.announce("b")
    assert setup.fetch() == ["b"]
    assert [type(reply) for reply in setup.replies] == [Report, Warmed]
    assert isinstance(setup.replies[0], Report)
    assert "store" in setup.replies[0].text
    assert setup.planner.gauges()["requests"] == 0


def test_announcements_are_bounded_and_so_are_the_prompts_at_work() -> None:
    setup = Setup(slots=64, held="abcdefgh")
    setup.silent = True
    for name in "abcde"[: MAX_WAITING + 1]:
        setup.announce(*[name] * AT_WORK)
    assert len(setup.waiting) == AT_WORK
    setup.announce("f")
    assert [type(each) for each in setup.replies] == [Report]
    setup.silent = False
    setup.carry_on()
    setup.fetch()
    assert [type(each) for each in setup.replies] == [Report] + [Warmed] * (MAX_WAITING + 1)


def test_an_announcement_without_a_turn_is_answered_in_time() -> None:
    setup = Setup(slots=8, held="ab")
    hit(setup.planner, 1, "x")
    setup.announce("ab", *["ab"] * AT_WORK)
    setup.now = PATIENCE_NS - 1
    setup.tick()
    assert setup.replies == []
    setup.now = PATIENCE_NS
    setup.tick()
    assert setup.last() == {"no_room": 2 * (AT_WORK + 1)}


@pytest.mark.parametrize("moment", ["asked", "looked up", "in flight"])
def test_a_reset_or_the_end_answers_all_announcements(moment: str) -> None:
    setup = Setup(held="ab")
    setup.silent = moment == "asked"
    setup.announce("ab")
    setup.announce("ba")
    order = setup.planner.next_order(ahead=True) if moment == "in flight" else None
    setup.planner.reset()
    setup.ahead.stop("its weights changed")
    setup.waiting.clear()
    setup.carry_on()
    assert [type(reply) for reply in setup.replies] == [Report, Report]
    if order is not None:
        setup.planner.fetched(order.number, [True] * 2, 2)
    assert setup.fetch() == []
    assert len(setup.replies) == 2
    assert setup.planner.gauges()["slots_free"] == 8, "void blocks are not kept"


def test_its_unused_blocks_are_no_waste_of_prefetch() -> None:
    setup = Setup(slots=2, held="abcdefgh")
    for prompt in ("ab", "cd", "ef"):
        setup.announce(prompt, deadline_ms=1)
        setup.now += 2_000_000
        setup.fetch()
    assert setup.planner.blocks.wasted == [4, 0]
    assert setup.planner.gauges()["slots_unused"] == 0
    key = hit(setup.planner, 1, "e", "f")
    setup.planner.finish(key)
    assert setup.planner.gauges()["slots_unused"] == 2, "a request asked for them now"
