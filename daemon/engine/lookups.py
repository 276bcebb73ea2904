"""The look-ups of one engine: what to ask the store, for which requests first, and what needs no question.

Pure.  One batch is out at a time.  It asks for as many requests as wait then, those that the scheduler asked for first,
so that a thousand hints make a few calls.  A store that does not answer makes every waiting request a miss at once.

A hit that waits longer than half a lease for its fetch is asked for again, which renews the lease: in parts, the most
urgent request's first.  Batches of renewals take turns with batches of new requests, so that neither waits for all of
the other, and ask for no medium, which would cost seven times as much.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..planning.negative import NegativeCache
from ..planning.requests import Key, Request, Urgency
from .transfers import Found

BATCH_DIGESTS = 1024  # of one store call, about a millisecond; of a part that is renewed
RENEWED_AT_ONCE = 2 * BATCH_DIGESTS  # at least; new requests wait 3 ms for them
RENEWED_PER_TICK = 16384  # digests: bounds what renewal costs, a tenth of a core


class Question(NamedTuple):
    """Digests of the request's blocks from `start` on."""

    request: Request
    start: int
    digests: Sequence[bytes]


class Batch(NamedTuple):
    """Questions for one store call. `renewal`: the store had all these blocks before."""

    number: int
    questions: Sequence[Question]
    renewal: bool
    asked_ns: int


class Answer(NamedTuple):
    """The store, or staging, has a request's blocks up to `blocks`.

    `renewal`: a later answer, which says what is left.  `unavailable`: the store could not say.  For a whole request
    `present` and `on_disk` have a byte for each block that it asked for.
    """

    request: Request
    blocks: int
    on_disk: bytes = b""
    unavailable: bool = False
    renewal: bool = False
    present: bytes = b""


class LookUps:
    """Questions from a hint to its answer. The caller applies the answers in the order of the list."""

    def __init__(
        self, requests: Mapping[Key, Request], negative: NegativeCache, *, timeout_ns: int, lease_ns: int
    ) -> None:
        self._requests, self._negative = requests, negative
        self._timeout_ns, self._renew_ns = timeout_ns, lease_ns // 2
        self._waiting: dict[Key, tuple[int, Question]] = {}  # since when
        self._queue: list[tuple[Urgency, Key]] = []
        self._renewals: list[tuple[int, int, int, Key]] = []  # when due, number of the request, first block of the part
        self._renewing: list[tuple[Urgency, int, Key]] = []  # due parts
        self._room = RENEWED_PER_TICK  # digests
        self._new_before = 0  # digests of the last batch, if it was of new requests: then renewals have their turn
        self._flight: Batch | None = None
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting) + (len(self._flight.questions) if self._flight is not None else 0)

    @property
    def queued(self) -> int:
        """Entries of the queue: outdated ones of requests that were asked for count too."""
        return len(self._queue)

    def add(
        self, request: Request, now_ns: int, *, answering: bool, wanted: Sequence[bytes] | None = None
    ) -> Answer | None:
        """Take a new request, a whole one with all that it may want; return its answer if that needs no question."""
        digests = request.digests(request.issued, request.blocks) if wanted is None else wanted
        if not digests:
            self._renew_later(request, request.blocks, now_ns)
            return Answer(request, request.issued)
        if not answering:
            return Answer(request, request.issued, unavailable=True)
        known = self._negative.first(digests, now_ns)
        if known == 0:
            return Answer(request, request.issued)
        self._waiting[request.key] = (
            now_ns,
            Question(request, request.issued, digests[: known if wanted is None else None]),
        )
        heapq.heappush(self._queue, (request.urgency, request.key))
        return None

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
            if questions := self._due(now_ns) if renewal else self._new():
                self._new_before = 0 if renewal else sum(len(question.digests) for question in questions)
                self._number += 1
                self._flight = Batch(self._number, questions, renewal, now_ns)
                return self._flight
        return None

    def _new(self) -> list[Question]:
        questions: list[Question] = []
        room = BATCH_DIGESTS
        while self._queue and room > 0:
            _, key = heapq.heappop(self._queue)
            if (waiting := self._waiting.pop(key, None)) is not None and self._lives(waiting[1].request):
                questions.append(waiting[1])
                room -= len(waiting[1].digests)
        return questions

    def _due(self, now_ns: int) -> list[Question]:
        """Ask for parts that are due, the most urgent request's first; each is due again half a lease later.

        As many digests as the batch before this one, which take a fifth of its time, or RENEWED_AT_ONCE.
        """
        questions: list[Question] = []
        room = min(max(RENEWED_AT_ONCE, self._new_before), self._room)
        while self._renewing and room > 0:
            (_, _, number), part, key = heapq.heappop(self._renewing)
            heapq.heappush(self._renewals, (now_ns + self._renew_ns, number, part, key))
            request = self._requests.get(key)
            if request is not None and request.sequence == number and (blocks := _left(request, part)):
                questions.append(Question(request, blocks.start, request.digests(blocks.start, blocks.stop)))
                room -= len(blocks)
                self._room -= len(blocks)
        return questions

    def answered(self, number: int, found: Sequence[Found] | None, now_ns: int) -> list[Answer]:
        """Take what was found for each question of a batch; None: the store cannot say."""
        if self._flight is None or number != self._flight.number:
            return []  # given up before
        batch, self._flight = self._flight, None
        if found is None:
            return [] if batch.renewal else self._give_up(batch.questions, now_ns)
        answers = []
        for question, (run, on_disk, present) in zip(batch.questions, found, strict=True):
            shorter = run < len(question.digests)
            if shorter:
                self._negative.add(question.digests[run], now_ns, asked_ns=batch.asked_ns)
            request = question.request
            if not self._lives(request):
                continue
            before, blocks = question.start - request.local, question.start + run
            if request.whole:
                answers += self._whole(batch, question, Found(run, on_disk, present), now_ns)
            elif not batch.renewal:
                where = request.on_disk[:before].ljust(before, b"\0") + on_disk
                answers.append(Answer(request, blocks, where))
                self._renew_later(request, max(blocks, request.limit), batch.asked_ns)
            elif shorter:
                answers.append(Answer(request, blocks, request.on_disk, renewal=True))
        return answers

    def _whole(self, batch: Batch, question: Question, found: Found, now_ns: int) -> list[Answer]:
        """Answer a whole request; it may want other blocks by now than those that were asked for again."""
        request, digests, run = question.request, question.digests, question.start + found.run
        if not batch.renewal:
            present = bytearray(found.present.ljust(len(digests), b"\0"))
            for index in self._negative.lasting(digests, now_ns):
                present[index] = 0
            self._renew_later(request, len(digests), batch.asked_ns)
            return [Answer(request, 0, found.on_disk, present=bytes(present))]
        lost = found.run < len(digests) and run < request.limit and request.digest(run) == digests[found.run]
        return [Answer(request, run, request.on_disk, renewal=True)] if lost else []

    def give_up(self, now_ns: int) -> list[Answer]:
        """Answer every waiting request, since the store does not; those of a batch that is out wait for its end.

        Renewals wait for the store.
        """
        if self._flight is not None:
            return []
        questions = [question for _, question in self._waiting.values()]
        self._waiting.clear()
        self._queue.clear()
        return self._give_up(questions, now_ns)

    def tick(self, now_ns: int) -> list[Answer]:
        """Answer requests that waited too long; collect the leases to renew."""
        late = [key for key, (since, _) in self._waiting.items() if now_ns - since >= self._timeout_ns]
        answers = self._give_up([self._waiting.pop(key)[1] for key in late], now_ns)
        self._room = RENEWED_PER_TICK
        while self._renewals and self._renewals[0][0] <= now_ns:
            _, number, part, key = heapq.heappop(self._renewals)
            request = self._requests.get(key)
            if request is None or request.sequence != number:
                continue
            if _left(request, part):
                heapq.heappush(self._renewing, (request.urgency, part, key))
            else:
                heapq.heappush(self._renewals, (now_ns + self._renew_ns, number, part, key))
        return answers

    def _renew_later(self, request: Request, limit: int, asked_ns: int) -> None:
        """Schedule renewals of blocks [local, limit), part by part, again and again until the request ends.

        If its staged blocks are taken back, it fetches them again and needs the lease.
        """
        for part in range(request.local, limit, BATCH_DIGESTS):
            heapq.heappush(self._renewals, (asked_ns + self._renew_ns, request.sequence, part, request.key))

    def _give_up(self, questions: Sequence[Question], now_ns: int) -> list[Answer]:
        """Answer with the blocks that are staged already. Hits stay hits as long as they are not renewed."""
        answers = []
        for question in questions:
            request = question.request
            if self._lives(request):
                answers.append(Answer(request, request.issued, unavailable=True))
                self._renew_later(request, max(request.issued, request.limit), now_ns)
        return answers

    def _lives(self, request: Request) -> bool:
        """Whether it has not ended. A faulty engine may have hinted another request under its key."""
        return self._requests.get(request.key) is request


def _left(request: Request, part: int) -> range:
    """Return the blocks of a part that wait for their fetch."""
    if not request.wants_work:
        return range(0)
    return range(max(part, request.issued), min(part + BATCH_DIGESTS, request.limit))
