"""Doubles around a planner: the engine's side of the flags, hints by block names, and a store that obeys at once."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from kvprefetch.daemon.planning import holdings
from kvprefetch.daemon.planning import planner as module
from kvprefetch.daemon.planning.requests import AnnounceTimes, Broken, Key, Order, Publication, Request
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.kv.prompts import Prompt


class FlagsModel:
    """The engine's side of the flags: the published blocks, and which flags the engine claimed."""

    def __init__(self) -> None:
        self.count: dict[Key, int] = {}
        self.final: set[Key] = set()
        self.slots: dict[Key, dict[int, int]] = {}
        self.expired: set[Key] = set()
        self.claimed: set[Key] = set()
        self.refused: set[Key] = set()
        self.taken_back: list[Key] = []
        self.ended: list[Request] = []  # announced ones, all of whose blocks came

    def publish(self, publication: Publication) -> bool:
        request, start, slots, count, final = publication
        if request.announced is not None:
            self.ended += [request] * final
            return True
        key, start = request.key, request.prompt.local_blocks + start
        if key in self.claimed:
            self.refused.add(key)
            return False
        assert key not in self.expired
        assert key not in self.final
        assert count >= self.count.get(key, 0)
        assert start + len(slots) == count or not request.prompt.partial, "exactly the slots of the new blocks"
        self.slots.setdefault(key, {}).update(enumerate(slots, start))
        self.count[key] = count
        if final:
            self.final.add(key)
        return True

    def take_back(self, key: Key) -> bool:
        if key in self.claimed:
            return False
        assert key not in self.expired
        self.taken_back.append(key)
        self.final.discard(key)
        self.refused.discard(key)
        self.slots.pop(key, None)
        self.count.pop(key, None)
        return True

    def expire(self, key: Key) -> bool:
        if key in self.claimed:
            return False
        self.expired.add(key)
        return True


def _pulled(name: str) -> Any:
    """Return the planner's method, followed by all changes that it caused."""

    def method(self: Planner, *args: Any, **options: Any) -> Any:
        result = getattr(module.Planner, name)(self, *args, **options)
        self.carry_out()
        return result

    return method


class Planner(module.Planner):
    """A planner that publishes at once to a model of flags, as an epoch does.

    `stored`, `disk`: the names that the store has. Where it has none, a test answers a prompt's questions itself.
    """

    def __init__(self, slot_count: int, flags: FlagsModel, **options: Any) -> None:
        super().__init__(slot_count, flags, **options)
        self.flags, self.stored, self.disk = flags, set[bytes](), set[bytes]()

    def carry_out(self) -> None:
        if self.holdings.owes:
            self.holdings.settle()
        while self.holdings.changes:
            change = self.holdings.changes.popleft()
            if isinstance(change, Publication) and not self.flags.publish(change):
                change.request.final = True
            elif isinstance(change, Broken) and self.stored:
                self.ask_store(change.request)
        self.holdings.room = holdings.RUNS

    def arrives(
        self, key: Key, groups: Groups, hashes: bytes, blocks: range, *options: Any, room: int | None = None
    ) -> Request:
        """Hint such a prompt, with `options` of `hint` behind it."""
        room = self.blocks.slot_count - self.blocks.quarantined if room is None else room
        prompt = Prompt(groups, hashes, blocks, room=room, staged=self.blocks.holds)
        return self.hint(key, prompt, *options)

    def ask_store(self, request: Request) -> None:
        """Let the request's prompt ask what it wants to know, and choose."""
        while names := request.prompt.next(5):
            request.prompt.found(
                bytes(each in self.stored for each in names), bytes(each in self.disk for each in names)
            )
        self.choose(request)

    choose, absent, fetched, overdue, give_up = map(_pulled, ("choose", "absent", "fetched", "overdue", "give_up"))
    next_order, reset, _finish, stop, drop = map(_pulled, ("next_order", "reset", "finish", "stop", "drop"))

    def finish(self, key: Key, *loaded: range) -> Request | None:
        """The request ends; the engine loaded these blocks of its prompt."""
        request = self.requests.get(key)
        mine = [] if request is None else [part for some in loaded for part in request.prompt.loaded(some)]
        ended: Request | None = self._finish(key, *mine)
        return ended

    def hinted(
        self,
        key: Key,
        hashes: bytes,
        size: int = 8,
        *,
        local: int = 0,
        priority: int = 0,
        at_ns: int = 0,
        until_ns: int = 0,
    ) -> Request:
        """A request of one KV group arrives, or is announced; its digests have `size` bytes."""
        blocks, announced = range(local, len(hashes) // size), AnnounceTimes(0, until_ns) if until_ns else None
        return self.arrives(key, ONE_GROUP, hashes, blocks, priority, at_ns, announced, room=0)

    def looked_up(self, key: Key, found: int, on_disk: bytes = b"") -> None:
        """The store says how many blocks it has, and which of those behind the local ones lie on a disk."""
        request = self.requests.get(key)
        if request is None or request.final:
            return
        found -= request.prompt.local_blocks
        if request.limit >= 0:  # a later look-up, of what waits for its fetch
            self.absent(request, max(found, request.issued))
            return
        at = request.issued
        while names := request.prompt.next(1000):
            blocks = list[int]()
            for name in names:
                while request.digest(at) != name:
                    at += 1
                blocks.append(at)
                at += 1
            lies = bytes(block < len(on_disk) and on_disk[block] for block in blocks)
            request.prompt.found(bytes(block < found for block in blocks), lies)
        self.choose(request)


def planned(slots: int, chunk: int, lost: Set[int] = frozenset()) -> tuple[Planner, FlagsModel]:
    """Return a planner of so many slots with orders of up to `chunk` blocks, and its flags."""
    flags = FlagsModel()
    return Planner(slots, flags, chunk_blocks=chunk, quarantined=lost), flags


ONE_GROUP = Groups((Group(Kind.FULL, 1),), 1)
SHAPES = [
    Groups((Group(Kind.WINDOW, 2, 5), Group(Kind.FULL, 2)), 2),
    Groups((Group(Kind.FULL, 2), Group(Kind.WINDOW, 4, 7), Group(Kind.STATE, 4)), 2),
    Groups((Group(Kind.CHUNK, 2, 8), Group(Kind.FULL, 4)), 1),
]


def request_of(number: int, names: Sequence[int]) -> Request:
    """Return a request for these blocks, which no planner has."""
    hashes = b"".join(name.to_bytes(8, "big") for name in names)
    prompt = Prompt(ONE_GROUP, hashes, range(len(names)), room=0, staged=lambda _: False)
    return Request((number, 1), prompt, 0, number, prompt.names)


def digests(*names: str) -> bytes:
    return b"".join(name.encode().ljust(8, b".") for name in names)


def block(name: str) -> bytes:
    """Return the daemon's name of the block."""
    return digests(name) + b"\0"


def shown(name: bytes) -> str:
    return name[:-1].decode().rstrip(".")


def whole(names: Sequence[str]) -> Prompt:
    """Return a prompt of several KV groups."""
    groups = Groups((Group(Kind.FULL, 1), Group(Kind.STATE, 1)), 1)
    return Prompt(groups, digests(*names), range(len(names)), room=99, staged=lambda _: False)


def hint(planner: Planner, number: int, *names: str, local: int = 0, priority: int = 0, at_ns: int = 0) -> Key:
    return planner.hinted((number, 1), digests(*names), local=local, priority=priority, at_ns=at_ns).key


def hit(planner: Planner, number: int, *names: str, disk: bytes = b"", local: int = 0, priority: int = 0) -> Key:
    """Push a hint for blocks that the store has; `disk` says for each from `local` on whether it lies on disk."""
    key = hint(planner, number, *names, local=local, priority=priority)
    planner.looked_up(key, len(names), disk)
    return key


def announced(planner: Planner, number: int, *names: str, disk: bytes = b"", until_ns: int = 1 << 62) -> Key:
    """Announce a prompt whose blocks the store has."""
    key = planner.hinted((-1, number), digests(*names), until_ns=until_ns).key
    planner.looked_up(key, len(names), disk)
    return key


def ordered(planner: Planner, lane: Lane = Lane.MEMORY, most: int | None = None) -> Order:
    order = planner.next_order(lane, most)
    assert order is not None
    return order


def returned(planner: Planner, order: Order, *, ok: bool = True, now_ns: int = 1) -> None:
    """Let the order's store call end, with all blocks or none."""
    planner.fetched(order.number, [ok] * len(order.slots), now_ns)


def run(
    planner: Planner, *, fail: frozenset[str] = frozenset(), lanes: Sequence[Lane] = tuple(Lane)
) -> list[list[str]]:
    """Carry out all orders, and return the block names of each."""
    done: list[list[str]] = []
    for lane in lanes:
        while (order := planner.next_order(lane)) is not None:
            names = [shown(name) for name in order.digests]
            planner.fetched(order.number, [name not in fail for name in names], 1)
            done.append(names)
    return done
