"""The planner: which blocks to fetch into which slots, for which request first. Pure: events in, fetch orders out.

It owns the block index of one engine (digest -> slot, state, pins).  A block that several requests want is fetched
once and pinned once per request; consumed blocks stay as an LRU until their room is needed.  Work goes out by
urgency: asked for at the queue head, then scheduler priority, then arrival.  A request without room may revoke the
least urgent one, if that is less urgent than itself and not claimed.  Time is handed in; flags are reached through a
port.
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

Key = tuple[int, int]  # (flag, generation)
Urgency = tuple[int, int, int]


class FlagPort(Protocol):
    """How the planner reaches completion flags. Both calls are compare-and-swaps and may lose to the engine."""

    def publish(self, key: Key, start: int, slots: Sequence[int], count: int, final: bool) -> bool:
        """Enter slots from block `start` on and publish `count`; False when the flag is the engine's already."""
        ...

    def expire(self, key: Key) -> bool:
        """Take an unclaimed flag back; False when the engine claimed or dropped it first."""
        ...


class BlockState(enum.Enum):
    LOADING = "loading"
    STAGED = "staged"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Block:
    """One block in one slot. `detached`: no longer in the index, the slot is freed with the last pin."""

    digest: bytes
    slot: int
    state: BlockState = BlockState.LOADING
    pins: int = 0
    detached: bool = False
    waiters: list[tuple[Request, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One hinted request. Blocks [local, ready) are published, [local, issued) pinned, [local, limit) in the store."""

    key: Key
    hashes: bytes
    hash_bytes: int
    blocks: int
    local: int
    priority: int
    sequence: int
    limit: int = -1  # -1 until looked up
    ready: int = 0
    issued: int = 0
    asked: bool = False
    final: bool = False
    held: list[Block] = field(default_factory=list)
    fetched_blocks: int = 0
    disk_blocks: int = 0
    first_byte_ns: int = 0
    last_byte_ns: int = 0

    def digest(self, block: int) -> bytes:
        start = block * self.hash_bytes
        return self.hashes[start : start + self.hash_bytes]

    @property
    def urgency(self) -> Urgency:
        return (0 if self.asked else 1, self.priority, self.sequence)

    @property
    def wants_work(self) -> bool:
        return not self.final and self.issued < self.limit


class Order(NamedTuple):
    """Blocks to fetch in one store call."""

    number: int
    blocks: list[Block]


class Fetched(NamedTuple):
    """What became of one block of an order."""

    ok: bool
    from_disk: bool = False


class Planner:
    """Plans one engine's staging slots [0, slot_count)."""

    def __init__(self, slot_count: int, flags: FlagPort, *, chunk_blocks: int) -> None:
        self._flags = flags
        self._chunk_blocks = max(1, chunk_blocks)
        self._slot_count = slot_count
        self._free = list(range(slot_count - 1, -1, -1))
        self._index: dict[bytes, Block] = {}
        self._idle: OrderedDict[bytes, Block] = OrderedDict()  # staged, unpinned: least recently used first
        self._requests: dict[Key, Request] = {}
        self._holders: dict[Key, Request] = {}  # the requests that pin something
        self._queue: list[tuple[Urgency, Request]] = []
        self._orders: dict[int, Order] = {}
        self._sequence = 0

    # --- events -----------------------------------------------------------------------------------------------------

    def hint(self, key: Key, hashes: bytes, hash_bytes: int, blocks: int, local: int, priority: int) -> Request:
        """A request arrived; the caller looks its digests [local, blocks) up and then calls looked_up()."""
        self._sequence += 1
        request = Request(key, hashes, hash_bytes, blocks, local, priority, self._sequence, ready=local, issued=local)
        self._requests[key] = request
        return request

    def looked_up(self, key: Key, found: int) -> None:
        """The store holds blocks up to `found` (absolute, at least `local`)."""
        request = self._requests.get(key)
        if request is None:
            return
        request.limit = max(request.local, min(found, request.blocks))
        self._advance(request)
        if request.wants_work:
            heapq.heappush(self._queue, (request.urgency, request))

    def ask(self, key: Key) -> None:
        """The scheduler reached this request and found it pending."""
        request = self._requests.get(key)
        if request is not None and not request.asked:
            request.asked = True
            if request.wants_work:
                heapq.heappush(self._queue, (request.urgency, request))

    def finish(self, key: Key) -> Request | None:
        """The engine released or cancelled it: nothing stays pinned."""
        request = self._requests.pop(key, None)
        if request is not None:
            self._drop(request)
        return request

    def fetched(self, number: int, results: Sequence[Fetched], now_ns: int) -> None:
        """An order came back. The first failed block of a request ends its usable prefix."""
        order = self._orders.pop(number)
        touched: dict[Key, Request] = {}
        for block, result in zip(order.blocks, results, strict=True):
            waiters, block.waiters = block.waiters, []
            block.state = BlockState.STAGED if result.ok else BlockState.FAILED
            if not result.ok and not block.detached:
                block.detached = True
                del self._index[block.digest]
            for position, (request, at) in enumerate(waiters):
                touched[request.key] = request
                if result.ok:
                    request.first_byte_ns = request.first_byte_ns or now_ns
                    request.last_byte_ns = now_ns
                    if position == 0:
                        request.fetched_blocks += 1
                        request.disk_blocks += result.from_disk
                elif at < request.limit:
                    self._shorten(request, at)
            if block.pins == 0:
                self._settle(block)
        for request in touched.values():
            self._advance(request)

    def reset(self) -> list[Request]:
        """The KV of every block is void: revoke what is unclaimed, forget the index. Returns the revoked requests."""
        revoked = [request for request in self._requests.values() if self._flags.expire(request.key)]
        for request in revoked:
            del self._requests[request.key]
            self._drop(request)
        for block in self._index.values():
            block.detached = True
            if block.pins == 0:
                self._settle(block)
        self._index.clear()
        self._idle.clear()
        return revoked

    # --- orders -----------------------------------------------------------------------------------------------------

    def next_order(self) -> tuple[Order | None, list[Request]]:
        """The most urgent blocks that fit one store call, and the requests revoked to make room for them."""
        blocks: list[Block] = []
        revoked: list[Request] = []
        while len(blocks) < self._chunk_blocks and self._queue:
            urgency, request = self._queue[0]
            if self._requests.get(request.key) is not request or request.urgency != urgency or not request.wants_work:
                heapq.heappop(self._queue)  # an older entry of a request that moved, ended or was published in full
                continue
            room = self._issue(request, blocks, revoked)
            self._advance(request)
            if not room:
                # Nobody less urgent may take room before this request; it goes on when a slot comes back.
                self._give_up_growth(request, blocks)
                break
            if 2 * len(blocks) >= self._chunk_blocks:
                # Filling up with the next request's blocks would make this one wait for them.
                break
        if not blocks:
            return None, revoked
        self._sequence += 1
        order = Order(self._sequence, blocks)
        self._orders[order.number] = order
        return order, revoked

    def _issue(self, request: Request, blocks: list[Block], revoked: list[Request]) -> bool:
        """Pin this request's next blocks and order the missing ones. False when there is no room for the next one."""
        while request.wants_work and len(blocks) < self._chunk_blocks:
            digest = request.digest(request.issued)
            block = self._index.get(digest)
            if block is None:
                slot = self._take_slot(request, revoked)
                if slot is None:
                    return False
                block = self._index[digest] = Block(digest, slot)
                blocks.append(block)
            elif block.pins == 0:
                self._idle.pop(digest, None)
            block.pins += 1
            request.held.append(block)
            self._holders[request.key] = request
            if block.state is BlockState.LOADING:
                block.waiters.append((request, request.issued))
            request.issued += 1
        return True

    def _take_slot(self, request: Request, revoked: list[Request]) -> int | None:
        while not self._free:
            if self._idle:
                _, block = self._idle.popitem(last=False)
                del self._index[block.digest]
                return block.slot
            victim = self._victim(request.urgency)
            if victim is None:
                return None
            del self._requests[victim.key]
            self._drop(victim)
            revoked.append(victim)
        return self._free.pop()

    def _victim(self, urgency: Urgency) -> Request | None:
        """The least urgent request that gives slots back at once, is less urgent than `urgency`, and is not claimed."""
        candidates = (
            request
            for request in self._holders.values()
            if request.urgency > urgency
            and any(block.state is BlockState.STAGED and block.pins == 1 for block in request.held)
        )
        for request in sorted(candidates, key=lambda request: request.urgency, reverse=True):
            if self._flags.expire(request.key):
                return request
        return None

    def _give_up_growth(self, request: Request, blocks: list[Block]) -> None:
        """A request that holds every slot there is can only be served in part: its prefix so far is all of it."""
        if not blocks and not self._orders and len({block.slot for block in request.held}) >= self._slot_count:
            request.limit = request.issued
            self._advance(request)

    # --- state ------------------------------------------------------------------------------------------------------

    def _advance(self, request: Request) -> None:
        """Publish what became contiguous; READY once nothing more will come."""
        if request.final or request.limit < 0:
            return
        start = request.ready
        while request.ready < request.issued and request.held[request.ready - request.local].state is BlockState.STAGED:
            request.ready += 1
        final = request.ready >= request.limit
        if request.ready == start and not final:
            return
        slots = [block.slot for block in request.held[start - request.local : request.ready - request.local]]
        published = self._flags.publish(request.key, start, slots, request.ready, final)
        request.final = final or not published

    def _shorten(self, request: Request, limit: int) -> None:
        request.limit = limit
        dropped = request.held[limit - request.local :]
        del request.held[limit - request.local :]
        request.issued = min(request.issued, limit)
        self._unpin(request, dropped)

    def _drop(self, request: Request) -> None:
        request.final = True
        self._holders.pop(request.key, None)
        held, request.held = request.held, []
        self._unpin(request, held)

    def _unpin(self, request: Request, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.pins -= 1
            if block.waiters:
                block.waiters = [entry for entry in block.waiters if entry[0] is not request]
            if block.pins == 0:
                self._settle(block)

    def _settle(self, block: Block) -> None:
        """An unpinned block: staged ones become idle, void ones give their slot back, loading ones wait."""
        if block.state is BlockState.LOADING or block.slot < 0:
            return
        if block.detached:
            self._free.append(block.slot)
            block.slot = -1  # a second settle frees nothing twice
        else:
            self._idle[block.digest] = block
            self._idle.move_to_end(block.digest)

    # --- what an auditor sees ---------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, int]:
        """Slots by use, requests and orders; pinned is zero when no request is left."""
        pinned = sum(1 for block in self._index.values() if block.pins)
        return {
            "slots": self._slot_count,
            "slots_free": len(self._free),
            "slots_idle": len(self._idle),
            "blocks_pinned": pinned,
            "requests": len(self._requests),
            "orders": len(self._orders),
        }

    @property
    def requests(self) -> dict[Key, Request]:
        return self._requests

    @property
    def has_work(self) -> bool:
        return bool(self._queue)
