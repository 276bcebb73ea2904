"""The announcements of one engine: prompts to stage before a request asks for them.

Pure.  Each announced prompt becomes a request of the planner, less urgent than any hint, and takes a hint's way through
look-ups and fetches.  It ends once its blocks are staged, and then no request holds them: the next hint finds them.  A
hinted request may take their room at any time, a later announcement only after the first one's time is over.

What is announced and not asked for yet may have as many blocks as staging has slots, and an eighth of that while most
of what was fetched for announcements was in vain.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

from ...kv.groups import Groups
from ...shmring._atomics import repeats
from ...shmring.wire.admin import Announce, AnnounceStep
from ..planning.requests import AnnounceTimes, Failure, Key, Request
from ..telemetry.trace import Met

FLAG = -1  # of every announced request: no engine reads one
AT_WORK = 16  # prompts at a time
MAX_WAITING = 256  # announcements that are not done
MAX_KNOWN = 1024  # with those that are done and wait for their request
MAX_BYTES = 16 << 20  # of the digests of announcements that wait
JUDGED = 64  # announcements that fetched, the latest: whether announcing is of use
ENOUGH = 16  # of these, before it is judged
VAIN_SHARE = 8  # the part of the room that is left to an engine whose announcements are mostly in vain


class Wanted(NamedTuple):
    """A prompt to hint under this key: so many blocks, and their digests, joined."""

    key: Key
    blocks: int
    hashes: bytes
    priority: int
    due_ns: int
    announced: AnnounceTimes


@dataclass(eq=False)
class _Announcement:
    """One announcement. `planned`: blocks that it may stage; `found`: of these, the leading ones that there are.

    `hashes`: its digests, joined, until it is planned; `last`: those of its last block, and the one before.
    """

    order: Announce
    hashes: bytes
    last: bytes
    announced: AnnounceTimes
    blocks: int
    done: bool = False  # it waits for its request
    planned: int = 0
    found: int = 0
    staged: int = 0
    fetched: int = 0
    no_room: int = 0
    failed: int = 0
    looked_up: bool = False

    @property
    def due_ns(self) -> int:
        return self.announced.since_ns + self.order.expected_ms * 1_000_000

    @property
    def size(self) -> int:
        return self.order.hashes * self.order.hash_bytes

    def ends_with(self, digest: bytes, beyond: int) -> bool:
        """Whether this is its digest before the last `beyond` bytes."""
        stop = len(self.last) - beyond
        return self.last[stop - len(digest) : stop] == digest

    @property
    def takes(self) -> int:
        """Return how many blocks it takes of the room: prompts share most of what is staged already."""
        if self.done:
            return self.fetched
        return self.found - self.staged if self.looked_up else self.planned

    def outcome(self, outcome: str, reason: str = "") -> AnnounceStep:
        return AnnounceStep.model_validate(
            {
                "number": self.order.number,
                "outcome": outcome,
                "reason": reason,
                "announced": self.blocks,
                "staged": self.staged,
                "started": self.found - self.staged,
                "absent": self.planned - self.found if self.looked_up else 0,
                "fetched": self.fetched,
                "no_room": self.no_room,
                "failed": self.failed,
            }
        )


class Ahead:
    """The announcements of one engine, by a number that the caller gives.

    `room`: blocks that may be staged ahead.
    """

    def __init__(self, groups: Groups, room: int) -> None:
        self._groups, self._room, self._partial = groups, room, groups.partial
        self._block_hashes = groups.unit_tokens // groups.hash_tokens
        self.known: dict[int, _Announcement] = {}  # the oldest first
        self._lengths: defaultdict[int, set[int]] = defaultdict(set)  # their numbers by the bytes of their digests
        self.waiting: list[tuple[int, int, int]] = []  # (priority, due_ns, number), the most urgent first
        self._at_work: dict[Key, int] = {}
        self.outcomes = deque[tuple[int, AnnounceStep]]()  # what became of announcements, by number, for their callers
        self._useful: deque[bool] = deque(maxlen=JUDGED)
        self._keys = 0

    @property
    def blocks(self) -> int:
        """Return how many blocks announcements fetch, or have fetched, and no request asked for yet."""
        return sum(each.takes for each in self.known.values())

    @property
    def count(self) -> int:
        """Return how many announcements have no request yet."""
        return len(self.known)

    def add(self, number: int, order: Announce, hashes: bytes, now_ns: int) -> None:
        """Take an announcement, which may wait for others. `hashes`: `order.hashes` digests of its prompt, joined."""
        announced = AnnounceTimes(now_ns, now_ns + order.ttl_ms * 1_000_000)
        last = hashes[-(self._block_hashes + 1) * order.hash_bytes :]
        new = _Announcement(order, hashes, last, announced, self._groups.blocks(order.hashes))
        self.known[number] = new
        self._lengths[new.size].add(number)
        waiting = [each for each in self.known.values() if not each.done]
        size = sum(len(each.hashes) for each in waiting)
        if not new.blocks:
            self._over(number, "rejected", f"the prompt has no whole block: hashes={order.hashes}")
        elif not self._partial and new.blocks > (most := min(order.most_blocks, self._room)):
            text = f"an engine with several KV groups stages whole prompts: blocks={new.blocks} max={most}"
            self._over(number, "rejected", text)
        elif len(waiting) > MAX_WAITING:
            self._over(number, "rejected", f"too many announcements wait for this engine: max={MAX_WAITING}")
        elif size > MAX_BYTES:
            text = f"too many digests wait for this engine: bytes={size} max={MAX_BYTES}"
            self._over(number, "rejected", text)
        elif repeats(hashes, order.hash_bytes):
            self._over(number, "rejected", f"it names a digest twice, as no prompt does: hashes={order.hashes}")
        else:
            heapq.heappush(self.waiting, (order.priority, new.due_ns, number))
            if len(self.known) > MAX_KNOWN:
                done = next(key for key, each in self.known.items() if each.done)
                self._over(done, "expired", "forgotten for newer announcements")

    def next_wanted(self, now_ns: int) -> Wanted | None:
        """Return the most urgent prompt to hint; None while enough are at work."""
        if not self.waiting or len(self._at_work) >= AT_WORK:
            return None
        free = self._room_now() - self.blocks  # one that waits takes nothing
        while self.waiting:
            number = self.waiting[0][2]
            if (each := self.known.get(number)) is None:
                heapq.heappop(self.waiting)
                continue
            wanted = min(each.blocks, each.order.most_blocks)
            if free < wanted and self._asking:
                return None  # until the store said what is there already
            heapq.heappop(self.waiting)
            if free <= 0 or (free < wanted and not self._partial):
                text = "no room until other announcements have their requests, or their time is over"
                self._over(number, "rejected", f"{text}: blocks={wanted} left={max(0, free)}")
                continue
            self._keys += 1
            self._at_work[FLAG, self._keys] = number
            each.planned = min(wanted, free)
            hashes, each.hashes = each.hashes[: self._groups.digests(each.planned) * each.order.hash_bytes], b""
            announced = AnnounceTimes(now_ns, each.announced.until_ns)
            return Wanted((FLAG, self._keys), each.planned, hashes, each.order.priority, each.due_ns, announced)
        return None

    @property
    def _asking(self) -> bool:
        at_work = (self.known.get(number) for number in self._at_work.values())
        return any(each is not None and not each.looked_up for each in at_work)

    def _room_now(self) -> int:
        if len(self._useful) >= ENOUGH and 2 * sum(self._useful) < len(self._useful):
            return max(1, self._room // VAIN_SHARE)
        return self._room

    def looked_up(self, request: Request, blocks: int, *, unavailable: bool) -> None:
        """The store has so many leading blocks of it; `unavailable`: it did not say."""
        if (number := self._at_work.get(request.key)) is None or (each := self.known.get(number)) is None:
            return
        if unavailable:
            self._over(number, "rejected", "the store does not answer")
            return
        each.looked_up, each.found = True, blocks
        each.staged = min(blocks, request.prompt.in_blocks(request.issued))
        if not blocks:
            self._over(number, "missing")
        else:
            clipped = each.planned < each.blocks
            bound = f"blocks={each.blocks} max={each.planned}" if clipped else ""
            self.outcomes.append((number, each.outcome("clipped" if clipped else "accepted", bound)))

    def ended(self, request: Request) -> None:
        """Its blocks are staged, as far as they came."""
        if (number := self._at_work.pop(request.key, None)) is None or (each := self.known.get(number)) is None:
            return
        ready = request.prompt.in_blocks(request.ready)
        left = each.found - ready
        if request.failure in (None, Failure("no_room")):
            each.no_room = left
        else:
            each.failed = left
        each.fetched = min(ready, request.prompt.in_blocks(request.fetched_blocks))
        each.staged = ready - each.fetched  # others fetched blocks of it meanwhile
        each.done = True
        self.outcomes.append((number, each.outcome("completed")))

    def arrived(self, hashes: bytes, hash_bytes: int, local_blocks: int = 0) -> Met | None:
        """A request with these digests, joined, was hinted: return the longest announcement that it had.

        Of what the engine's own cache has, announcing was of no use.
        A prompt may be announced with its last token's block, which no request loads.
        """
        found: Met | None = None
        for length, known in list(self._lengths.items()):
            stop = min(length, len(hashes))
            if length - stop > self._block_hashes * hash_bytes or stop < hash_bytes:
                continue
            last = hashes[stop - hash_bytes : stop]
            for number in [each for each in known if self.known[each].ends_with(last, length - stop)]:
                each = self.known[number]
                if found is None or each.blocks > found.blocks:
                    found = Met(each.announced.since_ns, each.blocks)
                self._over(number, "used" if each.done else "late", useful=each.blocks > local_blocks)
        return found

    def expire(self, number: int) -> None:
        """No request will come for this announcement: its time is over."""
        if (each := self.known.get(number)) is not None:
            each.announced = each.announced._replace(until_ns=0)

    def expired(self, now_ns: int) -> list[Key]:
        """End the announcements whose time is over; return the requests without one: they are to be stopped."""
        for number in [number for number, each in self.known.items() if now_ns >= each.announced.until_ns]:
            self._over(number, "expired")
        return [key for key, number in self._at_work.items() if number not in self.known]

    def stop(self, why: str) -> None:
        """Refuse all of it."""
        for number in list(self.known):
            self._over(number, "rejected", why)

    def reset(self) -> None:
        """Refuse all of it, as its blocks are void: the planner ends the requests, too, and nothing says so."""
        self.stop("its weights changed")
        self._at_work.clear()

    def _over(self, number: int, outcome: str, reason: str = "", *, useful: bool = False) -> None:
        each = self.known.pop(number)
        self._lengths[each.size].discard(number)
        if not self._lengths[each.size]:
            del self._lengths[each.size]
        if each.fetched and outcome in ("used", "late", "expired"):
            self._useful.append(useful)
        self.outcomes.append((number, each.outcome(outcome, reason)))
