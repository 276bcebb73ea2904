"""Second slots of staged blocks, in device memory: which block has a copy there, and which copy makes room. Pure.

While requests pin a block, a slot table may name either of its slots at any moment.  No table names the second slot of
an unpinned block, so another block may have it.  A block that leaves its first slot leaves its copy, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .requests import Request
from .runs import Run

MAX_TRIES = 16  # copies looked at for one slot


@dataclass(slots=True, eq=False)
class SecondSlot:
    """A block's second slot; it may be read once the copy is `there`. `wanted`: (request, block) that wait for it."""

    slot: int
    there: bool = False
    wanted: list[tuple[Request, int]] = field(default_factory=list)


class Copies:
    """The device slots, for the blocks of `runs`: the run of each host slot."""

    def __init__(self, slots: Sequence[int], runs: Sequence[Run | None]) -> None:
        self.slots, self._runs = slots, runs
        self.free = list(reversed(slots))
        self._copies: OrderedDict[int, SecondSlot] = OrderedDict()  # by host slot: least recently used first

    def named(self, slots: Sequence[int]) -> Sequence[int]:
        """Return what a slot table is to name for the blocks in these host slots: their copies, or the slots."""
        if not self._copies:
            return slots
        names = list(slots)
        for at, slot in enumerate(slots):
            if (copy := self._copies.get(slot)) is not None and copy.there:
                names[at] = copy.slot
                self._copies.move_to_end(slot)
        return names

    def of(self, slot: int) -> SecondSlot | None:
        """Return the copy of the block in this host slot, which may be under way."""
        return self._copies.get(slot)

    def begin(self, slot: int) -> SecondSlot | None:
        """Give the block in this host slot a device slot; None without room: requests pin the blocks that it tries."""
        for _ in range(0 if self.free else min(MAX_TRIES, len(self._copies))):
            first, copy = next(iter(self._copies.items()))
            run = self._runs[first]
            assert run is not None
            if copy.there and run.pins == 0:
                self.leave([first])
                break
            self._copies.move_to_end(first)
        if not self.free:
            return None
        self._copies[slot] = copy = SecondSlot(self.free.pop())
        return copy

    def end(self, slot: int, copy: SecondSlot, *, ok: bool) -> bool:
        """Note the end of a copy from this host slot; False where it failed, or its block left the slot meanwhile."""
        if self._copies.get(slot) is copy:
            copy.there = True
            if ok:
                return True
            self.leave([slot])
        else:
            self.free.append(copy.slot)
        return False

    def leave(self, slots: Iterable[int]) -> None:
        """No block is in these host slots any more. A copy under way keeps its device slot until it ends."""
        for slot in slots if self._copies else ():
            if (copy := self._copies.pop(slot, None)) is not None and copy.there:
                self.free.append(copy.slot)

    def close(self) -> None:
        """Name no copy any more. Tables that do go on, as long as no other copy begins."""
        self.leave(list(self._copies))
