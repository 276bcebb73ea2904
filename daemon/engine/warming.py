"""The warming of one engine: blocks that an operator lists, looked up and fetched while no request wants anything.

Pure.  One order (admin.Warm) is at work at a time, with one fetch.  A fetch begins only while no request of this engine
waits for one.  It takes free slots, or those of blocks that no request holds, the least recently used first, but never
those of its own run.  No request holds what it staged: the next hint finds it.  An order that is not done after
PATIENCE_NS is answered as it stands.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...shmring.wire.admin import Report, Warm, Warmed
from ..planning.negative import NegativeCache
from ..planning.planner import Planner
from ..planning.requests import Order
from ..planning.runs import Lane
from .memory import EngineInfo
from .transfers import Found

MAX_WAITING = 4  # orders, each of another connection
PATIENCE_NS = 30_000_000_000
QUIET_NS = 1_000_000_000  # without an order: then the log says what was done so far


class Question(NamedTuple):
    """What order `number` asks of the store."""

    number: int
    digests: Sequence[Sequence[bytes]]


class Answer(NamedTuple):
    """The answer to order `number`, and its blocks by result."""

    number: int
    message: Warmed | Report
    counts: Counter[str]


def about(engine: EngineInfo, epoch: int) -> Warmed:
    """An answer about the engine, without counts."""
    return Warmed(
        engine=engine.engine_id,
        epoch=epoch,
        block_tokens=engine.groups.unit_tokens,
        hash_algorithm=engine.scheduler.hash_algorithm,
        hash_probe=engine.scheduler.hash_probe,
    )


@dataclass(eq=False)
class _Batch:
    """One order at work. `wanted`: by lane, the blocks to fetch, in order."""

    number: int
    run: str
    chains: list[list[bytes]]
    until_ns: int = 0  # 0: not begun
    found: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wanted: tuple[dict[bytes, None], dict[bytes, None]] = field(default_factory=lambda: ({}, {}))
    looked_up: bool = False


class Warming:
    """The orders of one engine, by a number that the caller gives."""

    def __init__(self, planner: Planner, negative: NegativeCache, about: Warmed) -> None:
        self._planner, self._negative, self._about = planner, negative, about
        self._batches: deque[_Batch] = deque()
        self._order: Order | None = None  # the fetch in flight
        self._answers: deque[Answer] = deque()
        self._done: Counter[str] = Counter()  # since the last summary
        self._last_ns = 0

    def add(self, number: int, warm: Warm) -> None:
        """Take an order, which may wait for those of other connections."""
        if not warm.chains:
            self._answers.append(Answer(number, self._about, Counter()))
        elif len(self._batches) > MAX_WAITING:
            self._refuse(number, f"too many warm requests wait for this engine: waiting={MAX_WAITING}")
        else:
            chains = [[bytes.fromhex(digest) + b"\0" for digest in chain] for chain in warm.chains]
            self._batches.append(_Batch(number, warm.run, chains))

    def next_question(self, now_ns: int) -> Question | None:
        """Begin the next order, if none is at work; return what to ask the store for it."""
        while self._batches and not self._batches[0].until_ns:
            batch = self._batches[0]
            batch.until_ns = now_ns + PATIENCE_NS
            questions: list[list[bytes]] = []
            for chain in batch.chains:
                absent = (i for i, digest in enumerate(chain) if not self._planner.blocks.touch(digest, batch.run))
                staged = next(absent, len(chain))
                batch.found.append(staged)
                batch.counts["staged"] += staged
                questions.append(chain[staged : staged + self._negative.first(chain[staged:], now_ns)])
            if any(questions):
                return Question(batch.number, questions)
            self.answered(batch.number, [Found(bytes(len(each)), b"") for each in questions], now_ns)
        return None

    def answered(self, number: int, found: Sequence[Found] | None, now_ns: int) -> None:
        """Take what the store has of each chain; None: it cannot say."""
        if not self._batches or self._batches[0].number != number or self._batches[0].looked_up:
            return  # given up before
        batch = self._batches[0]
        batch.looked_up = True
        if found is None:
            self._batches.popleft()
            self._refuse(number, "the store does not answer")
            return
        for i, (chain, answer) in enumerate(zip(batch.chains, found, strict=True)):
            start, run, on_disk = batch.found[i], answer.run, answer.on_disk
            batch.found[i] += run
            batch.counts["absent"] += len(chain) - batch.found[i]
            for at, digest in enumerate(chain[start : start + run]):
                if self._planner.blocks.touch(digest, batch.run) or any(digest in wanted for wanted in batch.wanted):
                    batch.counts["staged"] += 1
                else:
                    lane = Lane.DISK if at < len(on_disk) and on_disk[at] else Lane.MEMORY
                    batch.wanted[lane][digest] = None
        self._end_if_done(batch, now_ns)

    def next_order(self, lane: Lane, now_ns: int) -> Order | None:
        """Return a fetch to start now, when no request has one to start in this lane."""
        if self._order is not None or not self._batches or not (batch := self._batches[0]).looked_up:
            return None
        wanted = batch.wanted[lane]
        for digest in [each for each in wanted if self._planner.blocks.touch(each, batch.run)]:  # a request came first
            del wanted[digest]
            batch.counts["staged"] += 1
        if wanted and self._planner.idle:
            self._order = self._planner.warm(list(wanted), lane, batch.run)
            if self._order is None:
                self._give_up(batch, lane)
            else:
                for digest in self._order.digests:
                    del wanted[digest]
        self._end_if_done(batch, now_ns)
        return self._order

    def fetched(self, order: Order, good: int, now_ns: int) -> None:
        """A fetch came back with `good` blocks, or is past its deadline (and may come back later)."""
        if order is not self._order:
            return
        self._order = None
        batch = self._batches[0]
        batch.counts["fetched"] += good
        batch.counts["failed"] += len(order.slots) - good
        self._end_if_done(batch, now_ns)

    def next_answer(self) -> Answer | None:
        return self._answers.popleft() if self._answers else None

    def tick(self, now_ns: int) -> Counter[str] | None:
        """Answer an order that gets no turn; return blocks by result, once, when no order has come for a while."""
        if self._batches and self._batches[0].looked_up and now_ns >= self._batches[0].until_ns:
            for lane in Lane:
                self._give_up(self._batches[0], lane)
            self._end_if_done(self._batches[0], now_ns)
        if not self._done or self._batches or now_ns - self._last_ns < QUIET_NS:
            return None
        done, self._done = self._done, Counter()
        return done

    def stop(self, why: str) -> None:
        """Refuse all orders: the engine goes, or its blocks are void."""
        self._order = None
        while self._batches:
            self._refuse(self._batches.popleft().number, why)

    def _refuse(self, number: int, text: str) -> None:
        self._answers.append(Answer(number, Report(ok=False, text=text), Counter()))

    def _give_up(self, batch: _Batch, lane: Lane) -> None:
        batch.counts["no_room"] += len(batch.wanted[lane])
        batch.wanted[lane].clear()

    def _end_if_done(self, batch: _Batch, now_ns: int) -> None:
        if self._order is not None or any(batch.wanted):
            return
        self._batches.popleft()
        self._done.update(batch.counts)
        self._last_ns = now_ns
        message = self._about.model_copy(update={"found": batch.found, **batch.counts})
        self._answers.append(Answer(batch.number, message, batch.counts))
