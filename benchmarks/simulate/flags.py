"""The simulation's completion flags: what the planner publishes, and what the engine sees of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvprefetch.daemon.planning.requests import Key, Publication
from kvprefetch.shmring.wire.records import FlagState


@dataclass(slots=True)
class Flag:
    """The engine's view of one hint: its completion flag and slot table."""

    state: FlagState = FlagState.HINTED
    count: int = 0
    slots: list[int] = field(default_factory=list)
    found: int = 0
    """Leading blocks that the store holds; 0 before the look-up."""
    loaded: range = range(0)


class Flags:
    """The flags; `changed(key)` reports each move of a flag to the engine."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self.of: dict[Key, Flag] = {}
        self._changed = changed

    def publish(self, publication: Publication) -> bool:
        key = publication.request.key
        flag = self.of[key]
        if flag.state is not FlagState.HINTED:
            return False
        flag.slots.extend(publication.slots)
        flag.count = publication.blocks
        if publication.final:
            flag.state = FlagState.READY
        self._changed(key)
        return True

    def take_back(self, key: Key) -> bool:
        flag = self.of[key]
        if flag.state not in (FlagState.HINTED, FlagState.READY):
            return False
        flag.state, flag.count = FlagState.HINTED, 0
        flag.slots.clear()
        self._changed(key)
        return True

    def expire(self, key: Key) -> bool:
        raise NotImplementedError  # weights do not change here
