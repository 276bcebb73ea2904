"""The planner's port to the completion flags of one segment: each transition a compare-and-swap by generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..shmring.errors import SegmentCorrupt
from ..shmring.flags import FlagTable, pack, unpack
from ..shmring.protocol import FlagState
from .requests import Key

MAX_EXCHANGES = 16  # an honest engine makes two transitions of one use of a flag at most


class SessionFlags:
    """The planner's port to the completion flags. `disk_blocks` says how many of a request's blocks came from disk."""

    def __init__(self, table: FlagTable, disk_blocks: Callable[[Key], int | None]) -> None:
        self._table, self._disk_blocks = table, disk_blocks

    def publish(self, key: Key, start: int, slots: Any, count: int, final: bool) -> bool:
        flag, generation = key
        self._table.write_slots(flag, start, slots)
        if (disk := self._disk_blocks(key)) is not None:
            self._table.set_disk(flag, disk)
        state = FlagState.READY if final else FlagState.HINTED
        return self._move(key, (FlagState.HINTED,), pack(generation, state, count))

    def expire(self, key: Key) -> bool:
        return self._move(key, (FlagState.HINTED, FlagState.READY), pack(key[1], FlagState.EXPIRED, 0))

    def free(self, key: Key) -> bool:
        """RELEASED or CANCELLED -> FREE: nothing of it is pinned any more."""
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
