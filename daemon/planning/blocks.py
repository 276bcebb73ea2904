"""The table of staging slots: where each block is, which requests pin it, and which block makes room first.

Each request pins the blocks that it wants.  Unpinned blocks stay until another block needs their room; the least
recently used goes first.  A fetched block is waste if its slot is given up before any request loads it.

Blocks that follow one another in a prompt and have all else in common form one run.  The table finds, pins and unpins
whole runs, so a prompt costs as much work as it meets runs, not blocks.  It cuts a run where a request wants or gets
only part of it, and joins neighbours that one request alone holds.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from .copies import Copies
from .requests import Failure, Request
from .runs import BlockState, Lane, Run

MAX_TRIES = 1024  # idle runs looked at for one that makes room
MAX_RUN = 512  # blocks: where an engine hints them in a wrong order, each cuts a run


class BlockTable:
    """The blocks in slots [0, slot_count).

    A slot that is in `quarantined` when it comes back is never used again; the caller adds to that set.
    `copies`: the second slots of blocks.
    """

    def __init__(self, slot_count: int, quarantined: Set[int], device_slots: Sequence[int] = ()) -> None:
        self.slot_count = slot_count
        self.quarantined = 0  # slots that are never used again
        self._quarantined_now = quarantined
        self.used = 0  # slots that are pinned or being written
        self.pinned = 0
        self.sole = Counter[int]()  # number of a request -> staged blocks that it alone pins, and would free
        self.wasted = [0, 0]  # blocks of each lane
        self._free = array("I", np.arange(slot_count - 1, -1, -1, dtype=np.uint32).tobytes())
        self._index: dict[bytes, int] = {}  # slot of each digest that can be found
        self._runs: list[Run | None] = [None] * slot_count  # of each slot
        self._idle: OrderedDict[Run, None] = OrderedDict()  # staged, unpinned: least recently used first
        self._unused = 0  # idle blocks that no request loaded, announced ones aside
        self._era = 0
        self.void = deque[Run]()  # unpinned, of earlier eras, for `free_void`
        self.copies = Copies(device_slots, self._runs)

    # --- finding ----------------------------------------------------------------------------------------------------

    def at(self, slot: int) -> Run:
        run = self._runs[slot]
        assert run is not None
        return run

    def runs(self, slots: Sequence[int]) -> Iterator[Run]:
        start = 0
        while start < len(slots):
            run = self._runs[slots[start]]
            assert run is not None
            yield run
            start += len(run.slots)

    def find(self, hashes: bytes | bytearray, digest_bytes: int, start: int, stop: int) -> Run | None:
        """Return the run at the start of blocks [start, stop) of a prompt, cut to them; None if the first is absent."""
        at = start * digest_bytes
        slot = self._index.get(bytes(hashes[at : at + digest_bytes]))
        if slot is None:
            return None
        run = self.cut(slot)
        if len(run.slots) > stop - start or not hashes.startswith(b"".join(run.digests), at):
            same = 1
            while start + same < stop and hashes.startswith(run.digests[same], at + same * digest_bytes):
                same += 1
            self._split(run, same)
        return run

    @property
    def holds(self) -> Callable[[bytes], bool]:
        """Return whether a block is in staging, or on its way. No Python runs for each block that is asked about."""
        return self._index.__contains__

    def missing(self, digests: Sequence[bytes]) -> int:
        """Count the leading digests that are absent."""
        return next((at for at, there in enumerate(map(self.holds, digests)) if there), len(digests))

    # --- room -------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    def take_slots(self, most: int, taker: Request) -> array[int]:
        """Take free slots, then those of the least recently used blocks.

        Blocks of an announcement that counted when this request came go last, and for a hinted request alone.
        """
        slots = self._free[: -most - 1 : -1]
        del self._free[len(self._free) - len(slots) :]
        while len(slots) < most and (run := self._oldest(taker)) is not None:
            kept = max(0, len(run.slots) - most + len(slots))  # the first blocks are of use without the others
            for digest in run.digests[kept:]:
                del self._index[digest]
            self._leave(run.slots[kept:])
            self._waste(run, len(run.slots) - kept)
            slots += run.slots[kept:]
            self._count_idle(run, kept - len(run.slots))
            del run.digests[kept:], run.slots[kept:]
            if not kept:
                del self._idle[run]
        return slots

    def _oldest(self, taker: Request) -> Run | None:
        """Return the least recently used idle run that is not kept for an announcement; for a hinted request any."""
        hinted, runs = taker.announced is None, islice(self._idle, MAX_TRIES)
        since_ns = taker.arrived_ns if taker.announced is None else taker.announced.since_ns
        found = next((run for run in runs if run.ahead_until_ns <= since_ns), None)
        return next(reversed(self._idle), None) if found is None and hinted else found

    def add(self, digests: Sequence[bytes], slots: array[int], lane: Lane, first_requester: Request) -> Run:
        """Enter blocks that a store call is about to write into these slots."""
        run = Run(list(digests), slots[:], lane, first_requester, era=self._era)
        if first_requester.announced is not None:
            run.ahead_until_ns = first_requester.announced.until_ns
        self._index.update(zip(digests, slots, strict=True))
        self._map(slots, run)
        self.used += len(run.slots)
        return run

    # --- life -------------------------------------------------------------------------------------------------------

    def pin(self, run: Run, number: int) -> None:
        if run.pins == 0:
            self.pinned += len(run.slots)
            if not run.in_call:
                del self._idle[run]
                self._count_idle(run, -len(run.slots))
                self.used += len(run.slots)
        self._change_pins(run, 1, number)

    def unpin(self, slots: Sequence[int], number: int) -> None:
        self.cut(slots[0])
        self.join(slots, 0, len(slots))
        for run in reversed(list(self.runs(slots))):  # a prompt's last blocks are the first to make room
            self._change_pins(run, -1, -number)
            if run.pins == 0:
                self.pinned -= len(run.slots)
                self._settle(run)

    def _change_pins(self, run: Run, change: int, number: int) -> None:
        staged = run.state is BlockState.STAGED
        if staged and run.pins == 1:
            self._count_sole(run, -len(run.slots))
        run.pins += change
        run.holders += number
        if staged and run.pins == 1:
            self._count_sole(run, len(run.slots))

    def _count_sole(self, run: Run, blocks: int) -> None:
        """Count these blocks of a staged run that one request alone pins."""
        self.sole[run.holders] += blocks
        if not self.sole[run.holders]:
            del self.sole[run.holders]

    def staged(self, run: Run) -> None:
        run.state, run.unloaded = BlockState.STAGED, True
        if run.pins == 1:
            self._count_sole(run, len(run.slots))
        if (request := run.first_requester) is not None:
            request.fetched_blocks += len(run.slots)
            request.disk_blocks += run.lane * len(run.slots)
            run.first_requester = None

    def failed(self, run: Run, failure: Failure | None) -> None:
        run.state, run.first_requester, run.failure = BlockState.FAILED, None, failure
        self.detach(run)

    def ahead(self, slots: Sequence[int], until_ns: int) -> None:
        """Note that an announced request staged these slots: what it alone pins makes room for hints, until then."""
        for run in self.runs(slots):
            if run.pins == 1:
                run.ahead_until_ns = until_ns

    def loaded(self, slots: Sequence[int], start: int, stop: int) -> None:
        """Note that a request, which holds `slots`, loaded those in [start, stop)."""
        for at in (start, stop):
            if at < len(slots):
                self.cut(slots[at])
        for run in self.runs(slots[start:stop]):
            run.unloaded = False

    def returned(self, run: Run) -> None:
        """Note the end of the store call that wrote to its slots."""
        run.in_call = False
        if run.pins == 0:
            self._settle(run)

    def detach(self, run: Run) -> None:
        """Take the run out of the index; its slots come back with the last unpin and the end of the call."""
        if run.era != self._era:
            return
        run.era = -1
        for digest in run.digests:
            del self._index[digest]
        if run in self._idle:
            del self._idle[run]
            self._count_idle(run, -len(run.slots))
            self._release(run)

    def detach_all(self) -> None:
        """Take all runs out of the index at once; `free_void` frees the slots of those that no request pins."""
        self._era += 1
        self._index.clear()
        self.void += self._idle
        self._idle.clear()
        self._unused = 0

    def free_void(self, most: int) -> int:
        """Free the slots of up to so many runs of earlier eras; return of how many."""
        count = min(max(0, most), len(self.void))
        for _ in range(count):
            self._release(self.void.popleft())
        return count

    def waste_rest(self) -> None:
        """Count every unloaded block as waste: no request will load it."""
        for run in {run for run in self._runs if run is not None}:
            self._waste(run, len(run.slots))
            run.unloaded = False
        self._unused = 0

    def cut(self, slot: int) -> Run:
        """Return the run that begins with this slot, cut there if need be."""
        run = self._runs[slot]
        assert run is not None
        return run if run.slots[0] == slot else self._split(run, run.slots.index(slot))

    def join(self, slots: Sequence[int], start: int, stop: int) -> None:
        """Join equal neighbours that one request alone holds, in slots [start, stop) and the run before them.

        Only staged runs: no request waits for such a block, and no call writes to it.
        """
        if start:
            start -= len(self.at(slots[start - 1]).slots)
        last: Run | None = None
        for run in list(self.runs(slots[start:stop])):
            if run.pins != 1 or run.state is not BlockState.STAGED:
                last = None
            elif last is None or not run.is_like(last) or len(last.slots) + len(run.slots) > MAX_RUN:
                last = run
            else:
                last.digests += run.digests
                last.slots += run.slots
                self._map(run.slots, last)

    def _split(self, run: Run, block: int) -> Run:
        """Make the blocks from `block` on a run of their own; a request that waits does so for the first block."""
        rest = replace(run, digests=run.digests[block:], slots=run.slots[block:], waiters=[])
        del run.digests[block:], run.slots[block:]
        self._map(rest.slots, rest)
        if run in self._idle:
            self._idle[rest] = None
        return rest

    def _map(self, slots: array[int], run: Run) -> None:
        for slot in slots:
            self._runs[slot] = run

    def _leave(self, slots: array[int]) -> None:
        """No block is in these slots any more."""
        for slot in slots:
            self._runs[slot] = None
        self.copies.leave(slots)

    def _settle(self, run: Run) -> None:
        """Make an unpinned run idle, or release it if the index has it no more; not while a call writes to it."""
        if run.in_call:
            return
        self.used -= len(run.slots)
        if run.era != self._era:
            self._release(run)
        else:
            self._idle[run] = None
            self._count_idle(run, len(run.slots))

    def _count_idle(self, run: Run, blocks: int) -> None:
        if run.unloaded and not run.ahead_until_ns:
            self._unused += blocks

    def _release(self, run: Run) -> None:
        self._waste(run, len(run.slots))
        self._leave(run.slots)
        back = [slot for slot in run.slots if slot not in self._quarantined_now] if self._quarantined_now else run.slots
        self.quarantined += len(run.slots) - len(back)
        self._free.extend(back)

    def _waste(self, run: Run, blocks: int) -> None:
        if run.unloaded:
            self.wasted[run.lane] += blocks

    # --- what others see --------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, int]:
        return {
            "slots": self.slot_count,
            "slots_free": len(self._free),
            "slots_idle": self.slot_count - len(self._free) - self.used - self.quarantined,
            "slots_quarantined": self.quarantined,
            "slots_unused": self._unused,
            "blocks_wasted": sum(self.wasted),
            "blocks_pinned": self.pinned,
        }

    def check(self, held: Iterable[tuple[int, Sequence[int]]], in_call: Set[int]) -> set[int]:
        """Count everything anew, slot by slot, and assert that the table agrees. Returns the unloaded slots.

        `held`: number and slots of each request.  `in_call`: slots of store calls that are not over.
        """
        holders = defaultdict[int, list[int]](list)
        for number, slots in held:
            for slot in slots:
                holders[slot].append(number)
        runs = {run for run in self._runs if run is not None}
        present = [slot for run in runs for slot in run.slots]
        gone = set(range(self.slot_count)).difference(present, self._free)
        assert sorted((*present, *self._free, *gone)) == list(range(self.slot_count)), "free, quarantined or in one run"
        assert gone <= self._quarantined_now
        for run in runs:
            assert len(run.digests) == len(run.slots) > 0
            for slot in run.slots:
                assert self._runs[slot] is run
                assert (run.pins, run.holders) == (len(holders[slot]), sum(holders[slot]))
                assert run.in_call == (slot in in_call)
        idle = {run for run in runs if run.pins == 0 and not run.in_call}
        assert {*self._idle, *self.void} == idle
        assert all(run.state is BlockState.STAGED for run in idle)
        assert all(run.era == self._era for run in self._idle)
        assert self._unused == sum(len(run.slots) for run in self._idle if run.unloaded and not run.ahead_until_ns)
        pairs = [zip(run.digests, run.slots, strict=True) for run in runs if run.era == self._era]
        assert self._index == dict(chain.from_iterable(pairs))
        assert self.used == sum(len(run.slots) for run in runs - idle)
        gauges = self.gauges()
        assert (gauges["slots_idle"], gauges["slots_quarantined"]) == (sum(len(run.slots) for run in idle), len(gone))
        staged = [run for run in runs if run.state is BlockState.STAGED]
        alone = [holders[slot][0] for run in staged for slot in run.slots if len(holders[slot]) == 1]
        assert self.sole == Counter(alone)
        assert gauges["blocks_pinned"] == sum(len(run.slots) for run in runs if run.pins)
        return {slot for run in runs if run.unloaded for slot in run.slots}
