"""The look-ups of one engine: what to ask the store, for which requests first, and what needs no question.

Pure.  One batch is out at a time.  It asks for as many requests as wait then, those that the scheduler asked for first,
so that a thousand hints make a few calls.  No call grows with a prompt: a request asks slice by slice, in its place of
the queue, and no further than its first absent block.  A store that does not answer makes every waiting request a miss
in a few events.

What is asked for again, to renew its lease (leases.py), is in batches that take turns with those of new requests, so
that neither waits for all of the other.  They ask for no medium, which would cost seven times as much.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from ..planning.bad_values import BadValues
from ..planning.requests import Key, Request, Urgency
from .leases import Leases, Part
from .transfers import Found

BATCH_DIGESTS = 1024  # of one store call, about a millisecond; of a part that is renewed
FIRST_DIGESTS = 64  # of a prompt's first slice: a miss then costs little more than that of one digest
SLICE_DIGESTS = 4096  # of the later ones: a call of 10 ms, or of 35 where it asks for the medium
RENEWED_AT_ONCE = 2 * BATCH_DIGESTS  # at least; new requests wait 3 ms for them
RENEWED_PER_TICK = 16384  # digests: bounds what renewal costs, a tenth of a core
GIVE_UP_NAMES = 16384  # of requests that are answered in one event while the store does not answer: 3 to 10 ms
MOST_KEYS = 16384  # of one question: a block has a key for each of its shards


@dataclass(slots=True, eq=False)
class Asking:
    """One request's questions: the next `names` to ask for.

    `asked_ns`: when the first ones were, or -1.  `again`: the request was answered before.
    """

    request: Request
    names: Sequence[bytes]
    since_ns: int
    again: bool
    asked_ns: int = -1


class Batch(NamedTuple):
    """Questions for one store call, or `parts` of what the store had before; `digests`: of each of these."""

    questions: Sequence[Asking]
    parts: Sequence[Part]
    digests: list[Sequence[bytes]]


class LookedUp(NamedTuple):
    """The prompt of a request knows the longest prefix there is. `again`: another answer, after blocks were lost.

    `unavailable`: the store could not say.
    """

    request: Request
    unavailable: bool = False
    again: bool = False


class Lost(NamedTuple):
    """A renewal: the store has this block of a request no more."""

    request: Request
    block: int


class GoneBlocks(NamedTuple):
    """Blocks that the engine used, and that the store has no more."""

    names: Sequence[bytes]


class LookUps:
    """Questions from a hint to its answer. The caller applies the answers in order.

    While no batch is in `flight`, `next_batch` may have something for the `queue`, or for what the leases say is due.
    """

    def __init__(
        self,
        requests: Mapping[Key, Request],
        bad_values: BadValues,
        leases: Leases,
        *,
        timeout_ns: int,
        shards: int = 1,
    ) -> None:
        """`shards`: of a block, at most; each has a key."""
        self._requests, self._bad_values, self.leases = requests, bad_values, leases
        self._timeout_ns = timeout_ns
        self._most = max(1, MOST_KEYS // shards)  # digests of a question
        self._part = min(BATCH_DIGESTS, self._most)
        self._waiting: dict[Key, Asking] = {}
        self.queue: list[tuple[Urgency, Key]] = []
        self._room = RENEWED_PER_TICK  # digests
        self._new_before = 0  # digests of the last batch, if it was of new requests: then renewals have their turn
        self.flight: Batch | None = None

    @property
    def waiting(self) -> bool:
        """Whether a request waits for a question; not one whose question is out."""
        return bool(self._waiting) and self.flight is None

    def add(self, request: Request, now_ns: int, *, answering: bool, again: bool = False) -> LookedUp | None:
        """Take a new request, or one that lost chosen blocks; return its answer if that needs no question."""
        asking = Asking(request, request.prompt.next(min(FIRST_DIGESTS, self._most)), now_ns, again)
        if not asking.names:  # all is known, or staged
            return self._answer(asking, now_ns)
        if not answering:
            return self._give_up(asking, now_ns)
        self._wait(asking)
        return None

    def _wait(self, asking: Asking) -> None:
        self._waiting[asking.request.key] = asking
        heapq.heappush(self.queue, (asking.request.urgency, asking.request.key))

    def asked(self, request: Request) -> None:
        """Its urgency changed."""
        if request.key in self._waiting:
            heapq.heappush(self.queue, (request.urgency, request.key))

    def next_batch(self, now_ns: int, *, keep: bool = True) -> Batch | None:
        """Return the next questions for the store; None while a batch is out, or where there are none.

        `keep`: ask for sessions' prompts, too.
        """
        if self.flight is not None:
            return None
        turn = self._new_before > 0
        for renewal in (turn, not turn):
            questions, parts = ([], self._again(now_ns, keep)) if renewal else (self._new(now_ns), [])
            if questions or parts:
                digests = [*(asking.names for asking in questions), *(part.names for part in parts)]
                self._new_before = 0 if renewal else sum(map(len, digests))
                self.flight = Batch(questions, parts, digests)
                return self.flight
        return None

    def _new(self, now_ns: int) -> list[Asking]:
        questions: list[Asking] = []
        room = self._part
        while self.queue and room > 0:
            _, key = heapq.heappop(self.queue)
            if (asking := self._waiting.pop(key, None)) is not None and self._lives(asking.request):
                if asking.asked_ns < 0:
                    asking.asked_ns = now_ns
                else:
                    asking.names = asking.request.prompt.next(min(SLICE_DIGESTS, self._most))
                questions.append(asking)
                room -= len(asking.names)
        return questions

    def _again(self, now_ns: int, keep: bool) -> list[Part]:
        """Ask again: for as many digests as the batch before this one, which take a fifth of its time, or
        RENEWED_AT_ONCE."""
        parts, room = list[Part](), min(max(RENEWED_AT_ONCE, self._new_before), self._room, self._most)
        while (part := self.leases.next(min(room, self._part), now_ns, keep=keep)) is not None:
            parts.append(part)
            room -= len(part.names)
            self._room -= len(part.names)
        return parts

    def answered(self, batch: Batch, found: Sequence[Found] | None, now_ns: int) -> list[LookedUp | Lost | GoneBlocks]:
        """Take what was found for each question of a batch; None: the store cannot say."""
        if batch is not self.flight:
            return []  # given up before
        self.flight = None
        answers = list[LookedUp | Lost | GoneBlocks]()
        rest = iter(found) if found is not None else repeat(None)
        for asking, each in zip(batch.questions, rest, strict=False):
            if not self._lives(asking.request):
                continue
            if each is None:
                answers.append(self._give_up(asking, now_ns))
            else:
                self.leases.asked(asking.names, each.present, now_ns)
                answers += self._found(asking, each, now_ns)
        for part, each in zip(batch.parts, rest, strict=False):
            if part.request is not None:
                answers += self._lost(part.request, part, each, now_ns)
            elif absent := self.leases.answered(part, None if each is None else each.present):
                answers.append(GoneBlocks(absent))
        return answers

    def _found(self, asking: Asking, found: Found, now_ns: int) -> list[LookedUp]:
        """Answer a request with nothing left to ask; the others wait for their next slice."""
        prompt, present = asking.request.prompt, found.present
        bad = self._bad_values
        if bad.until and (bad_ones := bad.known(asking.names, now_ns)):  # whatever the store says of them
            present = bytes(0 if index in bad_ones else each for index, each in enumerate(present))
        prompt.found(present, found.on_disk)
        if prompt.settled:
            return [self._answer(asking, now_ns)]
        asking.since_ns, asking.names = now_ns, ()
        self._wait(asking)
        return []

    def _lost(self, request: Request, part: Part, found: Found | None, now_ns: int) -> list[Lost]:
        """Note a block that the store has no more, if its request still wants that one."""
        if found is None or not self._lives(request):
            return []
        self.leases.asked(part.names, found.present, now_ns)
        first = found.present.find(0)
        block = part.start + first
        wanted = first >= 0 and block < request.limit and request.digest(block) == part.names[first]
        return [Lost(request, block)] if wanted else []

    def give_up(self, now_ns: int) -> list[LookedUp]:
        """Answer waiting requests, since the store does not; those of a batch that is out wait for its end.

        More of them wait for the next call than GIVE_UP_NAMES are of.  Renewals wait for the store.
        """
        if self.flight is not None:
            return []
        answers = self._give_up_of(list(self._waiting), now_ns)
        if not self._waiting:
            self.queue.clear()
        return answers

    def _give_up_of(self, keys: Sequence[Key], now_ns: int) -> list[LookedUp]:
        answers, names = list[LookedUp](), 0
        for key in keys:
            if names >= GIVE_UP_NAMES:
                break
            asking = self._waiting.pop(key)
            if self._lives(asking.request):
                names += asking.request.prompt.give_up()
                answers.append(self._answer(asking, now_ns, unavailable=True))
        return answers

    def tick(self, now_ns: int) -> list[LookedUp]:
        """Answer requests that waited too long."""
        self._room = RENEWED_PER_TICK
        late = [key for key, asking in self._waiting.items() if now_ns - asking.since_ns >= self._timeout_ns]
        return self._give_up_of(late, now_ns) if late else []

    def _give_up(self, asking: Asking, now_ns: int) -> LookedUp:
        """Answer with what is known, or staged. Hits stay hits as long as they are not renewed."""
        asking.request.prompt.give_up()
        return self._answer(asking, now_ns, unavailable=True)

    def _answer(self, asking: Asking, now_ns: int, *, unavailable: bool = False) -> LookedUp:
        """Answer a request, and ask for its blocks again until it ends.

        The lease counts from its first slice.  Where its staged blocks are taken back, it fetches them again and needs
        the lease for them, too.
        """
        if not asking.again:
            self.leases.wait(asking.request, now_ns if asking.asked_ns < 0 else asking.asked_ns)
        return LookedUp(asking.request, unavailable, asking.again)

    def _lives(self, request: Request) -> bool:
        """Whether it has not ended, and is not void. A faulty engine may have hinted another request under its key."""
        return self._requests.get(request.key) is request and not request.final
