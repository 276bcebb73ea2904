"""The look-ups of one engine: what to ask the store, for which requests first, and what needs no asking.

Pure: time is handed in, the store is reached through ports.  One look-up is in flight at a time, for as many requests
as wait then, so that a thousand hints are a few questions; asked-for requests first.  A store that does not answer
makes everyone who waits a miss at once.  Hits that wait long for their fetch are asked for again, which renews their
lease in the store.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..planning.negative import NegativeCache
from ..planning.requests import Key, Request, Urgency

BATCH_DIGESTS = 1024  # of one store call, about a millisecond
RENEWED_PER_TICK = 2048  # digests: bounds what renewal costs, a few per cent of a core


class Question(NamedTuple):
    """Digests of the request's blocks from `start` on. `renewal`: they were there once."""

    request: Request
    start: int
    digests: Sequence[bytes]
    renewal: bool = False


class Ports(Protocol):
    """What the epoch does for its look-ups."""

    def answering(self) -> bool:
        """Whether the store is worth asking."""
        ...

    def ask_store(self, number: int, questions: Sequence[Question]) -> None:
        """Look up on a thread, then answered(number, …); with None when the question is past its deadline."""
        ...

    def found(self, request: Request, blocks: int, on_disk: bytes, *, unavailable: bool) -> None:
        """A request's first answer: the store, or staging, has its blocks up to `blocks`."""
        ...

    def renewed(self, request: Request, blocks: int, on_disk: bytes) -> None:
        """A later answer: what is left of it."""
        ...


class LookUps:
    """Questions from a hint to its answer."""

    def __init__(
        self, ports: Ports, requests: dict[Key, Request], negative: NegativeCache, *, timeout_ns: int, lease_ns: int
    ) -> None:
        self._ports, self._requests, self._negative = ports, requests, negative
        self._timeout_ns, self._renew_ns = timeout_ns, lease_ns // 2
        self._waiting: dict[Key, tuple[int, Question]] = {}  # since when
        self._queue: list[tuple[Urgency, Key]] = []
        self._renewals: deque[tuple[int, Key, int]] = deque()  # when due, and the number of the request
        self._renewing: deque[Question] = deque()
        self._flight: list[Question] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._flight)

    def add(self, request: Request, now_ns: int) -> None:
        """A new request; it may be answered at once."""
        if request.issued == request.blocks:
            self._ports.found(request, request.issued, b"", unavailable=False)
            self._renew_later(request, now_ns)
            return
        if not self._ports.answering():
            self._ports.found(request, request.issued, b"", unavailable=True)
            return
        digests = request.digests(request.issued, request.blocks)
        known = self._negative.first(digests, now_ns)
        if known == 0:
            self._ports.found(request, request.issued, b"", unavailable=False)
            return
        self._waiting[request.key] = (now_ns, Question(request, request.issued, digests[:known]))
        heapq.heappush(self._queue, (request.urgency, request.key))

    def asked(self, request: Request) -> None:
        """Its urgency changed."""
        if request.key in self._waiting:
            heapq.heappush(self._queue, (request.urgency, request.key))

    def next(self, now_ns: int) -> None:
        """Ask the store for those that wait, if no question is out."""
        if self._flight:
            return
        if not self._ports.answering():
            self._give_up([*(question for _, question in self._waiting.values()), *self._renewing], now_ns)
            self._waiting.clear()
            self._queue.clear()
            self._renewing.clear()
            return
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
        if batch:
            self._flight = batch
            self._number += 1
            self._ports.ask_store(self._number, batch)

    def answered(self, number: int, answers: Sequence[tuple[int, bytes]] | None, now_ns: int) -> None:
        """(run, on_disk) for each question; None: the store cannot say."""
        if number != self._number or not self._flight:
            return  # given up before
        batch, self._flight = self._flight, []
        if answers is None:
            self._give_up(batch, now_ns)
        for question, (run, on_disk) in zip(batch, answers or (), strict=False):
            if run < len(question.digests):
                self._negative.add(question.digests[run], now_ns)
            request = question.request
            if not self._lives(request):
                continue
            before = question.start - request.local
            found, where = question.start + run, request.on_disk[:before].ljust(before, b"\0") + on_disk
            if question.renewal:
                self._ports.renewed(request, found, where)
            else:
                self._ports.found(request, found, where, unavailable=False)
            self._renew_later(request, now_ns)
        self.next(now_ns)

    def _renew_later(self, request: Request, now_ns: int) -> None:
        """Until it ends: what is staged for it may be taken back, and is to be fetched again then."""
        if request.local < request.limit:
            self._renewals.append((now_ns + self._renew_ns, request.key, request.sequence))

    def tick(self, now_ns: int) -> None:
        """Give up those that waited too long; collect the leases to renew."""
        for key in [key for key, (since, _) in self._waiting.items() if now_ns - since >= self._timeout_ns]:
            self._give_up([self._waiting.pop(key)[1]], now_ns)
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
                self._renew_later(request, now_ns)
        self.next(now_ns)

    def _give_up(self, questions: Sequence[Question], now_ns: int) -> None:
        """They are served what is in staging already; hits stay hits as long as they are not renewed."""
        for question in questions:
            request = question.request
            if self._lives(request):
                if not question.renewal:
                    self._ports.found(request, request.issued, b"", unavailable=True)
                self._renew_later(request, now_ns)

    def _lives(self, request: Request) -> bool:
        """Whether it has not ended: an engine that does wrong may have hinted another one under its key."""
        return self._requests.get(request.key) is request
