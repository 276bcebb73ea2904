"""Copies of staged blocks in device slots: their holders, and the moves of table entries. Pure."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from .requests import Key, Request, Urgency


class Move(NamedTuple):
    """Write (block, slot) `entries` over published ones. Answer: whether the request is unclaimed after that.

    A move without entries only asks.
    """

    key: Key
    entries: Sequence[tuple[int, int]] = ()


_T = TypeVar("_T")
Steps = Generator[Move, bool, _T]  # moves to make, one after the other; each takes its answer


def carry_out(steps: Steps[_T], move: Callable[[Move], bool]) -> _T:
    """Make every move of `steps`, hand its answer in, and return the result of the steps."""
    try:
        step = next(steps)
        while True:
            step = steps.send(move(step))
    except StopIteration as end:
        result: _T = end.value
        return result


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

    def to_host(self, blocks: Iterable[int]) -> Move:
        """Return the move of these blocks back to their host slots."""
        return Move(self.request.key, [(block, self.host[block - self.start]) for block in blocks])

    def there(self) -> list[int]:
        """Return the blocks with a complete copy."""
        return [block for block, copy in self.copies.items() if copy.there]


class CopyOrder(NamedTuple):
    """Blocks to copy in one job, as (host slot, device slot)."""

    number: int
    slots: list[tuple[int, int]]
