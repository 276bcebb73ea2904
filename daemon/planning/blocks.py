"""Which block lies in which staging slot: digest index, pins, the LRU of consumed blocks, and room by tier.

Pure.  A block is pinned once per request that wants it.  Unpinned blocks stay as an LRU until their room is needed.
Blocks from disk may hold only part of the slots, so that hits in the store's memory always find room to pass them.
A block that was fetched and whose slot is given up before any request loaded it is waste.

Blocks that follow one another in a prompt and have all else in common are one run, which is found, pinned and unpinned
as a whole.  It is cut in two where a request wants only part of it, or where only part of it arrived, and joined with
its neighbour when one request alone holds both.  So the work for a prompt depends on how many runs it meets rather than
on how many blocks.
"""

from __future__ import annotations

import enum
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
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
class Run:
    """Blocks that follow one another in a prompt, each in a slot: the same requests hold them, in the same state.

    `digests`: of one length.  `detached`: no longer in the index, the slots are freed with the last pin.  `in_call`: a
    store call may still write to the slots, also after everyone gave the blocks up.  `holders`: the sum of the numbers
    of the requests that pin it, so with one pin the number of that request.  `warming`: the last warming that
    listed any of it.  `unloaded`: it was fetched, and nobody loaded it since.
    """

    digests: list[bytes]
    slots: array[int]
    lane: Lane
    first_requester: Any
    state: BlockState = BlockState.LOADING
    pins: int = 0
    holders: int = 0
    detached: bool = False
    in_call: bool = True
    warming: str = ""
    unloaded: bool = False
    waiters: list[Any] = field(default_factory=list)  # for its first block

    def __len__(self) -> int:
        return len(self.slots)


class Blocks:
    """The blocks in slots [0, slot_count), of which those from disk hold at most `disk_slots` at a time.

    A slot that is in `lost` when it comes back is never used again; others add to that set.
    Whoever holds slots holds whole runs: find() cuts a run to what is wanted, and unpin() to what is given back.
    """

    def __init__(self, slot_count: int, disk_slots: int, lost: Set[int] = frozenset()) -> None:
        self.slot_count = slot_count
        self.disk_slots = disk_slots
        self.lost = 0  # slots that are never used again
        self._lost = lost
        self.used = [0, 0]  # slots of each lane's blocks that are pinned or being written
        self.pinned = 0  # blocks that are pinned
        self.sole: dict[int, int] = {}  # request number -> blocks that it alone pins
        self.sole_changed: set[int] = set()  # requests that came to hold one alone since Victims looked last
        self.wasted = [0, 0]  # blocks of each lane that were fetched for nothing
        self._free = array("I", range(slot_count - 1, -1, -1))
        self._index: dict[bytes, int] = {}  # slot of each digest that can be found
        self._runs: list[Run | None] = [None] * slot_count  # of each slot
        self._idle: OrderedDict[Run, None] = OrderedDict()  # staged, unpinned: least recently used first

    # --- finding ----------------------------------------------------------------------------------------------------

    def at(self, slot: int) -> Run:
        run = self._runs[slot]
        assert run is not None
        return run

    def runs(self, slots: Sequence[int]) -> Iterator[Run]:
        """The runs that these slots are made of."""
        start = 0
        while start < len(slots):
            run = self.at(slots[start])
            yield run
            start += len(run.slots)

    def find(self, hashes: bytes, digest_bytes: int, start: int, stop: int) -> Run | None:
        """The run that blocks [start, stop) of a prompt begin with; None when the first is neither here nor coming."""
        at = start * digest_bytes
        slot = self._index.get(hashes[at : at + digest_bytes])
        if slot is None:
            return None
        run = self.cut(slot)
        if len(run.slots) > stop - start or not hashes.startswith(b"".join(run.digests), at):
            same = 1
            while start + same < stop and hashes.startswith(run.digests[same], at + same * digest_bytes):
                same += 1
            self._split(run, same)
        return run

    def missing(self, digests: Sequence[bytes]) -> int:
        """How many leading ones are neither here nor on their way, each counted once."""
        if len(set(digests)) == len(digests) and self._index.keys().isdisjoint(digests):
            return len(digests)
        new = set()
        for digest in digests:
            if digest in self._index or digest in new:
                break
            new.add(digest)
        return len(new)

    # --- room -------------------------------------------------------------------------------------------------------

    def budget(self, lane: Lane) -> int:
        """How many slots more blocks of this lane may take, if there are as many."""
        return self.slot_count if lane is Lane.MEMORY else self.disk_slots - self.used[lane]

    def take_slots(self, most: int, warming: str | None = None) -> array[int]:
        """Free slots, then those of the blocks whose last use lies longest ago, up to one that this staging ahead
        listed; none when all are in use.
        """
        start = max(0, len(self._free) - most)
        slots = self._free[start:]
        slots.reverse()
        del self._free[start:]
        while len(slots) < most and self._idle and (run := next(iter(self._idle))).warming != warming:
            kept = max(0, len(run) - most + len(slots))  # its first blocks: they are of use without the others
            for digest in run.digests[kept:]:
                del self._index[digest]
            for slot in run.slots[kept:]:
                self._runs[slot] = None
            self._waste(run, len(run) - kept)
            slots += run.slots[kept:]
            del run.digests[kept:], run.slots[kept:]
            if not kept:
                del self._idle[run]
        return slots

    def add(self, digests: Sequence[bytes], slots: array[int], lane: Lane, first_requester: Any) -> Run:
        """Blocks that are about to be fetched into slots that were taken for them."""
        run = Run(list(digests), slots[:], lane, first_requester)
        self._index.update(zip(digests, slots, strict=True))
        self._enter(run)
        self.used[lane] += len(run)
        return run

    def touch(self, digest: bytes, warming: str) -> bool:
        """Whether the block is staged or on its way; if so its run counts as used now, and as listed by this staging
        ahead.
        """
        if (slot := self._index.get(digest)) is None:
            return False
        run = self.at(slot)
        run.warming = warming
        if run in self._idle:
            self._idle.move_to_end(run)
        return True

    def add_warm(self, digests: Sequence[bytes], lane: Lane, warming: str) -> array[int]:
        """Slots of the leading ones of these blocks, which are not here, as far as there is room that nobody holds.

        Nothing that this staging ahead listed is replaced, nor what was used since it began.
        """
        alike = list(takewhile(lambda digest: len(digest) == len(digests[0]), digests))  # as a run's are
        slots = self.take_slots(max(0, min(len(alike), self.budget(lane))), warming)
        if slots:
            self.add(digests[: len(slots)], slots, lane, None).warming = warming
        return slots

    # --- life -------------------------------------------------------------------------------------------------------

    def pin(self, run: Run, number: int) -> None:
        """This request holds it, too."""
        if run.pins == 0:
            self._alone(number, len(run))
            self.pinned += len(run)
            if not run.in_call:
                del self._idle[run]
                self.used[run.lane] += len(run)
        elif run.pins == 1:
            self._not_alone(run.holders, len(run))
        run.pins += 1
        run.holders += number

    def unpin(self, slots: Sequence[int], number: int) -> None:
        """This request holds these slots no longer."""
        self.cut(slots[0])
        self.join(slots, 0, len(slots))
        for run in reversed(list(self.runs(slots))):  # a prompt's last blocks are the first to make room
            run.pins -= 1
            run.holders -= number
            if run.pins == 1:
                self._alone(run.holders, len(run))
            elif run.pins == 0:
                self._not_alone(number, len(run))
                self.pinned -= len(run)
                self._settle(run)

    def fetched(self, run: Run) -> None:
        """Its bytes are there."""
        run.state, run.unloaded = BlockState.STAGED, True

    def loaded(self, slots: Sequence[int], start: int, stop: int) -> None:
        """Of the slots that a request holds, the blocks in [start, stop) were copied out."""
        for at in (start, stop):
            if at < len(slots):
                self.cut(slots[at])
        for run in self.runs(slots[start:stop]):
            run.unloaded = False

    def returned(self, run: Run) -> None:
        """The store call that wrote to its slots is over."""
        run.in_call = False
        if run.pins == 0:
            self._settle(run)

    def detach(self, run: Run) -> None:
        """Not to be found any more; the slots come back with the last pin and the end of the call."""
        if run.detached:
            return
        run.detached = True
        for digest in run.digests:
            del self._index[digest]
        if run in self._idle:
            del self._idle[run]
            self._release(run)

    def waste_rest(self) -> None:
        """Nobody will load any of it any more."""
        for run in {run for run in self._runs if run is not None}:
            self._waste(run, len(run))
            run.unloaded = False

    def detach_all(self) -> None:
        for slot in list(self._index.values()):
            if (run := self._runs[slot]) is not None:
                self.detach(run)

    def cut(self, slot: int) -> Run:
        """The run that begins with this slot, from now on at the latest."""
        run = self.at(slot)
        return run if run.slots[0] == slot else self._split(run, run.slots.index(slot))

    def join(self, slots: Sequence[int], start: int, stop: int) -> None:
        """Make one run of neighbours among slots [start, stop), and the one before them, which their holder alone holds
        and which are alike else. Only staged ones: nobody waits for such a block, and no call writes to it.
        """
        if start:
            start -= len(self.at(slots[start - 1]))
        last: Run | None = None
        for run in list(self.runs(slots[start:stop])):
            if run.pins != 1 or run.state is not BlockState.STAGED:
                last = None
            elif (
                last is None
                or (run.lane, run.detached, run.warming) != (last.lane, last.detached, last.warming)
                or run.unloaded is not last.unloaded
            ):
                last = run
            else:
                last.digests += run.digests
                last.slots += run.slots
                for slot in run.slots:
                    self._runs[slot] = last

    def _split(self, run: Run, block: int) -> Run:
        """Make the blocks from `block` on a run of their own. Nobody waits for them: for a block waits who has those
        before it.
        """
        rest = replace(run, digests=run.digests[block:], slots=run.slots[block:], waiters=[])
        del run.digests[block:], run.slots[block:]
        self._enter(rest)
        if run in self._idle:
            self._idle[rest] = None
        return rest

    def _enter(self, run: Run) -> None:
        for slot in run.slots:
            self._runs[slot] = run

    def _settle(self, run: Run) -> None:
        """An unpinned run: staged ones become idle, void ones give their slots back, those in a call wait."""
        if run.in_call:
            return
        self.used[run.lane] -= len(run)
        if run.detached:
            self._release(run)
        else:
            self._idle[run] = None

    def _release(self, run: Run) -> None:
        self._waste(run, len(run))
        for slot in run.slots:
            self._runs[slot] = None
        back = [slot for slot in run.slots if slot not in self._lost] if self._lost else run.slots
        self.lost += len(run) - len(back)
        self._free.extend(back)

    def _waste(self, run: Run, blocks: int) -> None:
        """So many of its blocks are given up."""
        if run.unloaded:
            self.wasted[run.lane] += blocks

    def _alone(self, number: int, blocks: int) -> None:
        before = self.sole.get(number, 0)
        self.sole[number] = before + blocks
        if before == 0:
            self.sole_changed.add(number)

    def _not_alone(self, number: int, blocks: int) -> None:
        left = self.sole[number] - blocks
        if left:
            self.sole[number] = left
        else:
            del self.sole[number]
            self.sole_changed.discard(number)

    def gauges(self) -> dict[str, int]:
        return {
            "slots": self.slot_count,
            "slots_free": len(self._free),
            "slots_idle": self.slot_count - len(self._free) - sum(self.used) - self.lost,
            "slots_lost": self.lost,
            "blocks_pinned": self.pinned,
        }
