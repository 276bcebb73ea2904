"""Staging ahead what an operator lists, for one engine: looked up and fetched while no request wants anything.

Pure: clock and store are handed in.  One order (admin.Warm) at a time, and one fetch of it.  A fetch begins only
while no request of this engine waits for one, and takes free slots or those of blocks that nobody holds, the least
recently used first, never those of its own run.  What it staged belongs to nobody: the next hint finds it.  An order
that is not done after PATIENCE_NS is answered as it stands.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...shmring.wire.admin import Report, Warm, Warmed
from ...shmring.wire.codec import Message
from ..planning.negative import NegativeCache
from ..planning.planner import Planner
from ..planning.requests import Order
from ..planning.runs import Lane
from .memory import EngineInfo
from .transfers import Found

MAX_WAITING = 4  # orders, each of another connection
PATIENCE_NS = 30_000_000_000
QUIET_NS = 1_000_000_000  # without an order: then what was done so far is told

Reply = Callable[[Message], None]
# Ask the store on a thread, then call back with what it found for each question; None when it cannot say.
LookUp = Callable[[Sequence[Sequence[bytes]], Callable[[Sequence[Found] | None], None]], None]


def about(engine: EngineInfo, epoch: int) -> Warmed:
    """An answer about the engine, without counts."""
    return Warmed(
        engine=engine.engine_id, epoch=epoch, block_tokens=engine.block_tokens,
        hash_algorithm=engine.scheduler.hash_algorithm, hash_probe=engine.scheduler.hash_probe,
    )  # fmt: skip


@dataclass(eq=False)
class _Batch:
    """One order at work. `wanted` has, by lane, the blocks that the store has and that are to be fetched, in order."""

    run: str
    chains: list[list[bytes]]
    reply: Reply
    until_ns: int = 0
    found: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    wanted: tuple[dict[bytes, None], dict[bytes, None]] = field(default_factory=lambda: ({}, {}))
    looked_up: bool = False


class Warming:
    """The orders of one engine. `answering` says whether to ask the store; `totals` counts blocks by result."""

    def __init__(
        self, planner: Planner, negative: NegativeCache, about: Warmed, totals: Counter[str],
        clock_ns: Callable[[], int], *, answering: Callable[[], bool], look_up: LookUp,
    ) -> None:  # fmt: skip
        self._planner, self._negative, self._about, self._clock_ns = planner, negative, about, clock_ns
        self._answering, self._look_up = answering, look_up
        self._batches: deque[_Batch] = deque()
        self._order: Order | None = None  # the fetch in flight
        self._totals = totals
        self._untold: Counter[str] = Counter()
        self._last_ns = 0

    def add(self, warm: Warm, reply: Reply) -> None:
        """Begin, or wait for the orders of other connections."""
        if not warm.chains:
            reply(self._about)
            return
        if len(self._batches) > MAX_WAITING:
            reply(Report(ok=False, text=f"too many stage ahead for this engine: waiting={MAX_WAITING}"))
            return
        chains = [[bytes.fromhex(digest) for digest in chain] for chain in warm.chains]
        self._batches.append(_Batch(warm.run, chains, reply))
        if len(self._batches) == 1:
            self._begin()

    def next_order(self, lane: Lane) -> Order | None:
        """A fetch to start now, when nobody else has one to start in this lane."""
        if self._order is not None or not self._batches or not (batch := self._batches[0]).looked_up:
            return None
        wanted = batch.wanted[lane]
        for digest in [each for each in wanted if self._planner.blocks.touch(each, batch.run)]:  # a request came first
            del wanted[digest]
            batch.counts["staged"] += 1
        if wanted and not self._planner.wanted:
            self._order = self._planner.warm(list(wanted), lane, batch.run)
            if self._order is None:
                self._give_up(batch, lane)
            else:
                for digest in self._order.digests:
                    del wanted[digest]
        self._end_if_done(batch)
        return self._order

    def fetched(self, order: Order, good: int) -> None:
        """A fetch came back, or is past its deadline (and may come back later); how many of its blocks are staged."""
        if order is not self._order:
            return
        self._order = None
        batch = self._batches[0]
        batch.counts["fetched"] += good
        batch.counts["failed"] += len(order.slots) - good
        self._end_if_done(batch)

    def tick(self) -> None:
        """Answer an order that gets no turn."""
        if self._batches and self._batches[0].looked_up and self._clock_ns() >= self._batches[0].until_ns:
            for lane in Lane:
                self._give_up(self._batches[0], lane)
            self._end_if_done(self._batches[0])

    def tell(self) -> Counter[str] | None:
        """What became of the blocks of orders since the last telling, once no other has come for a while."""
        if not self._untold or self._batches or self._clock_ns() - self._last_ns < QUIET_NS:
            return None
        told, self._untold = self._untold, Counter()
        return told

    def stop(self, why: str) -> None:
        """Nothing of this can be done any more: the engine goes, or its blocks are void."""
        self._order = None
        while self._batches:
            self._batches.popleft().reply(Report(ok=False, text=why))

    def _begin(self) -> None:
        batch = self._batches[0]
        now = self._clock_ns()
        batch.until_ns = now + PATIENCE_NS
        questions: list[list[bytes]] = []
        for chain in batch.chains:
            staged = next(
                (i for i, digest in enumerate(chain) if not self._planner.blocks.touch(digest, batch.run)), len(chain)
            )
            batch.found.append(staged)
            batch.counts["staged"] += staged
            questions.append(chain[staged : staged + self._negative.first(chain[staged:], now)])
        if not any(questions):
            self._looked_up(batch, [Found(0, b"")] * len(questions))
        elif self._answering():
            self._look_up(questions, partial(self._looked_up, batch))
        else:
            self._looked_up(batch, None)

    def _looked_up(self, batch: _Batch, answers: Sequence[Found] | None) -> None:
        if batch.looked_up or not self._batches or self._batches[0] is not batch:
            return  # given up before
        batch.looked_up = True
        if answers is None:
            self._batches.popleft().reply(Report(ok=False, text="the store does not answer"))
            self._next()
            return
        for i, (chain, (run, on_disk)) in enumerate(zip(batch.chains, answers, strict=True)):
            start = batch.found[i]
            batch.found[i] += run
            batch.counts["absent"] += len(chain) - batch.found[i]
            for at, digest in enumerate(chain[start : start + run]):
                if self._planner.blocks.touch(digest, batch.run) or any(digest in wanted for wanted in batch.wanted):
                    batch.counts["staged"] += 1
                else:
                    lane = Lane.DISK if at < len(on_disk) and on_disk[at] else Lane.MEMORY
                    batch.wanted[lane][digest] = None
        self._end_if_done(batch)

    def _give_up(self, batch: _Batch, lane: Lane) -> None:
        batch.counts["no_room"] += len(batch.wanted[lane])
        batch.wanted[lane].clear()

    def _end_if_done(self, batch: _Batch) -> None:
        if self._order is not None or any(batch.wanted):
            return
        self._batches.popleft()
        for counts in (self._totals, self._untold):
            counts.update(batch.counts)
        self._last_ns = self._clock_ns()
        batch.reply(self._about.model_copy(update={"found": batch.found, **batch.counts}))
        self._next()

    def _next(self) -> None:
        if self._batches:
            self._begin()
