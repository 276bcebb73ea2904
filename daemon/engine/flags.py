"""The planner's port to the completion flags of one segment: each transition a compare-and-swap by generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...shmring.errors import SegmentCorrupt
from ...shmring.flags import FlagTable, pack, unpack
from ...shmring.wire.records import FlagState
from ..planning.requests import Key

MAX_EXCHANGES = 16  # an honest engine makes two transitions of one use of a flag at most


class Tier(Protocol):
    """A second place for staged blocks."""

    def published(self, key: Key, start: int, slots: Sequence[int]) -> Sequence[int]:
        """The slots to enter for blocks that are about to be published in these."""

    def dropped(self, key: Key) -> None:
        """The engine reads nothing of it, unless it is published again."""


class EpochFlags:
    """The planner's port to the completion flags. `disk_blocks` says how many of a request's blocks came from disk.

    `tier` has a say in the slots of what is published, and hears what is not any more.
    """

    def __init__(self, table: FlagTable, disk_blocks: Callable[[Key], int | None]) -> None:
        self._table, self._disk_blocks = table, disk_blocks
        self.tier: Tier | None = None

    def publish(self, key: Key, start: int, slots: Any, count: int, final: bool) -> bool:
        flag, generation = key
        if self.tier is not None:
            slots = self.tier.published(key, start, slots)
        self._table.write_slots(flag, start, slots)
        if (disk := self._disk_blocks(key)) is not None:
            self._table.set_disk(flag, disk)
        state = FlagState.READY if final else FlagState.HINTED
        return self._move(key, (FlagState.HINTED,), pack(generation, state, count))

    def take_back(self, key: Key) -> bool:
        return self._void(key, FlagState.HINTED)

    def expire(self, key: Key) -> bool:
        return self._void(key, FlagState.EXPIRED)

    def _void(self, key: Key, state: FlagState) -> bool:
        """Out of an unclaimed flag's hands: nothing of it is published any more."""
        done = self._move(key, (FlagState.HINTED, FlagState.READY), pack(key[1], state, 0))
        if done and self.tier is not None:
            self.tier.dropped(key)
        return done

    def free(self, key: Key) -> bool:
        """RELEASED or CANCELLED -> FREE: nothing of it is pinned any more."""
        if self.tier is not None:
            self.tier.dropped(key)
        return self._move(key, (FlagState.RELEASED, FlagState.CANCELLED), pack(key[1], FlagState.FREE, 0))

    def _move(self, key: Key, states: tuple[FlagState, ...], desired: int) -> bool:
        flag, generation = key
        for _ in range(MAX_EXCHANGES):
            word = self._table.load(flag)
            seen = unpack(word)
            if seen.generation != generation or seen.state not in states:
                return False
            if self._table.exchange(flag, word, desired):
                return True
        raise SegmentCorrupt(f"flag does not stand still: flag={flag} word={self._table.load(flag):#x}")
