"""The saver of one engine: slots granted, copied blocks put into the store, slots granted again; and the reset barrier.

One job of bounded size at a time, on the pool's save thread, so that slots come back early and loads go first: while a
fetch is in flight or wanted the next job waits, at most LOADS_FIRST_NS.  A full store slows saving down through the
credits and nothing else: the slots of what could not be put stay taken while it is tried again.  A reset waits for the
put in flight, drops all that is of the old weights, and only then removes the keys, so that no put can bring one back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ...shmring.credits import CreditGranter
from ...shmring.wire.attach import Stored
from ...shmring.wire.records import ProtocolError, Saved
from ..store.client import Store
from ..telemetry.counters import Counters
from ..telemetry.logs import Log
from . import transfers
from .stored import StoredBefore

PAUSE_NS = (100_000_000, 2_000_000_000)
TRIES = 8  # in a row without a block getting in: about ten seconds of a full store
RESET_SLACK_S = 1.0  # beyond its own time, before a reset is answered without its removal
LOADS_FIRST_NS = 50_000_000
MAX_JOB_BLOCKS = 4096  # the slots of one job fit a control message


@dataclass
class _Save:
    """One save of the engine's, and what became of those of its `parts` that have ended: blocks, and store calls."""

    save_id: int
    parts: int
    stored: int = 0
    present: int = 0
    failed: int = 0
    tries: int = 0


@dataclass
class _Job:
    """Part of a save on its way into the store; `blocks` are those still to put."""

    save: _Save
    slots: list[int]
    blocks: list[tuple[bytes, int]]
    stored: int = 0
    stored_before: int = 0
    present: int = 0
    failed: int = 0
    tries: int = 0
    memory: list[int] = field(default_factory=list)
    disk: list[int] = field(default_factory=list)


@dataclass
class _Reset:
    timeout_s: float
    reply: Callable[[bool], None]
    deadline_ns: int
    answered: bool = False

    def answer(self, ok: bool) -> None:
        if not self.answered:
            self.answered = True
            self.reply(ok)


class RunJob(Protocol):
    """Runs a blocking store job on the save thread, then `done` with its result (or `failed`) on the main loop.

    Before it `overdue`, once, when the job is past its deadline.
    """

    def __call__(
        self,
        job: Callable[[], Any],
        done: Callable[[Any], None],
        failed: Any,
        overdue: Callable[[], None] | None = None,
    ) -> None: ...


class Saver:
    """Owns the save `slots` of one engine.

    `loading` says whether a fetch is in flight or wanted.  `stored` hears the digests that are in the store now, and
    `tell`, once set, what became of every save.
    """

    def __init__(
        self, store: Store, shape: transfers.RankLayout, credits: CreditGranter, slots: range, run: RunJob, log: Log,
        clock_ns: Callable[[], int], *, job_blocks: int, loading: Callable[[], bool], counters: Counters,
        stored: Callable[[list[bytes]], None],
    ) -> None:  # fmt: skip
        self._store, self._shape, self._credits, self._run = store, shape, credits, run
        self._log, self._clock_ns = log, clock_ns
        self._job_blocks = max(1, min(job_blocks, MAX_JOB_BLOCKS))
        self._loading, self._in_store = loading, stored
        self._yielded_ns = 0  # since when the next job has let loads go first
        self.tell: Callable[[Stored], None] | None = None
        self.counters = counters
        self.slot_count = len(slots)
        self.generation = 0
        self._granted: set[int] = set()
        self._lost = 0  # slots that Mooncake may still read
        self._withheld: list[int] = []  # slots that came back while saving was switched off
        self._saving = True
        self._jobs: deque[_Job] = deque()
        self._reset: _Reset | None = None  # the newest one, until its removal begins; it answers for those before it
        self._removal: _Reset | None = None  # the one whose removal runs
        self._before = StoredBefore()
        self._busy = False
        self._not_before_ns = 0
        self._pause_ns = PAUSE_NS[0]
        self._fruitless = 0  # tries in a row in which no block got in
        self._grant(list(slots))

    def saved(self, record: Saved) -> None:
        """Every rank copied these blocks (or dropped them). Raises ProtocolError for slots that are not out."""
        if len(set(record.slots)) != len(record.slots) or not self._granted.issuperset(record.slots):
            raise ProtocolError(f"slots were not granted: slots={record.slots[:8]}")
        self._granted.difference_update(record.slots)
        if record.dropped or record.reset_generation < self.generation or not self._saving:
            if not record.dropped:
                self.counters.lost_saves += len(record.slots)
                if self.tell is not None:
                    for start in range(0, len(record.slots), MAX_JOB_BLOCKS):
                        self.tell(Stored(save_id=record.save_id, lost=record.slots[start : start + MAX_JOB_BLOCKS]))
            self._grant(record.slots)
            return
        save = _Save(record.save_id, -(-len(record.slots) // self._job_blocks))
        for start in range(0, len(record.slots), self._job_blocks):
            slots = record.slots[start : start + self._job_blocks]
            digests = record.hashes[start : start + self._job_blocks]
            self._jobs.append(_Job(save, slots, list(zip(digests, slots, strict=True))))
        self.next()

    def switch(self, saving: bool) -> None:
        """Without saving, slots that come back stay here: the engine soon has none left and then copies nothing."""
        self._saving = saving
        if saving and self._withheld:
            slots, self._withheld = self._withheld, []
            self._grant(slots)

    def next(self) -> None:
        """Start the next job, unless one runs, a full store's pause is not over, or loads go first."""
        for reset in (self._removal, self._reset):
            if (
                reset is not None and self._clock_ns() >= reset.deadline_ns
            ):  # a put that hangs is in its way, or it hangs itself
                reset.answer(False)
        if self._busy or not self._jobs:
            return
        now = self._clock_ns()
        if now < self._not_before_ns:
            return
        if self._loading():
            self._yielded_ns = self._yielded_ns or now
            if now < self._yielded_ns + LOADS_FIRST_NS:
                return
        self._yielded_ns = 0
        self._busy = True
        job = self._jobs.popleft()
        work = partial(transfers.save, self._store, self._shape, job.blocks, locate=self.tell is not None)
        failed = transfers.SaveResult(0, 0, len(job.blocks), [])
        self._run(work, partial(self._stored, job), failed, partial(self._overdue, job))

    def _overdue(self, job: _Job) -> None:
        """Its slots stay out until the put returns; nothing is put before, so that no old value follows a reset."""
        self._log.warning("call.overdue", call="save", blocks=len(job.blocks))

    def _stored(self, job: _Job, result: transfers.SaveResult) -> None:
        self._busy = False
        if result.lost:
            self._log.warning("slots.lost", call="save", blocks=result.lost)
        left = {digest for digest, _ in result.again}
        self._in_store([digest for digest, _ in job.blocks if digest not in left])
        job.tries += 1
        self._fruitless = 0 if result.stored or result.present or not result.again else self._fruitless + 1
        job.stored += result.stored
        job.stored_before += self._before.count(result.digests)
        job.present += result.present
        job.failed += result.failed
        job.memory += result.memory
        job.disk += result.disk
        if result.again:
            self._not_before_ns = self._clock_ns() + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, PAUSE_NS[1])
        else:
            self._pause_ns = PAUSE_NS[0]
        if result.again and self._fruitless < TRIES and self._saving and self._reset is None:
            job.blocks = result.again
            self._jobs.appendleft(job)
        else:
            job.failed += len(result.again)
            self._finished(job)
            if self._fruitless >= TRIES:
                self.give_up()
        if self._reset is not None:
            self._remove(self._reset)
        self.next()

    def give_up(self) -> None:
        """Store nothing of what waits. A store that is gone for all the tries of the one before keeps no slots."""
        while self._jobs:
            job = self._jobs.popleft()
            job.failed += len(job.blocks)
            self._finished(job)

    def _finished(self, job: _Job) -> None:
        """Its slots may be used again, and the engine may know what became of their blocks."""
        self.counters.saved_blocks += job.stored
        self.counters.saved_again_blocks += job.stored_before
        self.counters.present_blocks += job.present
        self.counters.lost_saves += job.failed
        save = job.save
        save.parts -= 1
        save.stored += job.stored
        save.present += job.present
        save.failed += job.failed
        save.tries += job.tries
        if not save.parts:
            self._log.info(
                "save.done", save_id=save.save_id, stored_blocks=save.stored, present_blocks=save.present,
                failed_blocks=save.failed, tries=save.tries,
            )  # fmt: skip
        if self.tell is not None:
            stored = {*job.memory, *job.disk}
            lost = [slot for slot in job.slots if slot not in stored]
            self.tell(Stored(save_id=save.save_id, memory=job.memory, disk=job.disk, lost=lost))
        self._grant(job.slots)

    def reset(self, generation: int, timeout_s: float, reply: Callable[[bool], None]) -> None:
        """Drop saves of older generations, remove every key of the namespace, then reply whether that is confirmed.

        A reset that still waits for its removal is superseded: the reply to this one covers its generation too.
        """
        self.generation = max(self.generation, generation)
        self._before.forget()
        self.give_up()
        deadline_ns = self._clock_ns() + int((timeout_s + RESET_SLACK_S) * 1e9)
        self._reset = _Reset(timeout_s, reply, deadline_ns)
        if not self._busy:
            self._remove(self._reset)

    @property
    def resetting(self) -> bool:
        """Keys of the old weights may still be in the store."""
        return self._reset is not None or self._removal is not None

    def _remove(self, reset: _Reset) -> None:
        self._removal, self._reset = reset, None
        self._busy = True
        self._run(partial(transfers.remove_all, self._store, self._shape, reset.timeout_s), self._removed, False)

    def _removed(self, ok: bool) -> None:
        self._busy = False
        self._log.info("store.reset", confirmed=ok, reset_generation=self.generation)
        assert self._removal is not None
        self._removal.answer(ok)
        self._removal = None
        if self._reset is not None:
            self._remove(self._reset)
        self.next()

    def _grant(self, slots: list[int]) -> None:
        if lost := self._shape.staging.lost.intersection(slots):
            self._lost += len(lost)
            slots = [slot for slot in slots if slot not in lost]
        if not self._saving:
            self._withheld += slots
            return
        self._granted.update(slots)
        self._credits.grant(slots)

    def gauges(self) -> dict[str, int]:
        """`save_slots_busy` are with the saver; the rest are granted: with the engine, or free for it to take."""
        return {
            "save_slots": self.slot_count,
            "save_slots_busy": self.slot_count - len(self._granted) - self._lost,
            "save_slots_lost": self._lost,
            "saves_queued": len(self._jobs) + self._busy,
        }
