"""Blocks that requests use without a question to the store: asked for twice a lease; absent ones are said once sure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvprefetch.daemon.engine.leases import MOST_NAMES, Leases
from kvprefetch.daemon.engine.sessions import Sessions
from kvprefetch.daemon.engine.transfers import Found, SaveResult
from kvprefetch.daemon.work.calls import CallKind
from kvprefetch.kv.groups import Group, Groups
from kvprefetch.kv.groups import Kind as Rule
from kvprefetch.shmring.wire.attach import Absent
from kvprefetch.shmring.wire.records import RecordKind, Saved, encode_saved, encode_used
from tests.support.engine_side import BLOCK_TOKENS, ONE_GROUP

from .epochs import SECOND_NS, Answering, Engine, Pools, block, digest, later_weights, make_epoch

HALF_NS = 5 * SECOND_NS
TWO = Groups((Group(Rule.FULL, BLOCK_TOKENS), Group(Rule.WINDOW, BLOCK_TOKENS, 2 * BLOCK_TOKENS)), BLOCK_TOKENS)


class Setup(Engine):
    """An epoch before a store that has the blocks of `stored`; `asked`: how often it was asked for each."""

    def __init__(self, groups: Groups = ONE_GROUP) -> None:
        self.now, self.pools, self.store = SECOND_NS, Pools(), Answering()
        self.stored: set[bytes] = set()
        self.asked = Counter[bytes]()
        self.told: list[Absent] = []
        super().__init__(make_epoch(self.store, self.pools, lambda: self.now, groups=groups))
        self.epoch.parts.send = self.take
        self.keys = 0

    def take(self, message: Any) -> None:
        if isinstance(message, Absent):
            self.told.append(message)

    @property
    def absent(self) -> list[bytes]:
        raw = [(bytes.fromhex(each.names), each.name_bytes) for each in self.told]
        self.told.clear()
        return [names[at : at + size] for names, size in raw for at in range(0, len(names), size)]

    def use(self, prompt: str) -> None:
        self.push(RecordKind.USED, encode_used(len(prompt), [digest(name) for name in prompt]))

    def come(self, prompt: str, local: int) -> None:
        """A hinted request comes, and goes again once it was looked up."""
        self.keys += 1
        key = self.keys % 8, self.keys
        self.hint([digest(name) for name in prompt], key=key, local=local)
        self.answer()
        self.fetch()
        self.cancel(key)

    def look_up(self) -> Any:
        """Return the names of the look-up that is out, which waits for its answer."""
        [call] = [call for call in self.pools.calls if call.kind is CallKind.LOOK_UP]
        run: Any = call.run
        return call, run.args[2]

    def answer(self, *, away: bool = False) -> None:
        while any(call.kind is CallKind.LOOK_UP for call in self.pools.calls):
            call, questions = self.look_up()
            self.pools.calls.remove(call)
            for names in questions:
                self.asked.update(names)
            found = [Found(bytes(name in self.stored for name in names), bytes(len(names))) for names in questions]
            call.finish(None if away else found)

    def save(self, prompt: str, generation: int = 0) -> None:
        slots = self.credits.take(len(prompt))
        names = [block(name) for name in prompt]
        self.push(RecordKind.SAVED, encode_saved(Saved(1, generation, False, slots, names)))


def setup_with(prompt: str) -> Setup:
    setup = Setup()
    setup.stored.update(map(block, prompt))
    return setup


@pytest.mark.parametrize("staged", [False, True])
def test_a_prefix_that_a_thousand_requests_use_is_asked_for_twice_a_lease(staged: bool) -> None:
    """Whether the engine's own cache or staging has it, and whether or not a hint names it."""
    setup = setup_with("abcd")
    for number in range(1000):
        if staged or number % 2:
            setup.come("abcd", local=0 if staged else 3)
        else:
            setup.use("abc")
        setup.answer()
        setup.now += 20_000_000
    asked = {setup.asked[block(name)] for name in "abc"}
    assert asked <= {4, 5}, "in two leases"
    setup.leave()


def test_what_no_request_uses_is_not_asked_for() -> None:
    setup = setup_with("abc")
    setup.use("ab")
    setup.answer()
    for _ in range(100):
        setup.now += SECOND_NS
        setup.epoch.tick(setup.now)
        setup.answer()
    assert setup.asked == Counter({block("a"): 1, block("b"): 1})
    setup.leave()


def test_of_several_groups_the_blocks_that_the_prefix_needs_are_asked_for() -> None:
    setup = Setup(TWO)
    setup.use("abcd")
    setup.answer()
    assert set(setup.asked) == {digest(name) + b"\0" for name in "abcd"} | {digest(name) + b"\1" for name in "cd"}
    assert set(setup.absent) == set(setup.asked)
    setup.leave()


def test_an_absent_block_is_said_with_what_the_daemon_knew() -> None:
    setup = setup_with("ac")
    setup.use("abc")
    setup.answer()
    [told] = setup.told
    assert (told.epoch, told.reset_generation, told.saved_records) == (7, 0, 0)
    assert setup.absent == [block("b")]
    setup.use("abc")
    setup.answer()
    assert setup.absent == [], "half a lease later, if it is used again"
    setup.now += HALF_NS
    setup.use("abc")
    setup.answer()
    assert setup.absent == [block("b")]
    setup.leave()


def test_a_store_that_cannot_say_loses_nothing_and_is_asked_at_the_next_use() -> None:
    setup = Setup()
    setup.use("abc")
    setup.answer(away=True)
    assert setup.absent == []
    setup.store.answering = False
    setup.use("xyz")
    assert setup.pools.calls == []
    setup.store.answering = True
    setup.use("abc")
    setup.answer()
    assert setup.absent == [block(name) for name in "abc"]
    setup.leave()


@pytest.mark.parametrize("when", ["queued", "running", "ended"])
def test_a_block_that_is_being_put_is_not_absent(when: str) -> None:
    """Also where its put ends between question and answer."""
    setup = Setup()
    setup.use("ab")
    setup.save("a")
    if when != "queued":
        assert setup.epoch.start_save()
    if when == "ended":
        [call] = [call for call in setup.pools.calls if call.kind is CallKind.SAVE]
        setup.pools.calls.remove(call)
        call.finish(SaveResult(1, 0, 0, []))
    setup.answer()
    [told] = setup.told
    assert told.saved_records == 1
    assert setup.absent == [block("b")]
    setup.leave()


def test_an_answer_about_older_weights_is_dropped() -> None:
    setup = Setup()
    setup.use("ab")
    setup.epoch.reset(later_weights())
    setup.answer()
    assert setup.absent == []
    setup.use("ab")
    setup.answer()
    assert [each.reset_generation for each in setup.told] == [1]
    setup.leave()


def test_a_store_that_finds_no_room_for_a_put_is_not_asked_to_keep_more_until_leases_end() -> None:
    setup = setup_with("abc")
    setup.save("z")
    assert setup.epoch.start_save()
    setup.pools.end(SaveResult(0, 0, 0, [(block("z"), 8)]))
    setup.use("abc")
    setup.come("abcd", local=3)
    assert not setup.asked.keys() & set(map(block, "abc"))
    setup.now += 2 * HALF_NS
    setup.use("abc")
    setup.answer()
    assert setup.asked[block("a")] == 1
    setup.leave()


def test_in_another_mode_nothing_is_asked_for() -> None:
    setup = Setup()
    setup.epoch.switch("shadow")
    setup.use("abc")
    setup.answer()
    assert (setup.absent, setup.asked) == ([], Counter())
    setup.leave()


@pytest.mark.parametrize(
    "payload",
    [
        encode_used(3, [digest("a")]),
        encode_used(1, [digest("a")])[:-1],
        encode_used(1, [b""]),
        encode_used(1 << 30, [digest("a")]),
        encode_used(1, [bytes(65)]),
        b"",
    ],
)
def test_a_used_record_out_of_bounds_is_counted_and_skipped(payload: bytes) -> None:
    setup = Setup()
    setup.push(RecordKind.USED, payload)
    assert setup.epoch.counters["bad_records"] == 1
    setup.leave()


def test_digests_too_short_for_a_key_are_left_alone() -> None:
    setup = Setup()
    setup.push(RecordKind.USED, encode_used(1, [b"abc"]))
    assert (setup.pools.calls, setup.epoch.counters["bad_records"]) == ([], 0)
    setup.leave()


def test_what_waits_to_be_asked_for_is_bounded_and_asked_in_parts() -> None:
    leases = Leases(10 * SECOND_NS, {}, Sessions(ONE_GROUP))
    names = b"".join(number.to_bytes(32, "little") + b"\0" for number in range(1, MOST_NAMES + 10))
    leases.use(names, 33, SECOND_NS)
    asked = 0
    while (part := leases.next(1000, SECOND_NS, keep=False)) is not None:
        asked += len(part.names)
        assert leases.answered(part, b"\1" * len(part.names)) == ()
    assert asked == MOST_NAMES
    leases.use(names, 33, SECOND_NS)
    part = leases.next(1000, SECOND_NS, keep=False)
    assert part is not None
    assert len(part.names) == 9, "they find room at the next use"


def test_of_a_chain_that_no_engine_holds_nothing_is_asked_for_behind_its_first_absent_block() -> None:
    leases = Leases(10 * SECOND_NS, {}, Sessions(ONE_GROUP))
    leases.use(b"".join(map(block, "abcdef")), 33, SECOND_NS, held=False)
    part = leases.next(2, SECOND_NS, keep=False)
    assert part is not None
    assert leases.answered(part, b"\1\0") == ()
    assert leases.next(2, SECOND_NS, keep=False) is None


def test_blocks_of_one_row_of_the_table_do_not_drive_each_other_out() -> None:
    leases = Leases(10 * SECOND_NS, {}, Sessions(ONE_GROUP))
    alike = [bytes(2) + bytes([number]) * 30 + b"\0" for number in range(1, 5)]
    for now in range(1, 5):
        for name in alike:
            leases.use(name, 33, now * SECOND_NS)
    assert [part.names for part in iter(lambda: leases.next(10, 0, keep=False), None)] == [[name] for name in alike]


def test_a_prefix_is_due_with_its_first_block_that_is() -> None:
    """Others that share its begin had that asked for before: the prefix does not wait for its own last block."""
    setup = setup_with("abcd")
    setup.use("abcd")
    setup.answer()
    setup.now += HALF_NS - SECOND_NS
    setup.use("abcx")
    setup.answer()
    assert setup.asked == Counter(map(block, "abcdx"))
    setup.now += SECOND_NS
    setup.use("abcx")
    setup.answer()
    assert {name: setup.asked[block(name)] for name in "abcx"} == {"a": 2, "b": 2, "c": 2, "x": 1}
    setup.leave()
