"""The planner's records: a hinted request, an order, and the port to the completion flags."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from struct import Struct
from typing import Any, NamedTuple, Protocol

from ...kv.prompts import Prompt
from .runs import Lane, Run

Key = tuple[int, int]  # (flag, generation)
# (0 if asked for, 1 if hinted, 2 if announced; priority; `due_ns`; number of the request): the smallest goes first.
Urgency = tuple[int, int, int, int]


class FlagPort(Protocol):
    """The exchanges of completion flags that decide a plan at once. The engine may win each compare-and-swap."""

    def take_back(self, key: Key) -> bool:
        """Publish nothing of an unclaimed flag any more, for now; False if the engine claimed or dropped it first."""
        ...

    def expire(self, key: Key) -> bool:
        """End an unclaimed flag; False if the engine claimed or dropped it first."""
        ...


class Failure(NamedTuple):
    """Why blocks that the store had do not come: `why` is an event field's value, `owners` the storage nodes."""

    why: str
    owners: str = ""


class AnnounceTimes(NamedTuple):
    """The times of a request that no engine has hinted yet: since when it is announced, and until when it counts."""

    since_ns: int
    until_ns: int


@dataclass(slots=True, eq=False)
class Request:
    """A hinted or announced request. Of its blocks, [0, ready) are staged, [0, issued) pinned, [0, limit) in the store.

    `names`: of its blocks, joined, in the order of its slot table: the longest prefix that its prompt found, or more.
    """

    key: Key
    prompt: Prompt
    priority: int
    sequence: int
    names: bytes | bytearray
    arrived_ns: int = 0
    limit: int = -1  # -1 until looked up
    ready: int = 0
    published: int = 0  # the slot table has so many entries
    shown: int = 0  # blocks of the flag
    asked: bool = False
    final: bool = False
    lane: Lane = Lane.MEMORY  # of the next block to order
    on_disk: bytes = b""  # 1 for each block that lies only on disk; blocks beyond lie in memory
    held: array[int] = field(default_factory=partial(array, "I"))  # slots of [0, issued)
    issued: int = 0
    lanes: bytearray = field(default_factory=bytearray)  # of these blocks
    waits: Run | None = None  # the loading run at block `ready`
    failure: Failure | None = None  # of the first block that did not come
    taken_back: int = 0  # times
    fetched_blocks: int = 0
    disk_blocks: int = 0
    first_byte_ns: int = 0
    last_byte_ns: int = 0
    stopped: bool = False  # the engine recomputes what was not under way
    ranked: bool = False
    announced: AnnounceTimes | None = None
    trace: Any = None  # of a hinted one until it has ended: what its line tells (telemetry/trace.py)
    due_ns: int = field(init=False)  # its place in the order of fetches: its arrival until it is `ranked`
    urgency: Urgency = field(init=False)

    def __post_init__(self) -> None:
        self.due_ns = self.arrived_ns
        self.place()

    def place(self) -> None:
        """Enter its `urgency`, which `asked` and `due_ns` change."""
        urgent = 0 if self.asked else 1 if self.announced is None else 2
        self.urgency = (urgent, self.priority, self.due_ns, self.sequence)

    @property
    def blocks(self) -> int:
        return len(self.names) // self.prompt.name_bytes

    def digest(self, block: int) -> bytes:
        start = block * self.prompt.name_bytes
        return bytes(self.names[start : start + self.prompt.name_bytes])

    def digests(self, start: int, stop: int) -> tuple[bytes, ...]:
        size = self.prompt.name_bytes
        return Struct(f"{size}s" * (stop - start)).unpack(self.names[start * size : stop * size])

    def lane_of(self, block: int) -> Lane:
        return Lane.DISK if block < len(self.on_disk) and self.on_disk[block] else Lane.MEMORY

    def lane_ends(self, block: int) -> int:
        """Return the first block after this one that lies in the other lane, or `limit`."""
        lane = self.lane_of(block)
        end = self.on_disk.find(1 - lane, block)
        if end < 0:
            end = len(self.on_disk) if lane is Lane.DISK else self.limit
        return min(end, self.limit)

    @property
    def wants_work(self) -> bool:
        return not self.final and self.issued < self.limit


class Publication(NamedTuple):
    """An order to enter `slots` from entry `start` on, then to publish so many blocks; `final`: no more will come."""

    request: Request
    start: int
    slots: Sequence[int]
    blocks: int
    final: bool


class Broken(NamedTuple):
    """The notice that a request lost chosen blocks: the next shorter prefix needs others, once `choose` is called."""

    request: Request


class TakenBack(NamedTuple):
    """The notice that the flag of this request publishes nothing any more, for now."""

    request: Request


class Order(NamedTuple):
    """Blocks to fetch in one store call, and the slot of each."""

    number: int
    lane: Lane
    digests: Sequence[bytes]
    slots: Sequence[int]
    ahead: bool = False  # for announced requests
