"""Requests whose engine gave their flag up without a word: its ring was full, so nothing else tells of their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from ...shmring.flags import FlagTable
from ...shmring.wire.records import FlagState
from ..planning.requests import Key

SCANNED_PER_TICK = 256


class Untold:
    """Looks at some flags at a time, and tells of those that two rounds saw given up: a record would have come."""

    def __init__(self, table: FlagTable) -> None:
        self._table = table
        self._to_scan: deque[Key] = deque()
        self._given_up: set[Key] = set()

    def told(self, key: Key) -> None:
        self._given_up.discard(key)

    def found(self, requests: Mapping[Key, object]) -> Iterator[Key]:
        """Those of these; may change while it is iterated over. Raises SegmentCorrupt."""
        if not self._to_scan:
            self._to_scan.extend(requests)
        for _ in range(min(SCANNED_PER_TICK, len(self._to_scan))):
            key = self._to_scan.popleft()
            if key not in requests:
                continue
            flag = self._table.flag(key[0])
            if flag.generation == key[1] and flag.state not in (
                FlagState.RELEASED, FlagState.CANCELLED, FlagState.FREE,
            ):  # fmt: skip
                self._given_up.discard(key)
            elif key in self._given_up:
                yield key
            else:
                self._given_up.add(key)
