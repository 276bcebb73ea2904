"""Promotion: which staged blocks have a copy in which device slot. Pure: events in, copy orders and table entries out.

A copy is never the only one.  The requests that want a block pin its host slot, so a request's entry may name either
slot at any moment.  Room goes by urgency, as the planner's does; copies that no request holds stay as an LRU.

A more urgent request may take the copies that another request holds alone: that one's entries name the host slots
again.  If its flag is unclaimed after that, the engine cannot read the device slots any more (SYNC claim in
shmring/flags.py).  Otherwise the copies stay until the request ends, as they do for any claimed request.

A copy under way that loses all its requests is void: nothing pins its host slot then.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .queues import negated, push
from .requests import Key, Request, Urgency

MAX_TRIES = 16  # requests looked at for one slot


class Tables(Protocol):
    """The slot tables."""

    def move(self, key: Key, entries: Sequence[tuple[int, int]]) -> bool:
        """Write (block, slot) entries over published ones; return whether the request is unclaimed after that."""


@dataclass(slots=True, eq=False)
class Copy:
    """One device slot in use. `holders`: for each request, the block's number in its prompt."""

    digest: bytes
    slot: int
    there: bool = False
    holders: dict[Holder, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Holder:
    """A published request.

    `next`: the first block to look at.  `settled`: it was claimed at the last look, and gets no copies until a look
    finds it unclaimed.  `void`: it was published before a reset, and gets no more copies.
    `queued`, `listed`: its entries in the queue and among the victims.
    """

    request: Request
    start: int
    host: list[int] = field(default_factory=list)
    copies: dict[int, Copy] = field(default_factory=dict)
    next: int = 0
    settled: bool = False
    void: bool = False
    queued: Urgency | None = None
    listed: Urgency | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.host)

    def there(self) -> list[int]:
        """Return the blocks with a complete copy."""
        return [block for block, copy in self.copies.items() if copy.there]


class CopyOrder(NamedTuple):
    """Blocks to copy in one job, as (host slot, device slot)."""

    number: int
    slots: list[tuple[int, int]]


class Promotions:
    """Plans the device slots [first, first + count) of one engine, whose slot tables it changes."""

    def __init__(self, first: int, count: int, tables: Tables, *, chunk_blocks: int) -> None:
        self._tables = tables
        self._chunk_blocks = max(1, chunk_blocks)
        self._slots = range(first, first + count)
        self._free = list(reversed(self._slots))
        self._index: dict[bytes, Copy] = {}
        self._idle: OrderedDict[Copy, None] = OrderedDict()  # held by no request: least recently used first
        self._holders: dict[Key, Holder] = {}
        self._numbers: dict[int, Holder] = {}
        self._queue: list[Urgency] = []  # requests with blocks to promote
        self._victims: list[Urgency] = []  # requests that hold copies, negated: least urgent first
        self._orders: dict[int, list[Copy]] = {}
        self._number = 0
        self._settled: list[Holder] = []
        self._stopped = False  # the most urgent request found no room, and nothing changed since
        self._closed = count == 0

    # --- events -----------------------------------------------------------------------------------------------------

    def published(self, request: Request, start: int, slots: Sequence[int]) -> list[int]:
        """Return the slots to enter for blocks from `start` on, which the planner publishes in these host slots."""
        entries = list(slots)
        if self._closed or not entries:
            return entries
        holder = self._holders.get(request.key)
        if holder is None:
            holder = self._holders[request.key] = self._numbers[request.sequence] = Holder(request, start, next=start)
        holder.host.extend(entries)
        for at, block in enumerate(range(start, start + len(entries))):
            copy = self._index.get(request.digest(block))
            if copy is not None and copy.there and self._hold(copy, holder, block):
                entries[at] = copy.slot
        self._enter(holder)
        return entries

    def asked(self, key: Key) -> None:
        """The urgency of a request changed."""
        if (holder := self._holders.get(key)) is not None:
            self._enter(holder)

    def dropped(self, key: Key) -> None:
        """The request ended or was taken back: the engine reads none of its slots any more."""
        holder = self._holders.pop(key, None)
        if holder is None:
            return
        del self._numbers[holder.request.sequence]
        for copy in holder.copies.values():
            del copy.holders[holder]
            self._settle(copy)
        self._stopped = False

    def named(self, key: Key) -> int:
        """Return how many of its entries name device slots, or did so when it was claimed."""
        holder = self._holders.get(key)
        return len(holder.there()) if holder is not None else 0

    def copied(self, number: int, *, ok: bool) -> None:
        """An order came back; it succeeds or fails as a whole."""
        ok = ok and not self._closed
        moves: dict[Holder, list[tuple[int, int]]] = {}
        for copy in self._orders.pop(number):
            copy.there = True
            if not ok:
                self._forget(copy)
            for holder, block in list(copy.holders.items()):
                if ok and self._may_enter(holder):
                    moves.setdefault(holder, []).append((block, copy.slot))
                else:
                    del copy.holders[holder]
                    del holder.copies[block]
            self._settle(copy)
        for holder, entries in moves.items():
            self._tables.move(holder.request.key, entries)
        self._stopped = False

    def tick(self) -> None:
        """Look again for room and for claims that were given up, since flags change without an event."""
        self._stopped = False
        settled, self._settled = self._settled, []
        for holder in settled:
            if self._holders.get(holder.request.key) is not holder or holder.void:
                continue
            if not self._tables.move(holder.request.key, ()):
                self._settled.append(holder)
                continue
            holder.settled, holder.next = False, holder.start
            if there := holder.there():  # some moved to the host just before the claim
                self._tables.move(holder.request.key, [(block, holder.copies[block].slot) for block in there])
            self._enter(holder)

    def reset(self) -> None:
        """The KV of every block is void: copies serve the requests that hold them, and no others."""
        for copy in list(self._index.values()):
            self._forget(copy)
            self._settle(copy)
        for holder in self._holders.values():
            holder.settled = holder.void = True

    def close(self) -> None:
        """Make no more copies, and move every request back to its host slots."""
        self._closed = True
        self.reset()
        for holder in self._holders.values():
            if there := holder.there():
                self._to_host(holder, there)

    # --- orders -----------------------------------------------------------------------------------------------------

    def next_order(self) -> CopyOrder | None:
        """Return the most urgent blocks to copy now; None if there are none, or no room."""
        slots: list[tuple[int, int]] = []
        copies: list[Copy] = []
        while not self._stopped and len(slots) < self._chunk_blocks and (holder := self._head()) is not None:
            if self._may_enter(holder):
                self._promote(holder, slots, copies)
        if not slots:
            return None
        self._number += 1
        self._orders[self._number] = copies
        return CopyOrder(self._number, slots)

    def _promote(self, holder: Holder, slots: list[tuple[int, int]], copies: list[Copy]) -> None:
        moves: list[tuple[int, int]] = []
        while holder.next < holder.stop and len(slots) < self._chunk_blocks:
            block = holder.next
            if block not in holder.copies:
                digest = holder.request.digest(block)
                copy = self._index.get(digest)
                if copy is None:
                    slot = self._take_slot(holder.request.urgency)
                    if slot is None:
                        self._stopped = True
                        break
                    copy = self._index[digest] = Copy(digest, slot)
                    slots.append((holder.host[block - holder.start], slot))
                    copies.append(copy)
                if self._hold(copy, holder, block) and copy.there:
                    moves.append((block, copy.slot))
            holder.next += 1
        self._enter(holder)
        if moves:
            self._tables.move(holder.request.key, moves)

    def _head(self) -> Holder | None:
        """Return the most urgent request with blocks to promote."""
        while self._queue:
            entry = self._queue[0]
            holder = self._numbers.get(entry[-1])
            if holder is not None and holder.queued == entry:
                if not holder.settled and holder.next < holder.stop:
                    return holder
                holder.queued = None
            heapq.heappop(self._queue)
        return None

    def _take_slot(self, urgency: Urgency) -> int | None:
        if not self._free and self._idle:
            copy = next(iter(self._idle))
            self._forget(copy)
            self._settle(copy)
        elif not self._free:
            self._demote(urgency)
        return self._free.pop() if self._free else None

    def _demote(self, urgency: Urgency) -> None:
        """Take the copies that a less urgent request holds alone, from the least urgent one that can give some."""
        aside: list[Holder] = []
        while self._victims and not self._free and len(aside) < MAX_TRIES:
            entry = self._victims[0]
            holder = self._numbers.get(-entry[-1])
            if holder is not None and holder.listed == entry and holder.request.urgency <= urgency:
                break
            heapq.heappop(self._victims)
            if holder is None or holder.listed != entry:
                continue
            holder.listed = None
            if not holder.settled and not self._take_back(holder):
                aside.append(holder)
        for holder in aside:
            self._enter(holder)

    def _take_back(self, holder: Holder) -> bool:
        """Move a request's last blocks back to the host; False if that frees no slot."""
        alone = sorted(block for block in holder.there() if len(holder.copies[block].holders) == 1)
        alone = alone[-self._chunk_blocks :]
        if not alone or not self._tables.move(holder.request.key, ()):
            return False
        if not self._to_host(holder, alone):
            self._settle_claimed(holder)  # the engine may have read the device slots before the move
            return True
        for block in alone:
            copy = holder.copies.pop(block)
            copy.holders.clear()
            self._forget(copy)
            self._settle(copy)
        holder.next = min(holder.next, alone[0])
        self._enter(holder)
        return True

    # --- state ------------------------------------------------------------------------------------------------------

    def _to_host(self, holder: Holder, blocks: Sequence[int]) -> bool:
        """Name the host slots of these blocks again; whether the request is unclaimed after that."""
        return self._tables.move(holder.request.key, [(block, holder.host[block - holder.start]) for block in blocks])

    def _may_enter(self, holder: Holder) -> bool:
        """Whether the engine can still read new entries of this request; a claimed one has read its table."""
        if not holder.settled and not self._tables.move(holder.request.key, ()):
            self._settle_claimed(holder)
        return not holder.settled

    def _settle_claimed(self, holder: Holder) -> None:
        holder.settled = True
        self._settled.append(holder)

    def _enter(self, holder: Holder) -> None:
        """Enter it in the queue if it has blocks to promote, and among the victims if it has copies."""
        if holder.settled:
            return
        entry = holder.request.urgency
        if holder.next < holder.stop and holder.queued != entry:
            holder.queued = entry
            push(self._queue, entry, self._numbers)
            if self._queue[0] == entry:
                self._stopped = False
        if holder.copies and holder.listed != negated(entry):
            holder.listed = negated(entry)
            push(self._victims, holder.listed, self._numbers)

    def _hold(self, copy: Copy, holder: Holder, block: int) -> bool:
        """Note that this block's entry names the copy, now or later; False if the request holds it as another block."""
        if holder in copy.holders:
            return False
        if not copy.holders:
            self._idle.pop(copy, None)
        copy.holders[holder] = block
        holder.copies[block] = copy
        return True

    def _forget(self, copy: Copy) -> None:
        """Take it out of the index; its slot comes back with its last holder."""
        if self._index.get(copy.digest) is copy:
            del self._index[copy.digest]
            self._idle.pop(copy, None)

    def _settle(self, copy: Copy) -> None:
        """Without holders a copy is void while it is under way, else idle if it is in the index, else free."""
        if copy.holders:
            return
        if not copy.there:
            self._forget(copy)
        elif self._index.get(copy.digest) is copy:
            self._idle[copy] = None
        else:
            self._free.append(copy.slot)

    def gauges(self) -> dict[str, int]:
        """Count device slots by use; those that are neither free nor idle are held or being copied to."""
        return {
            "device_slots": len(self._slots),
            "device_slots_free": len(self._free),
            "device_slots_idle": len(self._idle),
            "device_copies": sum(map(len, self._orders.values())),
        }

    def check(self) -> None:
        """Assert that each device slot is free, idle, held, or in an order whose requests are gone."""
        held = {copy.slot for holder in self._holders.values() for copy in holder.copies.values()}
        void = {copy.slot for copies in self._orders.values() for copy in copies} - held
        idle = [copy.slot for copy in self._idle]
        assert sorted((*self._free, *idle, *held, *void)) == list(self._slots)
