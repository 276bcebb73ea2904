"""Announcements, without a daemon: the room that they take, the requests that they wait for, and their outcomes."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.engine.ahead import AT_WORK, ENOUGH, MAX_BYTES, MAX_KNOWN, MAX_WAITING, VAIN_SHARE, Ahead
from kvprefetch.daemon.planning.requests import Failure
from kvprefetch.daemon.telemetry.trace import Met
from kvprefetch.kv.groups import Group, Groups, Kind
from tests.daemon.engine.announcing import MS, Setup, announced, joined
from tests.daemon.planning.support import ONE_GROUP, digests, hint, hit, run


def test_the_next_hint_finds_what_was_announced_and_no_request_holds() -> None:
    setup = Setup(held="abc")
    setup.announce("abcd")
    assert setup.last() == ("accepted", {"absent": 1})
    assert setup.told[-1][1].started == 3
    assert setup.fetch() == ["ab", "c"], "a quarter of a call at a time"
    assert setup.last() == ("completed", {"fetched": 3, "absent": 1})
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
    assert setup.last() == ("completed", {"staged": 2})
    setup.announce("abc")
    assert setup.fetch() == ["c"]
    assert setup.asked == ["ab", "c"]
    setup.announce("abx", "aby")
    assert "".join(setup.fetch()) == "xy", "what prompts share is fetched once"


def test_the_request_of_an_announcement_ends_it() -> None:
    setup = Setup(held="abcdwx")
    setup.now = 5 * MS
    setup.announce("abcd", "ab", "wx")
    setup.fetch()
    assert setup.arrive("abx") == Met(5 * MS, 2), "the longest announcement that its prompt begins with"
    assert setup.outcomes("ab") == ["accepted", "completed", "used"]
    assert setup.outcomes("abcd") == ["accepted", "completed"]
    assert setup.arrive("abcx") is None, "one block of the announced prompt may be missing: its last one"
    assert setup.arrive("abc") == Met(5 * MS, 4)
    assert setup.arrive("wx") == Met(5 * MS, 2)
    assert setup.arrive("wx") is None
    assert (setup.ahead.count, setup.ahead.blocks) == (0, 0)


def test_a_request_that_comes_before_its_blocks_is_late_and_takes_them_over() -> None:
    setup = Setup(held="abcd", chunk=4)
    setup.announce("abcd")
    first = setup.planner.next_order(ahead=True)
    assert first is not None
    assert setup.arrive("abcd") == Met(0, 4)
    assert setup.outcomes("abcd") == ["accepted", "late"]
    key = hit(setup.planner, 1, *"abcd")
    setup.planner.fetched(first.number, [True], 1)
    assert run(setup.planner) == [["b", "c", "d"]]
    assert setup.flags.count[key] == 4
    setup.carry_on()
    assert setup.outcomes("abcd") == ["accepted", "late"]


@pytest.mark.parametrize("comes", [True, False])
def test_once_an_announcement_is_over_no_more_is_fetched_for_it(comes: bool) -> None:
    setup = Setup(held="abcd", chunk=4)
    setup.announce("abcd")
    first = setup.planner.next_order(ahead=True)
    assert first is not None
    if comes:
        setup.arrive("abcd")
    else:
        setup.ahead.stop("the mode changed")
    setup.tick()
    setup.planner.fetched(first.number, [True], 1)
    setup.carry_on()
    assert setup.planner.next_order(ahead=True) is None
    assert not setup.planner.requests


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
    assert setup.last() == ("completed", {"no_room": 4})
    assert not setup.flags.taken_back


def test_it_takes_no_room_of_requests_nor_of_announcements_before_their_time_is_over() -> None:
    setup = Setup(slots=4, held="stuvwxyz")
    key = hit(setup.planner, 1, "a")
    run(setup.planner)
    setup.announce("stuv", ttl_ms=1000)
    assert setup.fetch() == ["st", "u"]
    assert setup.last() == ("completed", {"fetched": 3, "no_room": 1})
    assert setup.flags.count[key] == 1
    setup.announce("wx", ttl_ms=5000)
    assert setup.fetch() == []
    assert setup.last() == ("completed", {"no_room": 1})
    setup.now = 1000 * MS
    setup.tick()
    assert setup.outcomes("stuv")[-1] == "expired"
    setup.announce("wx", ttl_ms=5000)
    assert setup.fetch() == ["wx"]
    assert setup.last() == ("completed", {"fetched": 2})


def test_it_takes_the_room_of_blocks_that_were_used_after_those_of_another_announcement() -> None:
    setup = Setup(slots=4, held="stuvwxyz")
    setup.announce("st")
    setup.fetch()
    key = hit(setup.planner, 1, *"ab")
    run(setup.planner)
    setup.planner.finish(key)
    setup.announce("wx")
    assert setup.fetch() == ["wx"]
    assert setup.last() == ("completed", {"fetched": 2})
    assert setup.staged("st")


def test_of_what_waits_the_most_urgent_begins_and_a_bound_of_bytes_cuts_it() -> None:
    setup = Setup(slots=64, held="abcdefgh")
    setup.silent = True
    setup.announce(*["h"] * AT_WORK)
    setup.announce("a", expected_ms=500)
    setup.announce("b", expected_ms=100)
    setup.announce("c", expected_ms=900, priority=-1)
    setup.announce("defg", expected_ms=1000, most_blocks=2)
    setup.silent = False
    setup.carry_on()
    setup.fetch()
    begun = [name for name, outcome in setup.told if outcome.outcome in ("accepted", "clipped") and name != "h"]
    assert begun == ["c", "b", "a", "defg"]
    clipped = next(outcome for name, outcome in setup.told if name == "defg")
    assert (clipped.outcome, clipped.announced, clipped.started, clipped.reason) == ("clipped", 4, 2, "blocks=4 max=2")


def test_what_waits_for_its_request_is_bounded_by_the_room() -> None:
    setup = Setup(slots=4, held="abcdef")
    setup.announce("abc", ttl_ms=1000)
    setup.announce("def", ttl_ms=1000)
    setup.fetch()
    assert setup.outcomes("def") == ["clipped", "completed"]
    assert setup.ahead.blocks == 4
    setup.announce("x", ttl_ms=1000)
    assert setup.outcomes("x") == ["rejected"]
    assert setup.told[-1][1].reason.endswith("blocks=1 left=0")
    setup.now = 1000 * MS
    setup.tick()
    assert setup.ahead.blocks == 0


def test_announcing_in_vain_leaves_a_part_of_the_room() -> None:
    setup = Setup(slots=16, held="abcdefghijklmnopqrstuvwxyz")
    for name in "abcdefghijklmnop"[:ENOUGH]:
        setup.announce(name, ttl_ms=1)
        setup.fetch()
        setup.now += 2 * MS
        setup.tick()
    setup.announce("qrst")
    assert setup.told[-1][1].started == 16 // VAIN_SHARE
    setup.fetch()
    for name in "uvwxyz" * 4:
        setup.arrive("qrst")
        setup.announce(name)
        setup.fetch()
        setup.arrive(name)
    setup.announce("qrst")
    assert setup.outcomes("qrst")[-1] in ("accepted", "completed"), "it was of use since"


def test_several_kv_groups_stage_whole_prompts_alone() -> None:
    ahead = Ahead(Groups((Group(Kind.FULL, 1), Group(Kind.STATE, 1)), 1), 4)
    for number, (name, most) in enumerate((("abcde", 9), ("abc", 2), ("abc", 9), ("de", 9))):
        ahead.add(number, announced(number, name, most_blocks=most), joined(name), 0)
    assert [each.reason.rpartition(": ")[2] for _, each in ahead.outcomes] == ["blocks=5 max=4", "blocks=3 max=2"]
    wanted = ahead.next_wanted(0)
    assert wanted is not None
    assert wanted.blocks == 3
    assert ahead.next_wanted(0) is None, "a part of the last one is of no use: it waits for the look-up of the first"


def test_a_block_that_a_request_fetched_meanwhile_is_not_fetched_twice() -> None:
    setup = Setup(held="ab")
    setup.announce("ab")
    key = hit(setup.planner, 1, "a", "b")
    assert run(setup.planner) == [["a", "b"]]
    assert setup.fetch() == []
    setup.carry_on()
    assert setup.last()[0] == "completed"
    setup.planner.finish(key)


@pytest.mark.parametrize("late", [False, True])
def test_a_block_that_does_not_arrive_leaves_its_slot(late: bool) -> None:
    setup = Setup(held="ab")
    setup.announce("ab")
    order = setup.planner.next_order(ahead=True)
    assert order is not None
    if late:
        setup.planner.overdue(order.number, 1, Failure("overdue"))
        setup.carry_on()
        assert setup.last() == ("completed", {"failed": 2})
        setup.planner.fetched(order.number, [True] * 2, 2)
        assert setup.outcomes("ab") == ["accepted", "completed"]
    else:
        setup.planner.fetched(order.number, [True, False], 1, Failure("corrupt"))
        setup.carry_on()
        assert setup.last() == ("completed", {"fetched": 1, "failed": 1})
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
    assert (setup.outcomes("ab"), setup.outcomes("b")) == (["rejected"], ["accepted", "completed"])
    assert "store" in setup.told[0][1].reason
    assert setup.planner.gauges()["requests"] == 0


def test_what_the_store_lacks_is_missing_and_waits_for_nothing() -> None:
    setup = Setup(held="x")
    setup.announce("ab")
    assert setup.last() == ("missing", {"absent": 2})
    assert setup.ahead.count == 0
    assert setup.arrive("ab") is None


def test_announcements_are_bounded_and_so_are_the_prompts_at_work() -> None:
    setup = Setup(slots=2 * MAX_KNOWN, held="abcdefgh")
    setup.silent = True
    setup.announce(*["a"] * MAX_WAITING)
    assert len(setup.waiting) == AT_WORK
    setup.announce("f")
    assert setup.outcomes("f") == ["rejected"]
    assert f"max={MAX_WAITING}" in setup.told[-1][1].reason
    setup.silent = False
    setup.carry_on()
    setup.fetch()
    assert setup.ahead.count == MAX_WAITING
    for _ in range(MAX_KNOWN - MAX_WAITING + 8):
        setup.announce("a")
    assert setup.ahead.count == MAX_KNOWN
    assert setup.outcomes("a").count("expired") == 8, "the oldest is forgotten"


def test_the_digests_that_wait_are_bounded() -> None:
    ahead, size = Ahead(ONE_GROUP, 1 << 20), MAX_BYTES // 2 // len(digests("a"))
    order = announced(0, "a").model_copy(update={"hashes": size})
    hashes = b"".join(number.to_bytes(order.hash_bytes, "big") for number in range(size))
    for number in range(3):
        ahead.add(number, order, hashes, 0)
    number, told = ahead.outcomes.popleft()
    assert (number, told.outcome, f"max={MAX_BYTES}" in told.reason) == (2, "rejected", True)
    assert ahead.next_wanted(0) is not None
    ahead.add(3, order, hashes, 0)
    assert not ahead.outcomes, "what is planned does not wait"


def test_an_announcement_that_names_a_digest_twice_is_refused() -> None:
    ahead = Ahead(ONE_GROUP, 1 << 20)
    ahead.add(0, announced(0, "aba"), digests("a", "b", "a"), 0)
    [(_, told)] = ahead.outcomes
    assert (told.outcome, told.reason) == ("rejected", "it names a digest twice, as no prompt does: hashes=3")


@pytest.mark.parametrize("moment", ["asked", "looked up", "in flight"])
def test_a_reset_or_the_end_refuses_all_announcements(moment: str) -> None:
    setup = Setup(held="ab")
    setup.silent = moment == "asked"
    setup.announce("ab", "ba")
    order = setup.planner.next_order(ahead=True) if moment == "in flight" else None
    setup.planner.reset()
    setup.ahead.reset()
    setup.waiting.clear()
    setup.carry_on()
    assert [setup.outcomes(name)[-1] for name in ("ab", "ba")] == ["rejected"] * 2
    if order is not None:
        setup.planner.fetched(order.number, [True] * 2, 2)
    said = len(setup.told)
    assert setup.fetch() == []
    assert len(setup.told) == said
    assert setup.planner.gauges()["slots_free"] == 8, "void blocks are not kept"


def test_after_a_reset_prompts_begin_as_before() -> None:
    """No event says that a prompt which was at work has ended."""
    setup = Setup(slots=AT_WORK, held="".join(map(chr, range(97, 97 + AT_WORK + 1))))
    setup.silent = True
    setup.announce(*(chr(97 + number) for number in range(AT_WORK)))
    setup.ahead.reset()
    setup.planner.reset()
    setup.waiting.clear()
    setup.silent = False
    setup.announce("a")
    assert setup.fetch() == ["a"]
    assert setup.outcomes("a")[-1] == "completed"


def test_its_unused_blocks_are_no_waste_of_prefetch() -> None:
    setup = Setup(slots=2, held="abcdefgh")
    for prompt in ("ab", "cd", "ef"):
        setup.announce(prompt, ttl_ms=1)
        setup.fetch()
        setup.now += 2 * MS
        setup.tick()
    assert setup.planner.blocks.wasted == [4, 0]
    assert setup.planner.gauges()["slots_unused"] == 0
    key = hit(setup.planner, 1, "e", "f")
    setup.planner.finish(key)
    assert setup.planner.gauges()["slots_unused"] == 2, "a request asked for them now"
