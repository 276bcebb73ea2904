"""The look-ups of one engine: what to ask the store, for which requests first, and what needs no question.

Pure.  One batch is out at a time.  It asks for as many requests as wait then, those that the scheduler asked for first,
so that a thousand hints make a few calls.  No call grows with a prompt: a request asks slice by slice, in its place of
the queue, and no further than its first absent block.  A store that does not answer makes every waiting request a miss
in a few events.

A hit that waits longer than half a lease for its fetch is asked for again, which renews the lease: in parts, the most
urgent request's first.  Batches of renewals take turns with batches of new requests, so that neither waits for all of
the other, and ask for no medium, which would cost seven times as much.  When there is neither, a prompt that no request
wants yet is asked for, part by part, so that its leases are kept.
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


class Question(NamedTuple):
    """Digests to ask for: the next ones of `asking`, or, to be renewed, those of the blocks from `start` on."""

    request: Request
    digests: Sequence[bytes]
    start: int = 0
    asking: Asking | None = None


class Batch(NamedTuple):
    """Questions for one store call. `renewal`: the store had all these blocks before, and those of `parts`."""

    questions: Sequence[Question]
    renewal: bool
    parts: Sequence[Part] = ()

    @property
    def digests(self) -> list[Sequence[bytes]]:
        return [*(question.digests for question in self.questions), *(part.names for part in self.parts)]


class Answer(NamedTuple):
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


class Absent(NamedTuple):
    """Blocks that the engine used, and that the store has no more."""

    names: Sequence[bytes]


class LookUps:
    """Questions from a hint to its answer. The caller applies the answers in order."""

    def __init__(
        self, requests: Mapping[Key, Request], bad_values: BadValues, *, timeout_ns: int, lease_ns: int, shards: int = 1
    ) -> None:
        """`shards`: of a block, at most; each has a key."""
        self._requests, self._bad_values = requests, bad_values
        self._timeout_ns, self._renew_ns = timeout_ns, lease_ns // 2
        self._most = max(1, MOST_KEYS // shards)  # digests of a question
        self._part = min(BATCH_DIGESTS, self._most)
        self._waiting: dict[Key, Asking] = {}
        self._queue: list[tuple[Urgency, Key]] = []
        self._renewals: list[tuple[int, int, int, Key]] = []  # when due, number of the request, first block of the part
        self._renewing: list[tuple[Urgency, int, Key]] = []  # due parts
        self._room = RENEWED_PER_TICK  # digests
        self._new_before = 0  # digests of the last batch, if it was of new requests: then renewals have their turn
        self._flight: Batch | None = None
        self.leases = Leases(lease_ns)

    @property
    def waiting(self) -> bool:
        """Whether a request waits for a question; not one whose question is out."""
        return bool(self._waiting) and self._flight is None

    @property
    def queued(self) -> int:
        """Entries of the queue: outdated ones of requests that were asked for count too."""
        return len(self._queue)

    def add(self, request: Request, now_ns: int, *, answering: bool, again: bool = False) -> Answer | None:
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
        heapq.heappush(self._queue, (asking.request.urgency, asking.request.key))

    def asked(self, request: Request) -> None:
        """Its urgency changed."""
        if request.key in self._waiting:
            heapq.heappush(self._queue, (request.urgency, request.key))

    def next_batch(self, now_ns: int) -> Batch | None:
        """Return the next questions for the store; None while a batch is out, or where no request waits."""
        if self._flight is not None:
            return None
        turn = self._new_before > 0
        for renewal in (turn, not turn):
            if not (self._renewing or self.leases.waiting if renewal else self._queue):
                continue
            batch = self._due(now_ns) if renewal else Batch(self._new(now_ns), renewal)
            if batch.questions or batch.parts:
                self._new_before = 0 if renewal else sum(map(len, batch.digests))
                self._flight = batch
                return batch
        return None

    def _new(self, now_ns: int) -> list[Question]:
        questions: list[Question] = []
        room = self._part
        while self._queue and room > 0:
            _, key = heapq.heappop(self._queue)
            if (asking := self._waiting.pop(key, None)) is not None and self._lives(asking.request):
                if asking.asked_ns < 0:
                    asking.asked_ns = now_ns
                else:
                    asking.names = asking.request.prompt.next(min(SLICE_DIGESTS, self._most))
                questions.append(Question(asking.request, asking.names, asking=asking))
                asking.names = ()
                room -= len(questions[-1].digests)
        return questions

    def _due(self, now_ns: int) -> Batch:
        """Ask for parts that are due, the most urgent request's first; each is due again half a lease later.

        As many digests as the batch before this one, which take a fifth of its time, or RENEWED_AT_ONCE.
        """
        questions: list[Question] = []
        room = min(max(RENEWED_AT_ONCE, self._new_before), self._room, self._most)
        while self._renewing and room > 0:
            (*_, number), part, key = heapq.heappop(self._renewing)
            heapq.heappush(self._renewals, (now_ns + self._renew_ns, number, part, key))
            request = self._requests.get(key)
            if request is not None and request.sequence == number and (blocks := self._left(request, part)):
                digests = request.digests(blocks.start, blocks.stop)
                questions.append(Question(request, digests, blocks.start))
                room -= len(blocks)
                self._room -= len(blocks)
        parts: list[Part] = []
        while (held := self.leases.next(min(room, self._part))) is not None:
            parts.append(held)
            room -= len(held.names)
            self._room -= len(held.names)
        return Batch(questions, True, parts)

    def answered(self, batch: Batch, found: Sequence[Found] | None, now_ns: int) -> list[Answer | Lost | Absent]:
        """Take what was found for each question of a batch; None: the store cannot say."""
        if batch is not self._flight:
            return []  # given up before
        self._flight = None
        answers = list[Answer | Lost | Absent]()
        rest = iter(found) if found is not None else repeat(None)
        for question, each in zip(batch.questions, rest, strict=False):
            first = -1 if each is None else each.present.find(0)
            if not self._lives(question.request):
                continue
            if each is not None:
                self.leases.asked(question.digests, each.present, now_ns)
            if question.asking is None:
                answers += self._lost(question, first) if first >= 0 else []
            elif each is None:
                answers.append(self._give_up(question.asking, now_ns))
            else:
                answers += self._found(question.asking, question.digests, each, now_ns)
        for part, each in zip(batch.parts, rest, strict=False):
            if absent := self.leases.answered(part, None if each is None else each.present):
                answers.append(Absent(absent))
        return answers

    def _found(self, asking: Asking, digests: Sequence[bytes], found: Found, now_ns: int) -> list[Answer]:
        """Answer a request with nothing left to ask; the others wait for their next slice."""
        prompt, present = asking.request.prompt, found.present
        if bad := self._bad_values.known(digests, now_ns):  # whatever the store says of them
            present = bytes(0 if index in bad else each for index, each in enumerate(present))
        prompt.found(present, found.on_disk)
        if prompt.settled:
            return [self._answer(asking, now_ns)]
        asking.since_ns = now_ns
        self._wait(asking)
        return []

    def _lost(self, question: Question, first: int) -> list[Lost]:
        """Note a block that the store has no more, if its request still wants that one."""
        request, block = question.request, question.start + first
        wanted = block < request.limit and request.digest(block) == question.digests[first]
        return [Lost(request, block)] if wanted else []

    def give_up(self, now_ns: int) -> list[Answer]:
        """Answer waiting requests, since the store does not; those of a batch that is out wait for its end.

        More of them wait for the next call than GIVE_UP_NAMES are of.  Renewals wait for the store.
        """
        if self._flight is not None:
            return []
        answers = self._give_up_of(list(self._waiting), now_ns)
        if not self._waiting:
            self._queue.clear()
        return answers

    def _give_up_of(self, keys: Sequence[Key], now_ns: int) -> list[Answer]:
        answers, names = list[Answer](), 0
        for key in keys:
            if names >= GIVE_UP_NAMES:
                break
            asking = self._waiting.pop(key)
            if self._lives(asking.request):
                names += asking.request.prompt.give_up()
                answers.append(self._answer(asking, now_ns, unavailable=True))
        return answers

    def tick(self, now_ns: int) -> list[Answer]:
        """Answer requests that waited too long; collect the leases to renew."""
        late = [key for key, asking in self._waiting.items() if now_ns - asking.since_ns >= self._timeout_ns]
        answers = self._give_up_of(late, now_ns)
        self._room = RENEWED_PER_TICK
        while self._renewals and self._renewals[0][0] <= now_ns:
            _, number, part, key = heapq.heappop(self._renewals)
            request = self._requests.get(key)
            if request is None or request.sequence != number:
                continue
            if self._left(request, part):
                heapq.heappush(self._renewing, (request.urgency, part, key))
            else:
                heapq.heappush(self._renewals, (now_ns + self._renew_ns, number, part, key))
        return answers

    def _give_up(self, asking: Asking, now_ns: int) -> Answer:
        """Answer with what is known, or staged. Hits stay hits as long as they are not renewed."""
        asking.request.prompt.give_up()
        return self._answer(asking, now_ns, unavailable=True)

    def _answer(self, asking: Asking, now_ns: int, *, unavailable: bool = False) -> Answer:
        """Answer a request, and schedule renewals of its blocks, part by part, again and again until it ends.

        The lease counts from its first slice.  Where its staged blocks are taken back, it fetches them again and needs
        the lease for them, too.
        """
        request = asking.request
        if not asking.again:
            due_ns = (now_ns if asking.asked_ns < 0 else asking.asked_ns) + self._renew_ns
            for part in range(0, request.prompt.most_blocks, self._part):
                heapq.heappush(self._renewals, (due_ns, request.sequence, part, request.key))
        return Answer(request, unavailable, asking.again)

    def _lives(self, request: Request) -> bool:
        """Whether it has not ended, and is not void. A faulty engine may have hinted another request under its key."""
        return self._requests.get(request.key) is request and not request.final

    def _left(self, request: Request, part: int) -> range:
        """Return the blocks of a part that wait for their fetch."""
        if not request.wants_work:
            return range(0)
        return range(max(part, request.issued), min(part + self._part, request.limit))
