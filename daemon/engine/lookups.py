"""The look-ups of one engine: what to ask the store, for which requests first, and what needs no question.

Pure.  One question to the store is out at a time.  It asks for as many requests as wait then, those that the scheduler
asked for first, so that a thousand hints make a few questions.  A store that does not answer makes every waiting
request a miss at once.  A hit that waits long for its fetch is asked for again, which renews its lease in the store.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..planning.negative import NegativeCache
from ..planning.requests import Key, Request, Urgency

BATCH_DIGESTS = 1024  # of one store call, about a millisecond
RENEWED_PER_TICK = 2048  # digests: bounds what renewal costs, a few per cent of a core


class Question(NamedTuple):
    """Digests of the request's blocks from `start` on. `renewal`: the store had them before."""

    request: Request
    start: int
    digests: Sequence[bytes]
    renewal: bool = False


class Batch(NamedTuple):
    """Questions for one store call."""

    number: int
    questions: Sequence[Question]


class Answer(NamedTuple):
    """The store, or staging, has a request's blocks up to `blocks`.

    `renewal`: a later answer, which says what is left.  `unavailable`: the store could not say.
    """

    request: Request
    blocks: int
    on_disk: bytes = b""
    unavailable: bool = False
    renewal: bool = False


class LookUps:
    """Questions from a hint to its answer. The caller applies the answers in the order of the list."""

    def __init__(
        self, requests: Mapping[Key, Request], negative: NegativeCache, *, timeout_ns: int, lease_ns: int
    ) -> None:
        self._requests, self._negative = requests, negative
        self._timeout_ns, self._renew_ns = timeout_ns, lease_ns // 2
        self._waiting: dict[Key, tuple[int, Question]] = {}  # since when
        self._queue: list[tuple[Urgency, Key]] = []
        self._renewals: deque[tuple[int, Key, int]] = deque()  # when due, and the number of the request
        self._renewing: deque[Question] = deque()
        self._flight: Sequence[Question] = ()
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._flight)

    @property
    def queued(self) -> int:
        """Entries of the queue: outdated ones of requests that were asked for count too."""
        return len(self._queue)

    def add(self, request: Request, now_ns: int, *, answering: bool) -> Answer | None:
        """Take a new request; return its answer if that needs no question."""
        if request.issued == request.blocks:
            self._renew_later(request, request.blocks, now_ns)
            return Answer(request, request.issued)
        if not answering:
            return Answer(request, request.issued, unavailable=True)
        digests = request.digests(request.issued, request.blocks)
        known = self._negative.first(digests, now_ns)
        if known == 0:
            return Answer(request, request.issued)
        self._waiting[request.key] = (now_ns, Question(request, request.issued, digests[:known]))
        heapq.heappush(self._queue, (request.urgency, request.key))
        return None

    def asked(self, request: Request) -> None:
        """Its urgency changed."""
        if request.key in self._waiting:
            heapq.heappush(self._queue, (request.urgency, request.key))

    def next_batch(self) -> Batch | None:
        """Return the next questions for the store; None while a batch is out, or where no request waits."""
        if self._flight:
            return None
        batch: list[Question] = []
        room = BATCH_DIGESTS
        while self._queue and room > 0:
            _, key = heapq.heappop(self._queue)
            if (waiting := self._waiting.pop(key, None)) is not None and self._lives(waiting[1].request):
                batch.append(waiting[1])
                room -= len(waiting[1].digests)
        while self._renewing and room > 0:
            batch.append(self._renewing.popleft())
            room -= len(batch[-1].digests)
        if not batch:
            return None
        self._flight = batch
        self._number += 1
        return Batch(self._number, batch)

    def answered(self, number: int, found: Sequence[tuple[int, bytes]] | None, now_ns: int) -> list[Answer]:
        """Take (run, on_disk) of each question of a batch; None: the store cannot say."""
        if number != self._number or not self._flight:
            return []  # given up before
        batch, self._flight = self._flight, ()
        if found is None:
            return self._give_up(batch, now_ns)
        answers = []
        for question, (run, on_disk) in zip(batch, found, strict=True):
            if run < len(question.digests):
                self._negative.add(question.digests[run], now_ns)
            request = question.request
            if not self._lives(request):
                continue
            before, blocks = question.start - request.local, question.start + run
            where = request.on_disk[:before].ljust(before, b"\0") + on_disk
            answers.append(Answer(request, blocks, where, renewal=question.renewal))
            self._renew_later(request, max(blocks, request.limit), now_ns)
        return answers

    def give_up(self, now_ns: int) -> list[Answer]:
        """Answer every waiting request, since the store does not; those of a batch that is out wait for its end."""
        if self._flight or not (self._waiting or self._renewing):
            return []
        questions = [*(question for _, question in self._waiting.values()), *self._renewing]
        self._waiting.clear()
        self._queue.clear()
        self._renewing.clear()
        return self._give_up(questions, now_ns)

    def tick(self, now_ns: int) -> list[Answer]:
        """Answer requests that waited too long; collect the leases to renew."""
        late = [key for key, (since, _) in self._waiting.items() if now_ns - since >= self._timeout_ns]
        answers = self._give_up([self._waiting.pop(key)[1] for key in late], now_ns)
        room = RENEWED_PER_TICK
        while self._renewals and self._renewals[0][0] <= now_ns and room > 0:
            _, key, number = self._renewals.popleft()
            request = self._requests.get(key)
            if request is None or request.sequence != number:
                continue
            if request.wants_work:
                digests = request.digests(request.issued, request.limit)
                self._renewing.append(Question(request, request.issued, digests, renewal=True))
                room -= len(digests)
            else:
                self._renew_later(request, request.limit, now_ns)
        return answers

    def _renew_later(self, request: Request, limit: int, now_ns: int) -> None:
        """Schedule another renewal, until the request ends.

        If its staged blocks are taken back, it fetches them again and needs the lease.
        """
        if request.local < limit:
            self._renewals.append((now_ns + self._renew_ns, request.key, request.sequence))

    def _give_up(self, questions: Sequence[Question], now_ns: int) -> list[Answer]:
        """Answer with the blocks that are staged already. Hits stay hits as long as they are not renewed."""
        answers = []
        for question in questions:
            request = question.request
            if self._lives(request):
                if not question.renewal:
                    answers.append(Answer(request, request.issued, unavailable=True))
                self._renew_later(request, max(request.issued, request.limit), now_ns)
        return answers

    def _lives(self, request: Request) -> bool:
        """Whether it has not ended. A faulty engine may have hinted another request under its key."""
        return self._requests.get(request.key) is request
