"""A run of blocks in staging: the unit that requests pin, wait for and give back."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field
from typing import Any


class Lane(enum.IntEnum):
    """The medium that holds a block in the store. Each lane has its own orders, so disks never hold up memory."""

    MEMORY = 0
    DISK = 1


class BlockState(enum.Enum):
    LOADING = "loading"
    STAGED = "staged"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Run:
    """Blocks that follow one another in a prompt, with the same state and the same pins.

    `digests`: all of one length.  `pins`: how many requests pin it; `holders`: the sum of their numbers, so with
    one pin the number of that request.  `era`: while it is the index's own, the index has it; then the last unpin
    frees its slots.  `in_call`: a store call may still write to the slots, even if no request wants the blocks.
    `ahead_until_ns`: it was announced, and no engine asked for it yet; until then it makes room for hinted requests
    alone.  `unloaded`: it was fetched, and no request loaded it since.
    """

    digests: list[bytes]
    slots: array[int]
    lane: Lane
    first_requester: Any
    state: BlockState = BlockState.LOADING
    pins: int = 0
    holders: int = 0
    era: int = 0
    in_call: bool = True
    ahead_until_ns: int = 0
    unloaded: bool = False
    waiters: list[Any] = field(default_factory=list)  # requests that wait for its first block
    failure: Any = None  # why it failed

    def is_like(self, other: Run) -> bool:
        """Whether the two may be one run, if the same requests pin both."""
        mine = (self.lane, self.era, self.ahead_until_ns, self.unloaded)
        return mine == (other.lane, other.era, other.ahead_until_ns, other.unloaded)
