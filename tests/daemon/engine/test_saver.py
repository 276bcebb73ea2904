"""The saver: puts as large as its caller allows, pauses while the store is full, and notices for the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from kvprefetch.daemon.engine.saver import FORGET_NS, PAUSE_NS, TRIES, Put, Save, Saver
from kvprefetch.daemon.engine.staging import MAX_SLOTS
from kvprefetch.daemon.engine.transfers import SaveResult
from kvprefetch.shmring.wire.attach import Stored
from kvprefetch.shmring.wire.codec import MAX_MESSAGE_BYTES, encode_message
from kvprefetch.shmring.wire.records import MAX_SAVED_BLOCKS, ProtocolError, Saved


class Setup:
    """A saver of eight slots. The test ends its store calls, and drives it as an epoch does.

    `put_blocks`: of one put; 0: loads go first.
    """

    def __init__(self, *, put_blocks: int = 3, slots: int = 8) -> None:
        self.now, self.saving, self.put_blocks = 1, True, put_blocks
        self.jobs: list[Put] = []
        self.notices: list[Stored] = []
        self.saves: list[Save] = []
        self.counts: Counter[str] = Counter()
        self.lost: set[int] = set()
        self.saver = Saver(range(slots), self.lost)
        self.granted: list[int] = []
        self.carry_on()
        self.granted.clear()

    def carry_on(self, ended: Sequence[Put] = ()) -> None:
        for put in ended:
            self.notices.append(put.notice)
            self.counts.update(saved=put.stored, present=put.present, lost=put.failed)
            self.saves += [put.save] if put.last else []
        self.granted += self.saver.next_grant() if self.saving else []
        if self.saver.waiting(self.now) and (job := self.saver.next_put(self.put_blocks)) is not None:
            self.jobs.append(job)

    def saved(self, record: Saved) -> None:
        self.carry_on(self.saver.saved(record, saving=self.saving))

    def save(self, count: int, save_id: int = 1) -> None:
        hashes = [bytes([save_id, slot % 256]) * 16 for slot in range(count)]
        self.saved(Saved(save_id, 0, False, list(range(count)), hashes))

    def switch(self, saving: bool) -> None:
        self.saving = saving
        self.carry_on()

    def tick(self) -> None:
        self.carry_on()

    def reset(self, generation: int) -> None:
        self.carry_on(self.saver.reset(generation))

    def give_up(self) -> None:
        """Let the store be full for all the tries of the running put."""
        for _ in range(TRIES):
            self.end(again=True)
            self.now += PAUSE_NS[1]
            self.tick()

    def end(self, *, again: bool = False, disk: bool = False) -> list[int]:
        """End the running put; return the slots it had."""
        put = self.jobs.pop()
        slots = [slot for _, slot in put.blocks]
        if again:
            result = SaveResult(0, 0, 0, put.blocks)
        else:
            media = ([], slots) if disk else (slots, [])
            result = SaveResult(len(slots), 0, 0, [], *media)
        self.carry_on(self.saver.stored(put, result, self.now, saving=self.saving))
        return slots


def test_a_long_save_that_is_not_stored_makes_notices_that_fit_a_message() -> None:
    """A message that is cut off would end the engine's connection."""
    setup = Setup(slots=MAX_SLOTS)
    setup.switch(False)
    slots = list(range(MAX_SLOTS - MAX_SAVED_BLOCKS, MAX_SLOTS))
    setup.saved(Saved(1, 0, False, slots, [bytes(33)] * len(slots)))
    [notice] = setup.notices
    assert notice.failed == slots
    assert len(encode_message(notice)) <= MAX_MESSAGE_BYTES
    assert setup.counts["lost"] == MAX_SAVED_BLOCKS


def test_slots_that_a_put_may_still_read_are_never_granted_again() -> None:
    setup = Setup()
    setup.save(8)
    setup.lost.update({1, 4})
    while setup.jobs:
        setup.end()
    assert setup.granted == [0, 2, 3, 5, 6, 7]
    assert setup.saver.gauges() == {
        "save_slots": 8,
        "save_slots_busy": 0,
        "save_slots_quarantined": 2,
        "saves_queued": 0,
    }
    setup.switch(False)
    setup.switch(True)
    assert len(setup.granted) == 6


def test_a_long_save_is_put_in_parts_and_each_part_gives_its_slots_back() -> None:
    setup = Setup()
    setup.save(8)
    assert setup.end() == [0, 1, 2]
    assert setup.granted == [0, 1, 2]
    assert setup.end(disk=True) == [3, 4, 5]
    assert setup.end() == [6, 7]
    assert setup.granted == list(range(8))
    assert [(notice.memory, notice.disk, notice.failed) for notice in setup.notices] == [
        ([0, 1, 2], [], []),
        ([], [3, 4, 5], []),
        ([6, 7], [], []),
    ]
    counts = setup.counts
    assert (counts["saved"], counts["present"], counts["lost"]) == (8, 0, 0)
    assert setup.saver.gauges() == {
        "save_slots": 8,
        "save_slots_busy": 0,
        "save_slots_quarantined": 0,
        "saves_queued": 0,
    }


def test_a_save_in_parts_has_one_line_when_its_last_part_has_ended() -> None:
    setup = Setup()
    setup.save(8)
    setup.end()
    setup.end(again=True)
    setup.now += PAUSE_NS[0]
    setup.tick()
    setup.end()
    assert setup.saves == []
    setup.end()
    setup.save(8, save_id=2)
    setup.reset(1)
    setup.end()
    assert [(save.save_id, save.stored, save.failed, save.tries) for save in setup.saves] == [
        (1, 8, 0, 4),
        (2, 3, 5, 1),
    ]
    counts = setup.counts
    assert (counts["saved"], counts["lost"]) == (8 + 3, 5)


def test_a_put_is_as_large_as_its_caller_allows_when_it_starts() -> None:
    setup = Setup(put_blocks=0)
    setup.save(7)
    assert setup.jobs == []
    for setup.put_blocks, slots in ((1, [0]), (4, [1, 2, 3, 4]), (9, [5, 6])):
        setup.carry_on()
        setup.put_blocks = 0
        assert setup.end() == slots
    assert [(save.stored, save.tries) for save in setup.saves] == [(7, 3)]


def test_a_full_store_is_asked_less_and_less_often_until_it_takes_something() -> None:
    """Also across saves: giving one up does not start the pauses over."""
    setup = Setup()
    setup.save(3)
    pauses = []
    for _ in range(TRIES):
        setup.end(again=True)
        begun = setup.now
        while not setup.jobs and setup.now < begun + 10 * PAUSE_NS[1]:
            setup.now += 10_000_000
            setup.tick()
            if setup.granted:
                break
        pauses.append(setup.now - begun)
    assert pauses[:6] == [100_000_000, 200_000_000, 400_000_000, 800_000_000, 1_600_000_000, 2_000_000_000]
    assert setup.granted == [0, 1, 2], "the slots come back in the end"
    assert setup.notices[-1].failed == [0, 1, 2]
    setup.save(3, save_id=2)
    assert setup.jobs == [], "and the next save waits as well"
    setup.now += PAUSE_NS[1]
    setup.tick()
    setup.end()
    setup.save(3, save_id=3)
    assert len(setup.jobs) == 1, "once it took something, saving is as before"


def test_what_waited_behind_a_save_that_got_nothing_in_is_given_up_with_it() -> None:
    """Else a store that is gone keeps the slots of a long queue for minutes: each job would try anew."""
    setup = Setup()
    setup.save(8)
    setup.give_up()
    assert setup.jobs == []
    assert sorted(setup.granted) == list(range(8))
    assert setup.counts["lost"] == 8
    assert [notice.failed for notice in setup.notices] == [[0, 1, 2], [3, 4, 5, 6, 7]]
    assert [(save.failed, save.tries) for save in setup.saves] == [(8, TRIES)], "one line"


def test_a_full_store_of_long_ago_costs_a_save_no_tries() -> None:
    setup = Setup()
    setup.save(3)
    setup.give_up()
    setup.save(3, save_id=2)
    setup.now += FORGET_NS
    setup.tick()
    setup.end(again=True)
    setup.now += PAUSE_NS[0]
    setup.tick()
    assert setup.end() == [0, 1, 2]
    assert (setup.counts["lost"], setup.counts["saved"]) == (3, 3)


def test_a_save_of_old_weights_is_lost() -> None:
    setup = Setup(put_blocks=2)
    setup.save(4)
    setup.reset(1)
    assert [notice.failed for notice in setup.notices] == [[2, 3]], "the part in flight ends first"
    setup.end()
    setup.notices.clear()
    setup.save(2, save_id=2)  # copied before the engine heard of the reset
    assert [(notice.save_id, notice.failed) for notice in setup.notices] == [(2, [0, 1])]
    assert [save.save_id for save in setup.saves] == [1, 2], "each has its line"
    assert (setup.counts["saved"], setup.counts["lost"]) == (2, 4)


def test_saves_of_the_new_weights_wait_for_the_put_in_flight_only() -> None:
    setup = Setup()
    setup.save(3)
    setup.reset(1)
    setup.saved(Saved(2, 1, False, [3], [b"\3" * 32]))
    assert setup.end() == [0, 1, 2]
    assert setup.end() == [3]
    assert (setup.counts["saved"], setup.counts["lost"]) == (4, 0)
    assert [notice.memory for notice in setup.notices] == [[], [3]], "older KV is announced to nobody"


def test_slots_that_come_back_while_saving_is_off_are_granted_when_it_is_on_again() -> None:
    setup = Setup()
    setup.save(2)
    setup.switch(False)
    setup.end()
    setup.saved(Saved(2, 0, False, [2], [b"\2" * 32]))
    assert setup.granted == []
    assert setup.jobs == []
    assert setup.notices[-1].failed == [2]
    assert setup.saver.gauges()["save_slots_busy"] == 3
    setup.switch(True)
    assert setup.granted == [0, 1, 2]
    setup.save(3, save_id=3)
    assert setup.end() == [0, 1, 2]


@pytest.mark.parametrize("reset", [False, True])
def test_what_found_no_space_is_not_tried_again_once_saving_is_off_or_after_a_reset(reset: bool) -> None:
    """The namespace may be another's by then, and later keys do not name old weights."""
    setup = Setup()
    setup.save(2)
    setup.reset(1) if reset else setup.switch(False)
    setup.end(again=True)
    assert setup.granted == ([0, 1] if reset else [])
    assert setup.notices[-1].failed == [0, 1]
    setup.now += 10 * PAUSE_NS[1]
    setup.tick()
    assert setup.jobs == []


@pytest.mark.parametrize("slots", [[0, 0], [0, 8], [3]])
def test_slots_that_are_not_out_are_refused_and_nothing_is_put(slots: list[int]) -> None:
    setup = Setup()
    setup.saved(Saved(1, 0, False, [3], [b"\3" * 32]))
    with pytest.raises(ProtocolError, match="slots were not granted"):
        setup.saved(Saved(2, 0, False, slots, [bytes([slot]) * 32 for slot in slots]))
    assert setup.end() == [3]
    assert setup.jobs == []
