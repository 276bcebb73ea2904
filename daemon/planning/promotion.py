"""Promotion: which staged blocks to copy to the device next, and which slot tables name the copies. Pure.

The requests that were published first come first.  A copy is a block's second slot (copies.py), which stays as long as
a request may read it, so a table entry changes from the first slot to the second, and never back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from .copies import Copies, SecondSlot
from .requests import Key, Request


class Tables(Protocol):
    def move(self, key: Key, entries: Sequence[tuple[int, int]]) -> bool:
        """Write (block, slot) entries over those of an unclaimed request; False if it is claimed or gone."""


class CopyOrder(NamedTuple):
    """Blocks to copy in one job: the host slot of each, and its copy."""

    copies: Sequence[tuple[int, SecondSlot]]

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Return (host slot, device slot) of each block."""
        return [(slot, copy.slot) for slot, copy in self.copies]


class Promotions:
    """Plans the copies of the blocks of these requests, and has their tables name them, while it is `on`."""

    def __init__(self, copies: Copies, requests: Mapping[Key, Request], tables: Tables, *, chunk_blocks: int) -> None:
        self._copies, self._requests, self._tables = copies, requests, tables
        self._chunk_blocks = max(1, chunk_blocks)
        self._queue: dict[Request, int] = {}  # its first block to look at
        self._under_way = 0  # blocks
        self.on = bool(copies.slots)

    def published(self, request: Request, start: int, slots: Sequence[int]) -> Sequence[int]:
        """Return the slots to enter for blocks from `start` on, which the planner publishes in these host slots."""
        self._queue[request] = min(start, self._queue.get(request, start))
        if len(self._queue) > 2 * len(self._requests) + 64:  # behind one that waits for room most have ended
            self._queue = {each: block for each, block in self._queue.items() if self._is_live(each)}
        return self._copies.named(slots)

    def next_order(self) -> CopyOrder | None:
        """Return the next blocks to copy; None if there are none, or no room."""
        order: list[tuple[int, SecondSlot]] = []
        while self._queue:
            request, block = next(iter(self._queue.items()))
            stop = self._promote(request, block, order) if self._is_live(request) else None
            if stop is not None:
                self._queue[request] = stop
                break
            del self._queue[request]
        self._under_way += len(order)
        return CopyOrder(order) if order else None

    def _promote(self, request: Request, start: int, order: list[tuple[int, SecondSlot]]) -> int | None:
        """Have the request name its copies from block `start` on, now or later; return where to go on, if anywhere."""
        if not self._tables.move(request.key, ()):
            return None  # the engine has read its table
        stop, moves = None, list[tuple[int, int]]()
        for block in range(start, request.published):
            slot = request.held[block]
            copy = self._copies.of(slot)
            if copy is None:
                copy = self._copies.begin(slot) if len(order) < self._chunk_blocks else None
                if copy is None:
                    stop = block
                    break
                order.append((slot, copy))
            if copy.there:
                moves.append((block, copy.slot))
            else:
                copy.wanted.append((request, block))
        if moves:
            self._tables.move(request.key, moves)
        return stop

    def copied(self, order: CopyOrder, *, ok: bool) -> None:
        """An order came back; it succeeds or fails as a whole."""
        moves: dict[Request, list[tuple[int, int]]] = {}
        self._under_way -= len(order.copies)
        for slot, copy in order.copies:
            if self._copies.end(slot, copy, ok=ok):
                for request, block in copy.wanted:
                    if self._is_live(request) and block < request.published and request.held[block] == slot:
                        moves.setdefault(request, []).append((block, copy.slot))
            copy.wanted.clear()
        for request, entries in moves.items():
            self._tables.move(request.key, entries)

    def _is_live(self, request: Request) -> bool:
        return self._requests.get(request.key) is request

    def close(self) -> None:
        """Make no more copies, and let no other table name those that there are."""
        self.on = False
        self._queue.clear()
        self._copies.close()

    def gauges(self) -> dict[str, int]:
        """Count device slots; those that are neither free nor being copied to have a block's copy."""
        return {
            "device_slots": len(self._copies.slots),
            "device_slots_free": len(self._copies.free),
            "device_copies": self._under_way,
        }
