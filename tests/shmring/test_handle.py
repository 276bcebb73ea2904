"""What the engine does with a flag that it holds, in one call of C: as the rules in Python say, or an error."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.shmring._atomics import Handle
from kvprefetch.shmring.errors import SegmentCorrupt
from kvprefetch.shmring.flags import Flag, FlagAllocator, FlagTable, pack
from kvprefetch.shmring.wire.records import NO_SESSION, NO_TRACE, PROTOCOL, FlagState, RecordKind

from .conftest import Control, small_layout

SOURCE = Path(__file__).resolve().parents[2] / "shmring" / "_handle.c"
HINTED, READY, CLAIMED = int(FlagState.HINTED), int(FlagState.READY), int(FlagState.CLAIMED)
HELD = (FlagState.HINTED, FlagState.READY, FlagState.CLAIMED, FlagState.EXPIRED)
BLOCKS = 6


class Held:
    """A handle of six blocks, and the daemon's view of its flag."""

    def __init__(self) -> None:
        self.control = Control(small_layout())
        self.engine = FlagAllocator(self.control.buffer, self.control.words, self.control.layout)
        self.daemon = FlagTable(self.control.buffer, self.control.words, self.control.layout)
        producer = self.control.producer()
        numbers = (int(RecordKind.HINT), PROTOCOL, 0, HINTED, BLOCKS, BLOCKS, BLOCKS, 0, 99, 5)
        digests = [bytes([number]) * 8 for number in range(BLOCKS)]
        handle = producer.hint(*numbers, "epoch", self.engine, digests, "request", 0, NO_TRACE, NO_SESSION)
        assert handle is not None
        self.handle: Handle[str] = handle
        self.daemon.lend(handle.flag, self.engine.lent(handle.flag))

    def put(self, word: int) -> None:
        assert self.daemon.exchange(self.handle.flag, self.daemon.load(self.handle.flag), word)


def looked(flag: Flag) -> Flag | None:
    """The rule: what a held flag may be; None for memory that cannot be right."""
    return flag if flag.generation == 1 and flag.state in HELD and flag.count <= BLOCKS else None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([0, 1, 2]), st.integers(0, 15), st.integers(0, BLOCKS + 3))
def test_a_look_gives_the_flag_or_says_that_it_cannot_be(generation: int, state: int, count: int) -> None:
    held, flag = Held(), Flag(generation, state, count)
    held.put(pack(*flag))
    if (expected := looked(flag)) is not None:
        found = held.handle.look()
        assert (found, type(found)) == (expected, Flag)
    else:
        with pytest.raises(SegmentCorrupt, match=f"flag cannot be so: .*state={state} count={count} blocks=6"):
            held.handle.look()


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([HINTED, READY]), st.integers(0, BLOCKS), st.booleans())
def test_a_claim_takes_the_blocks_and_reads_their_slots_or_changes_nothing(
    data: st.DataObject, state: int, count: int, moved: bool
) -> None:
    held = Held()
    slots = data.draw(st.lists(st.integers(0, held.control.layout.slot_bound - 1), min_size=BLOCKS, max_size=BLOCKS))
    held.daemon.write_slots(held.handle.flag, 0, slots)
    seen = Flag(1, state, count)
    now = Flag(1, READY if state == HINTED else HINTED, count) if moved else seen
    held.put(pack(*now))
    taken = data.draw(st.integers(0, count))
    start = data.draw(st.integers(0, taken))
    answer = held.handle.claim(state, count, taken, start, taken, 77)
    if moved:
        assert (answer, held.engine.flag(held.handle.flag), held.handle.claimed_ns) == (None, now, 0)
    else:
        assert answer == array("I", slots[start:taken])
        assert (held.engine.flag(held.handle.flag), held.handle.claimed_ns) == (Flag(1, CLAIMED, taken), 77)


def test_entries_are_read_after_the_claim() -> None:
    """SYNC claim: an entry read before it may be one that the daemon has overwritten since."""
    body = SOURCE.read_text().partition("Handle_claim(")[2].partition("\n}\n")[0]
    order = [body.index(part) for part in ("order_compare_exchange(", "!= expected", "Py_RETURN_NONE", "slots_of(")]
    assert order == sorted(order)


def test_a_slot_out_of_bounds_is_reported() -> None:
    held = Held()
    held.daemon.write_slots(held.handle.flag, 0, [held.control.layout.slot_bound] * BLOCKS)
    held.put(pack(1, READY, BLOCKS))
    with pytest.raises(SegmentCorrupt, match="slot number out of bounds"):
        held.handle.claim(READY, BLOCKS, BLOCKS, 0, BLOCKS, 7)


@pytest.mark.parametrize("entries", [(0, 257), (-1, 1), (3, 2)])
def test_entries_outside_the_table_are_refused(entries: tuple[int, int]) -> None:
    held = Held()
    held.put(pack(1, READY, BLOCKS))
    with pytest.raises(SegmentCorrupt, match="block range outside the slot table"):
        held.handle.claim(READY, BLOCKS, BLOCKS, *entries, 7)


@pytest.mark.parametrize(
    "wrong",
    [
        (CLAIMED, 2, 1, 0, 1, 7),
        (0, 2, 1, 0, 1, 7),
        (READY, 2, 3, 0, 1, 7),
        (READY, 2, -1, 0, 1, 7),
        (READY, 1 << 20, 1, 0, 1, 7),
        (READY, 2, 1, 0, 1),
        (READY, 2, 1, 0, 1, "now"),
        (READY, 2, 1, 0, 1 << 70, 7),
    ],
    ids=str,
)
def test_wrong_arguments_claim_nothing(wrong: tuple[Any, ...]) -> None:
    held = Held()
    held.put(pack(1, READY, 2))
    with pytest.raises((TypeError, ValueError, OverflowError)):
        held.handle.claim(*wrong)
    assert held.engine.flag(held.handle.flag) == Flag(1, READY, 2)


def test_a_handle_reads_only_flags_that_are_still_mapped() -> None:
    """It keeps the flags' memory mapped."""
    held = Held()
    held.put(pack(1, READY, 2))
    del held.engine
    assert held.handle.look() == Flag(1, READY, 2)
