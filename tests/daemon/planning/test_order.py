"""The order of fetches: what has little to fetch goes first, and nobody waits for ever."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.planning.queues import OVERTAKEN
from kvprefetch.daemon.planning.requests import Key, Request
from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.planning.support import FlagsModel, Planner, digests, ordered, planned, returned, run, whole

BLOCK_NS = 10
LONG = 8  # blocks


def paced(slots: int = 100, chunk: int = 4) -> tuple[Planner, FlagsModel]:
    """Return a planner whose blocks take BLOCK_NS in memory, and twice as long on a disk."""
    planner, flags = planned(slots, chunk)
    planner.block_ns = [BLOCK_NS, 2 * BLOCK_NS]
    return planner, flags


def arrive(
    planner: Planner, number: int, blocks: int, at_ns: int, *, priority: int = 0, disk: bytes = b"", local: int = 0
) -> Key:
    """A request comes whose blocks are all in the store, none of them another request's."""
    key = (number, 1)
    names = [f"{number}-{block}" for block in range(blocks)]
    planner.hinted(key, digests(*names), local=local, priority=priority, at_ns=at_ns)
    planner.looked_up(key, blocks, disk)
    return key


def chosen(planner: Planner, request: Request) -> None:
    """The store has all that the request's prompt asks for."""
    while names := request.prompt.next(100):
        request.prompt.found(b"\1" * len(names), bytes(len(names)))
    planner.choose(request)


def served(planner: Planner, *lanes: Lane) -> list[int]:
    """Carry out all orders; return the numbers of the requests in the order of their last blocks."""
    last: dict[int, int] = {}
    for at, names in enumerate(run(planner, lanes=lanes or tuple(Lane))):
        last.update(dict.fromkeys((int(name.partition("-")[0]) for name in names), at))
    return sorted(last, key=lambda number: last[number])


@pytest.mark.parametrize(("late_ns", "order"), [(-1, [2, 1]), (1, [1, 2])])
def test_few_blocks_wait_for_many_that_came_long_before(late_ns: int, order: list[int]) -> None:
    planner, _ = paced()
    arrive(planner, 1, LONG, 0)
    arrive(planner, 2, 1, OVERTAKEN * (LONG - 1) * BLOCK_NS + late_ns)
    assert served(planner) == order


def test_a_burst_of_requests_that_are_about_equal_goes_by_its_order() -> None:
    """The scheduler admits them in this order: by length alone, the last ones would take the room of the first."""
    planner, _ = paced(1000)
    for number in range(1, 41):
        arrive(planner, number, LONG + number % 2, 0)
    places = served(planner)
    assert max(abs(place - number) for place, number in enumerate(places, 1)) <= OVERTAKEN / LONG + 1


@pytest.mark.parametrize("idle", [True, False])
def test_what_came_before_the_link_was_idle_delays_nobody(idle: bool) -> None:
    """A long fetch ended sooner than predicted, or not: the next one is as late as all that waits before it."""
    planner, _ = paced(1000, chunk=100)
    arrive(planner, 1, 100, 0)
    if idle:
        run(planner)
    arrive(planner, 2, 2, 1)
    arrive(planner, 3, 1, 2 + OVERTAKEN * BLOCK_NS)
    assert [number for number in served(planner) if number > 1] == ([2, 3] if idle else [3, 2])


def test_equal_requests_keep_their_order_also_when_they_come_at_once() -> None:
    planner, _ = paced()
    for number, at_ns in enumerate((5, 5, 6, 7), 1):
        arrive(planner, number, LONG, at_ns)
    assert served(planner) == [1, 2, 3, 4]


def test_until_the_pace_is_known_requests_go_by_their_arrival() -> None:
    planner, _ = planned(100, 4)
    arrive(planner, 1, LONG, 0)
    arrive(planner, 2, 1, 1)
    assert served(planner) == [1, 2]


def test_only_what_has_to_be_fetched_counts() -> None:
    """Local and staged blocks, and those on their way for another request, take none of the link's time."""
    planner, _ = paced(chunk=LONG)
    arrive(planner, 1, LONG, 0)
    order = ordered(planner)
    arrive(planner, 2, LONG, 1)
    arrive(planner, 3, 2 * LONG, 2, local=2 * LONG - 1)
    key = (4, 1)
    planner.hinted(key, digests(*(f"1-{block}" for block in range(LONG)), "4-0"), at_ns=2)
    planner.looked_up(key, LONG + 1)
    returned(planner, order)
    assert served(planner) == [3, 4, 2]


def test_a_priority_and_the_schedulers_question_come_before_the_order() -> None:
    planner, _ = paced()
    arrive(planner, 1, LONG, 0)
    arrive(planner, 2, 1, 0)
    arrive(planner, 3, LONG, 0, priority=-1)
    planner.ask(arrive(planner, 4, 2 * LONG, 0, priority=1))
    assert served(planner) == [4, 3, 2, 1]


def test_blocks_on_a_disk_count_by_the_pace_of_the_disk() -> None:
    planner, _ = paced(chunk=1)
    arrive(planner, 1, 3, 0)
    arrive(planner, 2, 2, 0, disk=b"\0\1")
    arrive(planner, 3, 2, 0)
    assert served(planner, Lane.MEMORY) == [3, 1, 2], "the second takes 30 ns, too, and came later"
    planner, _ = paced(chunk=1)
    for number, blocks in ((1, 3), (2, 2), (3, 1)):
        arrive(planner, number, blocks, 0, disk=b"\1" * blocks)
    assert served(planner, Lane.DISK) == [3, 2, 1]


def test_a_whole_request_is_put_in_order_once_its_blocks_are_chosen() -> None:
    planner, _ = paced()
    for number, blocks in ((1, LONG), (2, 2)):
        names = [f"{number}-{block}" for block in range(blocks)]
        chosen(planner, planner.hint((number, 1), whole(names), 0))
    assert served(planner) == [2, 1]


def test_a_whole_request_with_another_choice_of_blocks_keeps_its_place() -> None:
    planner, _ = paced(chunk=LONG + 1)
    first = planner.hint((1, 1), whole([f"1-{block}" for block in range(LONG)]), 0)
    chosen(planner, first)
    order = ordered(planner)
    planner.fetched(order.number, [True] * LONG + [False], 1)
    arrive(planner, 2, LONG + 2, 1)
    chosen(planner, first)
    assert served(planner) == [1, 2]


def test_a_renewal_leaves_a_request_in_its_place() -> None:
    planner, _ = paced()
    first = arrive(planner, 1, LONG, 0)
    arrive(planner, 2, LONG, 1)
    planner.block_ns = [3 * BLOCK_NS, 0.0]
    planner.looked_up(first, LONG)
    assert served(planner) == [1, 2]


def test_a_long_fetch_ends_although_short_ones_fill_the_link() -> None:
    """For ever a block comes each time that one was sent: the long request waits OVERTAKEN of its lengths, no more."""
    planner, _ = paced(chunk=1)
    now, number = 0, 1
    long = arrive(planner, 1, LONG, 0)
    while not planner.requests[long].final:
        number += 1
        key = arrive(planner, number, 1, now)
        order = ordered(planner)
        now += BLOCK_NS * len(order.slots)
        returned(planner, order, now_ns=now)
        if planner.requests[key].final:
            planner.finish(key, range(1))
        assert now <= 100 * LONG * BLOCK_NS, "it starves"
    assert now <= (OVERTAKEN + 1) * LONG * BLOCK_NS
    assert now >= (OVERTAKEN - 2) * LONG * BLOCK_NS, "and the short ones do not wait for it"
