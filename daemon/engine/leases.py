"""The list of what the store is asked for again, until when: so that it keeps leased what is wanted, and what is used.

Pure.  Mooncake evicts the values whose lease ended longest ago, and only a question or a get renews a lease.  Asked for
again are, in this order:

* every half lease, until they are fetched, the blocks of requests that wait for a fetch, the most urgent one's first;
* blocks that a request used out of the engine's own cache or of staging, which need no question, so the hottest blocks
  would go first: each at most twice a lease, however many requests use it.  The engine saves an absent one again;
* when there is nothing else, every half lease, the prompts of sessions that are likely to come back.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..planning.requests import Key, Request, Urgency
from .sessions import SETTLED_NS, Sessions

ROWS, PLACES = 1 << 16, 4  # of the table of blocks: a power of two, and 16 bytes in each place of a row
MOST_PREFIXES = 4096
MOST_NAMES = 1 << 16  # that wait to be asked for; more are asked for when they are used again
HEAD_BYTES = 8  # of a name: its key
_Keys = npt.NDArray[np.uint64]
_NEVER = -(1 << 62)
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(eq=False, slots=True)
class _Chain:
    """The names of a prompt's blocks that are to be asked for, joined. `held`: by the engine, which can save them."""

    names: bytes
    name_bytes: int
    held: bool
    asked: int = 0  # bytes of the names


class Part(NamedTuple):
    """Names for one question: of a chain, or of the blocks of a request from `start` on.

    `reset`: the number of the last reset then.
    """

    names: Sequence[bytes]
    reset: int
    chain: _Chain | None = None
    request: Request | None = None
    start: int = 0


class Leases:
    """`lease_ns`: of the store."""

    def __init__(self, lease_ns: int, requests: Mapping[Key, Request], sessions: Sessions) -> None:
        self._again_ns, self._requests, self._sessions = lease_ns // 2, requests, sessions
        # By key alone: a request that ends leaves memory at once. When each is due, and its number.
        self._due: list[tuple[int, int, Key]] = []
        self._ranked: list[tuple[Urgency, int, int, Key]] = []  # those that are due: since when, the next block
        self._kept: list[tuple[int, int, bytes]] = []  # when, the number of its request, session
        # When each block was asked for. In a full row a block takes the place of that asked for longest ago.
        self._keys, self._asked_ns = np.zeros((ROWS, PLACES), np.uint64), np.zeros((ROWS, PLACES), np.int64)
        # Until when no block of a prefix is due: its last one's name is the key. It spares a look at each block.
        self._prefixes: dict[bytes, int] = {}
        self._chains: deque[_Chain] = deque()
        self._names = 0  # of the chains that wait
        self._resets = 0
        self._out = 0  # parts that are not answered
        self._put: set[bytes] = set()  # names whose put ended since the oldest of these went out
        self.blocks = 0  # that the store was asked for

    def wait(self, request: Request, asked_ns: int) -> None:
        """Ask for what this request waits for half a lease after it was asked for, again and again until it ends."""
        heapq.heappush(self._due, (asked_ns + self._again_ns, request.sequence, request.key))
        if len(self._due) > 4 * len(self._requests) + 64:  # most are of requests that ended while nothing was asked
            self._due = sorted(each for each in self._due if self._request(*each[1:]) is not None)

    def keep(self, session: bytes, now_ns: int) -> None:
        """Ask for the prompt that this session just came with, and again until it is not likely to come any more."""
        at_ns = now_ns + min(SETTLED_NS, self._again_ns)
        heapq.heappush(self._kept, (at_ns, self._sessions.arrivals, session))
        if len(self._kept) > 4 * len(self._sessions) + 64:
            self._kept = sorted(filter(self._sessions.lives, self._kept))

    def lately(self, prefix: bytes, now_ns: int) -> bool:
        """Whether all of a prefix, by the name of its last block, was asked for within half a lease."""
        return self._prefixes.get(prefix, 0) > now_ns

    def use(
        self, names: bytes | bytearray, name_bytes: int, now_ns: int, *, prefix: bytes = b"", held: bool = True
    ) -> None:
        """Have the store asked for blocks that a request used, unless it was within half a lease.

        Names are joined; `prefix`: as in `lately`, which knows it then.  Without `held` no part of the chain is asked
        for behind its first absent block.
        """
        if name_bytes <= HEAD_BYTES or not names:
            return
        keys = _keys(names, name_bytes)
        rows = _rows(keys)
        asked_ns = np.where(self._keys[rows] == keys[:, None], self._asked_ns[rows], _NEVER).max(axis=1)
        due = np.flatnonzero(asked_ns <= now_ns - self._again_ns)
        if len(due) > (room := MOST_NAMES - self._names):
            due, prefix = due[:room], b""
        if len(due):
            self._enter(keys[due], now_ns)
            asked_ns[due] = now_ns
            chain = _Chain(np.frombuffer(names, f"V{name_bytes}")[due].tobytes(), name_bytes, held)
            self._chains.append(chain)
            self._names += len(due)
        if prefix and held:
            self._prefixes.pop(prefix, None)
            self._prefixes[prefix] = int(asked_ns.min()) + self._again_ns
            if len(self._prefixes) > MOST_PREFIXES:
                del self._prefixes[next(iter(self._prefixes))]

    def asked(self, names: Sequence[bytes], present: bytes, now_ns: int) -> None:
        """Note that the store was asked for these names, with a byte for each: 0 where it has it not."""
        if 1 in present and len(names[0]) > HEAD_BYTES:
            keys = _keys(b"".join(names), len(names[0]))
            if 0 in present:
                keys = keys[np.frombuffer(present, np.bool_)]
            self._enter(keys, now_ns)

    def _enter(self, keys: _Keys, now_ns: int) -> None:
        rows = _rows(keys)
        same, asked_ns = self._keys[rows] == keys[:, None], self._asked_ns[rows]
        places = np.where(same.any(axis=1), same.argmax(axis=1), asked_ns.argmin(axis=1))
        self._keys[rows, places], self._asked_ns[rows, places] = keys, now_ns

    def due(self, now_ns: int) -> bool:
        """Whether `next` may have something."""
        return bool(self._ranked or self._chains) or any(
            heap and heap[0][0] <= now_ns for heap in (self._due, self._kept)
        )

    def next(self, most: int, now_ns: int, *, keep: bool) -> Part | None:
        """Return up to so many names to ask for; None where there are none. `keep`: sessions' prompts, too."""
        if most <= 0 or (part := self._of_request(most, now_ns)) is not None:
            return part if most > 0 else None
        while keep and not self._chains and self._kept and self._kept[0][0] <= now_ns:
            _, number, session = heapq.heappop(self._kept)
            if (names := self._sessions.expected(session, number, now_ns)) is not None:
                heapq.heappush(self._kept, (now_ns + self._again_ns, number, session))
                self.use(*names, now_ns, held=False)
        if not self._chains:
            return None
        chain = self._chains[0]
        size, start = chain.name_bytes, chain.asked
        part = np.frombuffer(chain.names[start : start + most * size], f"V{size}").tolist()
        chain.asked += len(part) * size
        if chain.asked == len(chain.names):
            self._chains.popleft()
        self._names -= len(part)
        self._out += 1
        return Part(part, self._resets, chain)

    def _of_request(self, most: int, now_ns: int) -> Part | None:
        """Return blocks that the most urgent request waits for, of those that are due."""
        while self._due and self._due[0][0] <= now_ns:
            _, number, key = heapq.heappop(self._due)
            if (found := self._request(number, key)) is not None:
                heapq.heappush(self._ranked, (found.urgency, now_ns, 0, key))
        while self._ranked:
            urgency, since_ns, start, key = heapq.heappop(self._ranked)
            if (request := self._request(urgency[-1], key)) is not None:
                since_ns, start = since_ns if start else now_ns, max(start, request.issued)
                stop = min(start + most, request.limit) if request.wants_work else start
                if start < stop:
                    heapq.heappush(self._ranked, (urgency, since_ns, stop, key))
                    return Part(request.digests(start, stop), self._resets, request=request, start=start)
                self.wait(request, since_ns)
        return None

    def _request(self, number: int, key: Key) -> Request | None:
        """Return the request of this number, unless it has ended."""
        found = self._requests.get(key)
        return found if found is not None and found.sequence == number else None

    def put(self, names: Sequence[bytes]) -> None:
        """Note that a put of these blocks has ended: a question that went out before cannot say that they are lost."""
        if self._out:
            self._put.update(names)

    def answered(self, part: Part, present: bytes | None) -> Sequence[bytes]:
        """Take a byte for each name, or None where the store cannot say; return the names that the engine has to save.

        The caller leaves out those that are being put now.
        """
        assert part.chain is not None
        self._out -= 1
        put: Collection[bytes] = self._put
        if not self._out:
            self._put = set()
        if part.reset != self._resets:
            return ()
        if present is None:
            self._forget(part.names)
            return ()
        self.blocks += len(part.names)
        if 0 not in present:
            return ()
        if not part.chain.held:
            self._drop(part.chain)
            return ()
        return [name for name in compress(part.names, (not there for there in present)) if name not in put]

    def _forget(self, names: Sequence[bytes]) -> None:
        """These were not asked for: the next use asks."""
        self._prefixes.clear()
        keys = _keys(b"".join(names), len(names[0]))
        at, places = np.nonzero(self._keys[_rows(keys)] == keys[:, None])
        self._keys[_rows(keys)[at], places] = 0

    def _drop(self, chain: _Chain) -> None:
        if self._chains and self._chains[0] is chain:
            self._names -= (len(chain.names) - chain.asked) // chain.name_bytes
            self._chains.popleft()

    def clear(self) -> None:
        """Forget all: the names are of other weights now."""
        self._keys = np.zeros((ROWS, PLACES), np.uint64)
        self._prefixes.clear()
        self._chains.clear()
        self._kept.clear()
        self._names = 0
        self._resets += 1


def _keys(names: bytes | bytearray, name_bytes: int) -> _Keys:
    """Return a number for each of these joined names."""
    found = np.frombuffer(names, _kind(name_bytes))
    keys: _Keys = found["head"] ^ found["group"] * _MIX
    return keys


@cache
def _kind(name_bytes: int) -> np.dtype[np.void]:
    """Return the type of a name: its first bytes and its group."""
    offsets = [0, name_bytes - 1]
    return np.dtype({"names": ["head", "group"], "formats": ["<u8", "u1"], "offsets": offsets, "itemsize": name_bytes})


def _rows(keys: _Keys) -> npt.NDArray[np.int64]:
    return (keys & np.uint64(ROWS - 1)).view(np.int64)
