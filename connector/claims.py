"""From a hint to a claimed answer, for one request: what the scheduler side does between arrival and allocation.

An answer is given only for blocks that are claimed and whose slot numbers were read and checked, so that a dispatched
load cannot fail.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..shmring.flags import Flag
from ..shmring.protocol import FlagState, Outcome
from . import hints
from .config import ConnectorConfig
from .hints import Handle
from .saves import Progress, Saves
from .session import SchedulerSession
from .support import Geometry

# Hints pushed for one admission after the one at arrival: a revoked one, an evicted local prefix, a new daemon.
MAX_LATE_HINTS = 3

Reply = tuple[int | None, bool]
NOTHING: Reply = (0, False)
PENDING: Reply = (None, False)

log = logging.getLogger("vllm.kvprefetch.scheduler")


@dataclass(slots=True)
class Answer:
    """Blocks [start, start + count) of the handle, claimed, and the slots they lie in."""

    start: int
    count: int
    asynchronous: bool
    slots: list[int]


@dataclass(slots=True)
class Entry:
    """One request as vLLM knows it, from add to finish. `handle` belongs to the current epoch."""

    request: Any
    loadable: bool
    preemptions: int
    handle: Handle | None = None
    answer: Answer | None = None
    settled: bool = False
    late_hints: int = 0
    unhinted_since_ns: int = 0
    waiting_since_ns: int = 0
    progress: Progress = field(default_factory=Progress)

    def restart(self) -> None:
        """Preempted: its blocks are gone, and everything is to be done again for all of its tokens."""
        self.preemptions = self.request.num_preemptions
        self.settled, self.late_hints, self.unhinted_since_ns, self.waiting_since_ns = False, 0, 0, 0
        self.progress = Progress()


class Claims:
    """The rules of hinting, waiting and claiming. Every method may raise SegmentCorrupt."""

    def __init__(
        self, config: ConnectorConfig, geometry: Geometry, saves: Saves | None, counters: Counter[str],
        clock_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        self._config, self._geometry, self._saves, self._counters = config, geometry, saves, counters
        self._clock_ns = clock_ns
        self._wait_ns = config.wait_timeout_ms * 1_000_000
        self._shadow = config.mode == "shadow"

    def usable_blocks(self, request: Any) -> int:
        """Full blocks that leave at least one token to compute."""
        blocks: int = (request.num_tokens - 1) // self._geometry.block_tokens
        return min(blocks, len(request.block_hashes) // self._geometry.hashes_per_block)

    def hint(self, entry: Entry, session: SchedulerSession, local_blocks: int) -> bool:
        """Push a hint for all usable blocks; False when all is local, or when it was dropped (counted)."""
        request = entry.request
        blocks = self.usable_blocks(request)
        if local_blocks >= blocks:
            return False
        ratio = self._geometry.hashes_per_block
        entry.handle = hints.push(
            session, request.request_id, request.block_hashes[ratio - 1 : blocks * ratio : ratio], local_blocks,
            priority=request.priority, prompt_tokens=request.num_prompt_tokens, now_ns=self._clock_ns(),
        )  # fmt: skip
        if entry.handle is None:
            session.producer.count_dropped()
            self._counters["hints_dropped"] += 1
            return False
        self._counters["hints"] += 1
        return True

    def match(self, entry: Entry, session: SchedulerSession, start: int) -> Reply:
        """The reply for a request of which blocks [0, start) are local; entry.answer is set when it is a claim."""
        usable = self.usable_blocks(entry.request)
        if start >= usable:
            return NOTHING
        now = self._clock_ns()
        handle = entry.handle
        if handle is None:
            return self._late_hint(entry, session, start, now)
        flag = hints.look(handle)
        if self._shadow:
            return NOTHING
        if flag.state == FlagState.EXPIRED:
            self.finish(entry, Outcome.LOST)
            return self._late_hint(entry, session, start, now)
        if start < handle.local_blocks:
            # Blocks that were local when we hinted were evicted since: what is staged does not follow on them.
            self.finish(entry, Outcome.EVICTED)
            return self._late_hint(entry, session, start, now)
        outcome = Outcome.MISS
        if flag.state == FlagState.HINTED:
            if not session.alive(now):
                return NOTHING
            if handle.deadline_ns == 0:
                handle.deadline_ns = now + self._wait_ns
            if now < handle.deadline_ns:
                hints.ask(handle, now)
                return PENDING
            outcome = Outcome.LATE
        return self._take(entry, handle, flag, start, usable, outcome, now)

    def _late_hint(self, entry: Entry, session: SchedulerSession, start: int, now: int) -> Reply:
        """The scheduler is at a request without a hint: push one, and wait for it under a deadline of its own."""
        if entry.late_hints >= MAX_LATE_HINTS:
            entry.settled = True
            return NOTHING
        if not session.alive(now):
            return NOTHING
        if not self.hint(entry, session, start):
            if self._shadow:
                return NOTHING
            entry.unhinted_since_ns = entry.unhinted_since_ns or now
            return PENDING if now < entry.unhinted_since_ns + self._wait_ns else NOTHING
        entry.late_hints += 1
        self._counters["late_hints"] += 1
        assert entry.handle is not None
        entry.handle.deadline_ns = now + self._wait_ns
        hints.ask(entry.handle, self._clock_ns())
        return NOTHING if self._shadow else PENDING

    def _take(
        self, entry: Entry, handle: Handle, flag: Flag, start: int, usable: int, outcome: Outcome, now: int
    ) -> Reply:
        """Claim what is there and answer it, or settle on recomputing."""
        stop = min(flag.count - self._geometry.drop_last, usable)
        if stop <= start:
            self._note_found(entry, handle, flag)
            self.finish(entry, outcome)
            entry.settled = True
            self._counters["misses" if outcome == Outcome.MISS else "late"] += 1
            return NOTHING
        slots = handle.session.flags.read_slots(handle.flag, start, stop)
        if not hints.claim(handle, flag, stop, now):
            return PENDING  # the daemon moved the flag in between; the next visit sees where
        count = stop - start
        size = count * self._geometry.block_bytes
        mode = self._config.load_mode
        asynchronous = mode == "async" or (mode == "auto" and size > self._config.sync_load_max_bytes)
        self._note_found(entry, handle, flag)
        entry.answer = Answer(start, count, asynchronous, slots)
        return count * self._geometry.block_tokens, asynchronous

    def _note_found(self, entry: Entry, handle: Handle, flag: Flag) -> None:
        """Learn from a finished lookup which blocks need no save."""
        if self._saves is None or flag.state != FlagState.READY:
            return  # the found word is written before READY
        found = min(handle.session.flags.found(handle.flag), handle.blocks)
        ratio = self._geometry.hashes_per_block
        digests = entry.request.block_hashes[ratio - 1 : handle.blocks * ratio : ratio]
        self._saves.note_stored(digests[handle.local_blocks : found])
        self._saves.note_absent(digests[max(found, handle.local_blocks) :])

    def withdraw(self, entry: Entry) -> None:
        """Take back an answer that was not used."""
        entry.answer = None
        if entry.handle is not None:
            hints.unclaim(entry.handle)

    def finish(self, entry: Entry, outcome: Outcome) -> None:
        """Give up the request's hint and answer, if there are any."""
        handle, entry.handle, entry.answer = entry.handle, None, None
        if handle is None:
            return
        if self._shadow:
            self._count_shadow(entry, handle)
        hints.finish(handle, outcome)

    def _count_shadow(self, entry: Entry, handle: Handle) -> None:
        flag = hints.look(handle)
        blocks = max(0, min(flag.count, self.usable_blocks(entry.request)) - handle.local_blocks)
        state = "pending" if flag.state == FlagState.HINTED else "ready"
        self._counters[f"shadow_{state}"] += 1
        self._counters[f"shadow_{state}_blocks"] += blocks
        log.info("kvprefetch: shadow: request=%s %s blocks=%d", entry.request.request_id, state, blocks)
