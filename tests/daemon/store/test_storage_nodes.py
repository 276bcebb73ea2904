"""Which storage node hangs, as late gets and delivering gets show, and which values are then not asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import structlog

from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.store.replicas import Place
from kvprefetch.daemon.store.storage_nodes import FORGET_S, Get, StorageNodes

OK, MISS, REFUSED = ErrorClass.OK, ErrorClass.MISS, ErrorClass.TRANSFER


class Reading:
    """Keys are nodes' names and a number, such as a1; `ab1` has a replica on each, `.1` is on a disk.

    The nodes that `dead` names fail.
    """

    def __init__(self, dead: str = "") -> None:
        self.now, self.dead = 100.0, dead
        self.nodes = StorageNodes(structlog.get_logger(), lambda: self.now)
        self.calls: list[list[str]] = []

    def read(
        self, *keys: str, get: Get | None = None, during: Callable[[], None] = lambda: None, result: ErrorClass = OK
    ) -> list[ErrorClass]:
        """Read the keys; `during` each call the test may do something else."""

        def call(part: Sequence[int]) -> list[ErrorClass]:
            self.calls.append([keys[i] for i in part])
            during()
            return [REFUSED if set(keys[i][:-1]) & set(self.dead) else result for i in part]

        where = {key: frozenset(Place(node, 1, 1) for node in key[:-1] if node != ".") for key in keys if key != "?0"}
        return self.nodes.read(keys, where, get or Get(), call)

    def behind(self, *hung: str, then: Callable[[], None]) -> None:
        """Run `then` while a get of these keys is late."""
        get = Get()

        def during() -> None:
            get.late = True
            then()

        self.read(*hung, get=get, during=during)


def test_nothing_is_refused_or_read_apart_while_no_get_is_late() -> None:
    reading = Reading()
    during = lambda: calls.append(reading.read("a1", "b1", "?0"))  # noqa: E731
    calls: list[list[ErrorClass]] = []
    assert reading.read("a2", "b2", ".2", during=during) == [OK] * 3
    assert calls == [[OK] * 3]
    assert reading.calls == [["a2", "b2", ".2"], ["a1", "b1", "?0"]]


def test_the_one_node_of_a_late_get_is_left_alone_until_it_returns() -> None:
    reading = Reading()

    def then() -> None:
        found = reading.read("b1", "a3", "ab1", ".1")
        assert found == [OK, REFUSED, REFUSED, OK], "which of its replicas a get reads nobody knows before"
        assert reading.read("a4") == [REFUSED]
        assert reading.nodes.aside() == {"a"}, "look-ups know it, too"

    reading.behind("a1", "a2", then=then)
    assert reading.calls[1:] == [["b1", ".1"]]
    assert reading.nodes.aside() == frozenset()
    assert reading.read("a3") == [OK]


def test_of_several_nodes_of_a_late_get_those_that_deliver_are_found() -> None:
    reading = Reading()

    def then() -> None:
        assert reading.read("a1", "b1", "c1") == [OK, REFUSED, OK], "after a delivered it is b"
        assert reading.read("a2", "b2", "c2") == [OK, REFUSED, OK]

    reading.behind("a0", "b0", then=then)
    assert reading.calls == [["a0", "b0"], ["c1"], ["a1"], ["a2", "c2"]]


def test_the_second_get_that_hangs_at_one_doubtful_node_says_that_it_is_that_one() -> None:
    reading = Reading()

    def second() -> None:
        reading.behind("b1", then=lambda: assert_equal(reading.read("a2", "b2"), [OK, REFUSED]))

    reading.behind("a0", "b0", then=second)
    assert reading.calls == [["a0", "b0"], ["b1"], ["a2"]]


def test_a_get_that_is_given_up_between_two_nodes_does_not_go_on_to_the_next() -> None:
    reading, get = Reading(), Get()

    def then() -> None:
        results = reading.read("a1", "b1", get=get, during=lambda: setattr(get, "late", True), result=MISS)
        assert results == [MISS, REFUSED]

    reading.behind("a0", "b0", then=then)


def test_a_node_that_delivered_to_another_get_meanwhile_is_not_the_one_that_hangs() -> None:
    reading, late = Reading(), Get()

    def during() -> None:
        reading.read("a1")
        reading.read("c1", result=MISS)
        late.late = True
        assert late.nodes == "b c"
        assert reading.read("a2", "d2") == [OK] * 2

    reading.read("a0", "b0", "c0", get=late, during=during)
    assert reading.calls[-1] == ["a2", "d2"], "not read apart"


@pytest.mark.parametrize("also", [[], ["a0"]])
def test_a_disk_that_hangs_is_nobody_s_memory(also: list[str]) -> None:
    """Mooncake does not name the disk's node. Where memory was read with it, either may hang."""
    reading = Reading()
    reading.behind(".0", *also, then=lambda: assert_equal(reading.read("a1", ".1", "b1"), [OK] * 3))


def test_a_call_that_raises_waits_for_nobody_any_more() -> None:
    reading, get = Reading(), Get()

    def during() -> None:
        get.late = True
        raise RuntimeError

    with pytest.raises(RuntimeError):
        reading.read("a1", get=get, during=during)
    assert reading.read("a1") == [OK]


def assert_equal(found: object, expected: object) -> None:
    assert found == expected


def test_a_node_that_failed_is_asked_again_by_one_call_at_a_time_after_longer_and_longer_pauses() -> None:
    reading = Reading(dead="a")
    assert reading.read("a1", "b1") == [REFUSED, OK]
    tried = []
    for _ in range(100):
        reading.now += 0.5
        before = len(reading.calls)
        assert reading.read("a1", "a2", "b1", "b2") == [REFUSED, REFUSED, OK, OK]
        assert reading.calls[before] == ["b1", "b2"], "those of others first, and together"
        if reading.calls[before + 1 :]:
            assert reading.calls[before + 1 :] == [["a1"]], "one value of it"
            tried.append(reading.now - 100)
            assert reading.nodes.aside() == {"a"}
    assert tried == [1.0, 3.0, 7.0, 15.0, 25.0, 35.0, 45.0]
    reading.dead = ""
    reading.now += 10
    assert reading.nodes.aside() == frozenset()
    assert reading.read("a1", "a2", "a3") == [OK] * 3
    assert reading.calls[-2:] == [["a1"], ["a2", "a3"]]
    assert reading.read("a1", "a2", "a3") == [OK] * 3
    assert reading.calls[-1] == ["a1", "a2", "a3"]


def test_while_one_call_tries_a_node_no_other_does() -> None:
    reading = Reading(dead="a")
    reading.read("a1")
    reading.now += 1
    assert reading.read("a1", during=lambda: assert_equal(reading.read("a2", "b1"), [REFUSED, OK])) == [REFUSED]
    assert reading.calls == [["a1"], ["a1"], ["b1"]]


def test_a_try_that_tells_nothing_or_raises_leaves_the_node_to_the_next_call() -> None:
    reading = Reading(dead="a")
    reading.read("a1")
    reading.now += 1
    reading.dead = ""
    assert reading.read("a1", result=MISS) == [MISS]

    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        reading.read("a1", during=fail)
    assert reading.read("a1") == [OK]
    assert reading.nodes.aside() == frozenset()


def test_of_a_value_that_several_nodes_hold_none_is_blamed() -> None:
    reading = Reading(dead="a")
    assert reading.read("ab1") == [REFUSED]
    assert reading.read("b1") == [OK]
    assert reading.read("a1", "ab1") == [REFUSED, REFUSED]
    assert reading.nodes.aside() == {"a"}
    reading.now += 1
    assert reading.read("ab1", "ab2") == [REFUSED, REFUSED]
    assert reading.calls[-1] == ["ab1"], "it counts as a try"
    assert reading.nodes.aside() == {"a"}


def test_a_node_that_failed_for_some_values_and_delivered_others_is_not_put_aside() -> None:
    reading = Reading()
    where = {f"a{number}": frozenset({Place("a", number, 1)}) for number in range(2)}
    reading.nodes.read(list(where), where, Get(), lambda part: [REFUSED, OK])
    assert reading.nodes.aside() == frozenset()


def test_a_node_that_nobody_asks_for_any_more_is_forgotten() -> None:
    reading = Reading(dead="a")
    reading.read("a1")
    reading.now += FORGET_S + 10
    reading.dead = ""
    assert reading.read("a1", "a2", "b1") == [OK] * 3
    assert reading.calls[-1] == ["a1", "a2", "b1"], "no longer tried with one value first"


def test_each_node_that_is_put_aside_and_comes_back_has_one_line_for_each() -> None:
    reading = Reading(dead="a")
    with structlog.testing.capture_logs() as lines:
        for pause in (1, 2, 4):
            reading.read("a1", "a2")
            reading.now += pause
        reading.dead = ""
        reading.read("a1", "a2")
    assert [(line["event"], line["owners"]) for line in lines] == [("owner.aside", "a"), ("owner.back", "a")]
    assert lines[1]["waited_s"] == 7.0
