"""Whose room a more urgent request takes: the least urgent one's that gives back a slot at once. Pure."""

from __future__ import annotations

import heapq

from .blocks import Blocks, BlockState, Lane
from .requests import FlagPort, Request, Urgency, negated, push

MAX_TRIES = 64  # requests looked at for one slot


class Victims:
    """The requests that alone hold a block, least urgent first."""

    def __init__(self, blocks: Blocks, numbers: dict[int, Request], flags: FlagPort) -> None:
        self._blocks, self._numbers, self._flags = blocks, numbers, flags
        self._heap: list[Urgency] = []  # negated urgencies

    def take_back(self, urgency: Urgency, lane: Lane | None) -> Request | None:
        """Take back the flag of one that is less urgent, holds a slot (of this lane) alone, and is not claimed."""
        while self._blocks.sole_changed:
            if (request := self._numbers.get(self._blocks.sole_changed.pop())) is not None:
                push(self._heap, negated(request.urgency), self._numbers)
        aside: list[Urgency] = []
        found = None
        while self._heap and found is None and len(aside) < MAX_TRIES:
            victim = self._numbers.get(-self._heap[0][2])
            if victim is None or negated(victim.urgency) != self._heap[0] or victim.sequence not in self._blocks.sole:
                heapq.heappop(self._heap)
                continue
            if victim.urgency <= urgency:
                break
            entry = heapq.heappop(self._heap)
            if self._gives_back(victim, lane) and self._flags.take_back(victim.key):
                found = victim
            else:
                aside.append(entry)
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return found

    def _gives_back(self, request: Request, lane: Lane | None) -> bool:
        return any(
            run.pins == 1 and run.state is BlockState.STAGED and (lane is None or run.lane is lane)
            for run in self._blocks.runs(request.held)
        )
