"""Which block lies in which staging slot: digest index, pins, the LRU of consumed blocks, and room by tier.

Pure.  A block is pinned once per request that wants it.  Unpinned blocks stay as an LRU until their room is needed.
Blocks from disk may hold only part of the slots, so that hits in the store's memory always find room to pass them.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Lane(enum.IntEnum):
    """Fetches from the store's memory and from its disks go out apart: the slow never hold up the fast."""

    MEMORY = 0
    DISK = 1


class BlockState(enum.Enum):
    LOADING = "loading"
    STAGED = "staged"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Block:
    """One block in one slot.

    `detached`: no longer in the index, the slot is freed with the last pin.  `in_call`: a store call may still write to
    the slot, also after everyone gave the block up.  `holders`: the sum of the numbers of the requests that pin it, so
    with one pin the number of that request.  `run`: the last staging ahead that listed it.
    """

    digest: bytes
    slot: int
    lane: Lane
    owner: Any
    state: BlockState = BlockState.LOADING
    pins: int = 0
    holders: int = 0
    detached: bool = False
    in_call: bool = True
    run: str = ""
    waiters: list[Any] = field(default_factory=list)


class Blocks:
    """The blocks in slots [0, slot_count), of which those from disk hold at most `disk_slots` at a time."""

    def __init__(self, slot_count: int, disk_slots: int) -> None:
        self.slot_count = slot_count
        self.disk_slots = disk_slots
        self.disk_used = 0  # slots of blocks from disk that are pinned or being written
        self.sole: dict[int, int] = {}  # request number -> blocks that it alone pins
        self.exposed: set[int] = set()  # requests that came to hold one alone since the owner looked last
        self._free = list(range(slot_count - 1, -1, -1))
        self._index: dict[bytes, Block] = {}
        self._slots: list[Block | None] = [None] * slot_count
        self._idle: OrderedDict[bytes, Block] = OrderedDict()  # staged, unpinned: least recently used first
        self.get = self._index.get  # block of a digest, or None

    def at(self, slot: int) -> Block:
        block = self._slots[slot]
        assert block is not None
        return block

    def run_of_staged(self, slots: Sequence[int]) -> int:
        """How many leading slots hold staged blocks."""
        staged = BlockState.STAGED
        for count, block in enumerate(map(self._slots.__getitem__, slots)):
            if block is None or block.state is not staged:
                return count
        return len(slots)

    def budget_left(self, lane: Lane) -> bool:
        """Whether blocks of this lane may take one more slot, if there is one."""
        return lane is Lane.MEMORY or self.disk_used < self.disk_slots

    def take_slot(self) -> int | None:
        """A free slot, or that of the block whose last use lies longest ago; None when all are in use."""
        if self._free:
            return self._free.pop()
        if self._idle:
            digest, block = self._idle.popitem(last=False)
            del self._index[digest]
            return block.slot
        return None

    def touch(self, digest: bytes, run: str) -> bool:
        """Whether the block is staged or on its way; if so it counts as used now, and as one of this run's."""
        if (block := self._index.get(digest)) is None:
            return False
        block.run = run
        if digest in self._idle:
            self._idle.move_to_end(digest)
        return True

    def add(self, digest: bytes, slot: int, lane: Lane, owner: Any) -> Block:
        """A block that is about to be fetched into `slot`."""
        block = self._index[digest] = self._slots[slot] = Block(digest, slot, lane, owner)
        self.disk_used += lane
        return block

    def add_ahead(self, digests: Sequence[bytes], lane: Lane, run: str) -> list[Block]:
        """The leading ones of these blocks, which are not here, as far as there is room that nobody holds.

        None of this run is replaced, nor what was used since it began.
        """
        added: list[Block] = []
        for digest in digests:
            own = not self._free and bool(self._idle) and next(iter(self._idle.values())).run == run
            if own or not self.budget_left(lane) or (slot := self.take_slot()) is None:
                break
            added.append(self.add(digest, slot, lane, None))
            added[-1].run = run
        return added

    def pin_run(self, digests: Sequence[bytes], number: int) -> list[int]:
        """Pin the leading blocks that are staged or on their way; their slots."""
        alone = 0
        slots = []
        for block in map(self.get, digests):
            if block is None:
                break
            pins = block.pins
            if pins == 0:
                alone += 1
                if not block.in_call:
                    self._idle.pop(block.digest, None)
                    self.disk_used += block.lane
            elif pins == 1:
                self._not_alone(block.holders)
            block.pins = pins + 1
            block.holders += number
            slots.append(block.slot)
        self._alone(number, alone)
        return slots

    def unpin_run(self, slots: Sequence[int], number: int) -> None:
        """Undo pins of this request."""
        alone = 0
        for block in map(self._slots.__getitem__, slots):
            assert block is not None
            pins = block.pins = block.pins - 1
            block.holders -= number
            if pins == 1:
                self._alone(block.holders, 1)
            elif pins == 0:
                alone += 1
                self._settle(block)
        if alone:
            self._not_alone(number, alone)

    def returned(self, block: Block) -> None:
        """The store call that wrote to its slot is over."""
        block.in_call = False
        if block.pins == 0:
            self._settle(block)

    def detach(self, block: Block) -> None:
        """Not to be found any more; the slot comes back with the last pin and the end of the call."""
        if block.detached:
            return
        block.detached = True
        del self._index[block.digest]
        if self._idle.pop(block.digest, None) is not None:
            self._free.append(block.slot)

    def detach_all(self) -> None:
        for block in list(self._index.values()):
            self.detach(block)

    def _alone(self, number: int, blocks: int) -> None:
        if blocks:
            before = self.sole.get(number, 0)
            self.sole[number] = before + blocks
            if before == 0:
                self.exposed.add(number)

    def _not_alone(self, number: int, blocks: int = 1) -> None:
        left = self.sole[number] - blocks
        if left:
            self.sole[number] = left
        else:
            del self.sole[number]
            self.exposed.discard(number)

    def _settle(self, block: Block) -> None:
        """An unpinned block: staged ones become idle, void ones give their slot back, those in a call wait."""
        if block.in_call:
            return
        self.disk_used -= block.lane
        if block.detached:
            self._free.append(block.slot)
        else:
            self._idle[block.digest] = block

    def gauges(self) -> dict[str, int]:
        return {
            "slots": self.slot_count,
            "slots_free": len(self._free),
            "slots_idle": len(self._idle),
            "blocks_pinned": sum(1 for block in self._index.values() if block.pins),
        }
