"""The sessions of one engine: with which prompt each is likely to come back, and when. Pure.

A request that names its session begins, as a rule, with the whole prompt of the session's last one.  The times between
requests are learnt per session, and those of the engine's other sessions count until there are enough of its own.  So
the newest prompt of a session is announced shortly before the session may come back, or earlier where staging has free
slots for it.  The store is asked for the prompt again (leases.py) until it is not likely to come any more.

What the engine's own cache still has needs no staging.  That cache forgets by what is used after it, so it is learnt
after how many blocks of later requests a session's prompt was whole there, and a prompt is announced after more.

What is known is bounded by number, bytes and age, and the session that came least lately is forgotten first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...kv.groups import Groups
from ...kv.prompts import names_of_prefix
from ...shmring.wire.admin import AnnounceStep
from ...shmring.wire.checks import MAX_AHEAD_MS

MAX_SESSIONS = 1024
MAX_BYTES = 16 << 20  # of the digests of their prompts
FORGET_NS = MAX_AHEAD_MS * 1_000_000  # after the last request
GAPS, ENGINE_GAPS = 8, 64  # the latest ones, of a session and of the engine
OWN_GAPS = 4  # that a session needs to be judged by its own alone
EARLIEST, LATEST = 0.1, 0.9  # of the gaps: the prompt is staged from the one until past the other
PARALLEL_NS = 100_000_000  # a shorter gap is none: requests of one turn
SETTLED_NS = 200_000_000  # after a request arrived: others of its turn have, too
MARGIN_NS = 600_000_000  # an idle daemon looks twice a second
UNKNOWN_NS = 60_000_000_000  # leases are kept while no gap is known
LEAST_NS = 60_000_000_000  # a session may come back for so long at least: few gaps say little of the longest
HELD_NS = 500_000_000  # between two looks at whether the engine's cache may have lost a prompt
RETRY_NS = 250_000_000  # doubles with each try
TRIES = 6  # to have all of a prompt announced
HELD_SHARE = 0.5  # of the blocks after which the engine's cache had a prompt whole


class Chain(NamedTuple):
    """A session's newest prompt: the digests of its blocks, joined, and the bytes of each."""

    hashes: bytes
    hash_bytes: int

    def blocks(self, groups: Groups) -> int:
        """Return how many blocks of all groups it lets find."""
        return groups.blocks(len(self.hashes) // self.hash_bytes)


class Due(NamedTuple):
    """A session to announce now, by the digest of its id; `request`: the number of its newest one. Times in ms."""

    session: bytes
    request: int
    expected_ms: int
    ttl_ms: int


@dataclass(eq=False, slots=True)
class _Session:
    """`number`: of its newest request, which came at `since_ns`; its announcements are open until their end is told."""

    chain: Chain
    number: int
    since_ns: int
    after: int = 0  # blocks of all requests until then
    gaps: deque[int] = field(default_factory=lambda: deque(maxlen=GAPS))
    expected_ns: int = 0
    due_ns: int = 0
    until_ns: int = 0
    tries: int = 0
    open: list[int] = field(default_factory=list)


class Sessions:
    """The sessions of an engine with these groups, by the digests of their ids."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._known: dict[bytes, _Session] = {}  # the one that came least lately first
        self._bytes = self.arrivals = 0
        self._gaps: deque[int] = deque(maxlen=ENGINE_GAPS)
        # Blocks of all requests that were not in the engine's own cache; after how many a prompt was whole there.
        self.used_blocks, self._held = 0, 0
        self.due: list[tuple[int, int, bytes]] = []  # a heap: when, number of the request, session

    def __len__(self) -> int:
        return len(self._known)

    def chain(self, session: bytes) -> Chain | None:
        """Return a session's newest prompt; None where it is not known."""
        each = self._known.get(session)
        return each.chain if each is not None else None

    def arrived(
        self, session: bytes, chain: Chain, local_blocks: int, now_ns: int, block_ns: float
    ) -> tuple[int | None, Sequence[int]]:
        """Take a session's request; `block_ns`: what fetching a block takes.

        Return how long (ns) after the one before it came, and the announcements that were open for it.
        """
        self.arrivals += 1
        self.forget_outdated(now_ns)  # so no gap is longer, nor any time that it is expected in
        before, gap_ns = self._known.pop(session, None), None
        each = before or _Session(chain, 0, now_ns)
        if before is not None:
            gap_ns = now_ns - before.since_ns
            if gap_ns >= PARALLEL_NS:
                before.gaps.append(gap_ns)
                self._gaps.append(gap_ns)
            if chain.hashes.startswith(before.chain.hashes):
                self._learn(self.used_blocks - before.after, whole=local_blocks >= before.chain.blocks(self._groups))
            self._bytes -= len(before.chain.hashes)
        outdated, each.open = each.open, []
        each.chain, each.number, each.since_ns, each.tries = chain, self.arrivals, now_ns, 0
        each.after = self.used_blocks + chain.blocks(self._groups) - local_blocks  # with its own
        self._known[session], self._bytes = each, self._bytes + len(chain.hashes)
        self._expect(session, each, block_ns)
        while len(self._known) > MAX_SESSIONS or self._bytes > MAX_BYTES:
            self._forget_first()
        return gap_ns, outdated

    def _learn(self, used: int, *, whole: bool) -> None:
        """Note whether the engine's cache had a prompt whole after so many blocks of later requests."""
        self._held = max(self._held, used) if whole else min(self._held, used)

    def _expect(self, session: bytes, each: _Session, block_ns: float) -> None:
        now_ns = each.since_ns
        if gaps := sorted(each.gaps if len(each.gaps) >= OWN_GAPS else (*each.gaps, *self._gaps)):
            earliest, latest = (gaps[round(share * (len(gaps) - 1))] for share in (EARLIEST, LATEST))
            fetch_ns = int(2 * block_ns * each.chain.blocks(self._groups))  # one small call at a time
            each.expected_ns = now_ns + earliest
            each.due_ns = max(now_ns + SETTLED_NS, each.expected_ns - fetch_ns - MARGIN_NS)
            each.until_ns = max(now_ns + LEAST_NS, now_ns + latest + latest // 2, each.due_ns + SETTLED_NS)
            self._push(now_ns + SETTLED_NS, each.number, session)
        else:
            each.until_ns = now_ns + UNKNOWN_NS

    def next_due(self, now_ns: int, free_blocks: int, number: int) -> Due | None:
        """Return a prompt to announce now, under this number.

        `free_blocks`: as many may be fetched without taking room of others.
        """
        while (found := self._pop(now_ns)) is not None:
            session, each = found
            if now_ns < each.due_ns and each.chain.blocks(self._groups) > free_blocks:
                self._push(each.due_ns, each.number, session)
                continue
            if self.used_blocks - each.after < HELD_SHARE * self._held:
                if now_ns + HELD_NS < each.until_ns:
                    self._push(now_ns + HELD_NS, each.number, session)
                continue
            each.tries += 1
            each.open.append(number)
            expected_ms = max(0, each.expected_ns - now_ns) // 1_000_000
            ttl_ms = min(FORGET_NS, max(SETTLED_NS, each.until_ns - now_ns)) // 1_000_000
            return Due(session, each.number, expected_ms, ttl_ms)
        return None

    def told(self, due: Due, now_ns: int, outcome: AnnounceStep) -> None:
        """Take what became of a session's announcement: what is not staged of it may be announced again."""
        if (each := self._known.get(due.session)) is None:
            return
        if each.number != due.request:
            return
        if outcome.last:
            each.open.remove(outcome.number)
        lacks = outcome.outcome == "completed" and outcome.absent + outcome.no_room + outcome.failed > 0
        again_ns = max(now_ns + (RETRY_NS << each.tries), each.due_ns)
        if (lacks or outcome.outcome in ("rejected", "missing")) and each.tries < TRIES and again_ns < each.until_ns:
            self._push(again_ns, each.number, due.session)

    def expected(self, session: bytes, number: int, now_ns: int) -> tuple[bytes | bytearray, int] | None:
        """Return the names in the prompt of a session's request, by its number among all, joined, and the bytes of one.

        None once another request came, or none is likely to come.
        """
        if not self.lives((0, number, session)) or now_ns >= (each := self._known[session]).until_ns:
            return None
        hashes, size = each.chain
        return names_of_prefix(self._groups, hashes, size, each.chain.blocks(self._groups)), size + 1

    def clear(self) -> None:
        """Forget all prompts: they are of other weights now."""
        self._known.clear()
        self._bytes = 0

    def _push(self, at_ns: int, number: int, session: bytes) -> None:
        heapq.heappush(self.due, (at_ns, number, session))
        if len(self.due) > 4 * MAX_SESSIONS:
            self.due = sorted(entry for entry in self.due if self.lives(entry))

    def lives(self, entry: tuple[int, int, bytes]) -> bool:
        """Whether the request of this number, between a time and its session, is still the session's newest one."""
        each = self._known.get(entry[2])
        return each is not None and each.number == entry[1]

    def _pop(self, now_ns: int) -> tuple[bytes, _Session] | None:
        """Return a session whose time has come; entries of its older requests are dropped."""
        while self.due and self.due[0][0] <= now_ns:
            entry = heapq.heappop(self.due)
            if self.lives(entry):
                return entry[2], self._known[entry[2]]
        return None

    def forget_outdated(self, now_ns: int) -> None:
        """Forget the sessions that came too long ago."""
        while self._known and now_ns - next(iter(self._known.values())).since_ns > FORGET_NS:
            self._forget_first()

    def _forget_first(self) -> None:
        each = self._known.pop(next(iter(self._known)))
        self._bytes -= len(each.chain.hashes)
