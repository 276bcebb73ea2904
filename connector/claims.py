"""From a hint to a claimed answer, for one request: what the scheduler side does between arrival and allocation.

An answer is given only for blocks that are claimed and whose slot numbers were then read and checked, so that a
dispatched load cannot fail.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..shmring.flags import Flag
from ..shmring.wire.records import FlagState, Outcome
from . import hints
from .config import ConnectorConfig, override
from .hints import Handle
from .policy import Verdict, Wait, WaitPolicy, loads_beside
from .saves import Progress, Saves
from .session import SchedulerSession
from .support import Geometry

# Hints pushed for one admission after the one at arrival, when that is void after a reset or its daemon replaced.
MAX_LATE_HINTS = 3

Reply = tuple[int | None, bool]
NOTHING: Reply = (0, False)
PENDING: Reply = (None, False)
# Where no flag is: nothing is ready, and nothing has ended.
UNHINTED = Flag(0, FlagState.HINTED, 0)
# What a request may say in its kv_transfer_params: {"kvprefetch": {"wait_policy": ..., "wait_timeout_ms": ...}}.
OVERRIDE_KEY = "kvprefetch"

_WARN_EVERY_NS = 1_000_000_000

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
    loading: bool = False  # a load was dispatched, and the request was not scheduled since
    late_hints: int = 0
    told_ns: int = 0  # when it was last told None, as long as that is charged (waits.py)
    told_in: int = 0  # and in which pass
    waited: bool = False
    wait: Wait | None = None
    progress: Progress = field(default_factory=Progress)

    def restart(self) -> None:
        """Preempted: its blocks are gone, and everything is to be done again for all of its tokens."""
        self.preemptions = self.request.num_preemptions
        self.settled, self.late_hints, self.wait, self.waited = False, 0, None, False
        self.progress = Progress()


class Claims:
    """The rules of hinting, waiting and claiming. Every method may raise SegmentCorrupt."""

    def __init__(
        self, config: ConnectorConfig, geometry: Geometry, policy: WaitPolicy, saves: Saves | None,
        counters: Counter[str], clock_ns: Callable[[], int], pause: Callable[[], None],
    ) -> None:  # fmt: skip
        self._config, self._geometry, self._saves, self._counters = config, geometry, saves, counters
        self._policy, self._clock_ns, self._pause = policy, clock_ns, pause
        self._shadow = config.mode == "shadow"
        self._spin_ns, self._idle_wait_ns = config.spin_us * 1000, config.idle_wait_us * 1000
        self._looked_ns = 0  # in this pass
        self._warned_ns = -_WARN_EVERY_NS
        self._pending_ahead = False  # whether a request visited before in this pass waits, and is judged
        self._kept_seats = 0  # in this pass, for requests visited before whose look-up goes on

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

    def new_pass(self) -> None:
        """The scheduler begins another pass over its queue."""
        self._looked_ns = self._kept_seats = 0
        self._pending_ahead = False

    def match(self, entry: Entry, session: SchedulerSession, start: int, *, taken: int) -> Reply:
        """The reply for a request of which blocks [0, start) are local; entry.answer is set when it is a claim.

        `taken`: of the engine's seats, as far as one can see from here; where it is 0, a pending answer costs the
        engine's sleep.
        """
        usable = self.usable_blocks(entry.request)
        if start >= usable:
            return NOTHING
        seats = self._geometry.seats
        if self._kept_seats and taken + self._kept_seats >= seats:
            return PENDING  # the last free seats are for those before it, for this pass
        occupied = min(taken, seats - 1) / seats  # who is asked has one
        now = self._clock_ns()
        flag = UNHINTED
        if entry.handle is not None and not self._shadow:
            flag = hints.look(entry.handle)
            if flag.state == FlagState.EXPIRED:
                self.finish(entry, Outcome.LOST)
            elif start < entry.handle.local_blocks:
                # Blocks that were local when we hinted were evicted since: what is staged does not follow on them.
                self.finish(entry, Outcome.EVICTED)
                entry.late_hints -= 1  # the next one is free: it counts on fewer local blocks each time
            elif flag.state != FlagState.HINTED:
                return self._take(entry, entry.handle, flag, start, usable, Outcome.MISS, now, occupied)
        if not session.alive(now):
            return NOTHING
        if self._shadow:
            if entry.handle is None:
                self._late_hint(entry, session, start)
            return NOTHING
        return self._pending(entry, session, UNHINTED if entry.handle is None else flag, start, usable, now, occupied)

    def _pending(
        self, entry: Entry, session: SchedulerSession, flag: Flag, start: int, usable: int, now: int, occupied: float
    ) -> Reply:
        """No hint yet, or one whose fetch goes on: wait for it, or make do with what is ready."""
        handle = entry.handle
        first_visit = entry.wait is None
        wait = entry.wait = entry.wait or self._begin(entry, max(start, flag.count), now)
        if first_visit and handle is not None and wait.policy != "best_effort":
            flag = self._look_on(handle, flag, usable, now, idle=occupied == 0.0 and not self._geometry.lockstep)
            now = self._clock_ns()
        if handle is not None and flag.state != FlagState.HINTED:
            if flag.state != FlagState.EXPIRED:
                return self._take(entry, handle, flag, start, usable, Outcome.MISS, now, occupied)
            return PENDING  # void since we looked: the next visit hints again
        limit = usable
        if handle is not None and wait.policy == "adaptive" and (found := handle.session.flags.found(handle.flag)):
            limit = min(found, usable)
        verdict = self._policy.verdict(
            wait, max(start, flag.count), limit, now, occupied=occupied, first=not self._pending_ahead
        )
        if verdict is Verdict.WAIT:
            if handle is not None:
                hints.ask(handle, now)
            elif not self._late_hint(entry, session, start):
                verdict = Verdict.LATE
        if verdict is Verdict.WAIT:
            self._pending_ahead |= wait.policy == "adaptive"  # who waits whatever it costs decides for nobody else
            if first_visit and handle is not None:
                self._kept_seats += handle.session.flags.found(handle.flag) <= handle.local_blocks
            return PENDING
        outcome = Outcome.LATE if verdict is Verdict.LATE else Outcome.RECOMPUTED
        if handle is None:
            return self._recompute(entry, outcome)
        return self._take(entry, handle, flag, start, usable, outcome, now, occupied)

    def _begin(self, entry: Entry, ready: int, now: int) -> Wait:
        """The first visit that finds the request pending; its own wishes are read now."""
        config = self._config
        params = getattr(entry.request, "kv_transfer_params", None)
        if params and (wishes := params.get(OVERRIDE_KEY)) is not None:
            try:
                config = override(config, wishes)
            except ValueError as error:
                self._counters["bad_overrides"] += 1
                if now - self._warned_ns >= _WARN_EVERY_NS:
                    self._warned_ns = now
                    log.warning("kvprefetch: request %s: %s; the default is used", entry.request.request_id, error)
        return Wait.begin(config.wait_policy, config.wait_timeout_ms, now, ready)

    def _look_on(self, handle: Handle, flag: Flag, usable: int, began: int, *, idle: bool) -> Flag:
        """Look for a moment at a flag that may be about to change.

        An idle engine has nothing better to do, and would sleep for a millisecond: it sleeps for less between looks.
        A busy one only sees whether the store holds anything, and makes no system call: told to wait before that is
        known, a miss would lose its seat to those behind it.
        """
        found = handle.session.flags.found
        left = (self._idle_wait_ns if idle else self._spin_ns) - self._looked_ns
        if left <= 0 or self._policy.recompute_ns(usable - flag.count) < left:
            return flag  # what could come is not worth it
        hints.ask(handle, began)
        now = began
        while flag.state == FlagState.HINTED and now - began < left:
            if idle:
                self._pause()
            elif found(handle.flag) > handle.local_blocks:
                break
            flag, now = hints.look(handle), self._clock_ns()
        self._looked_ns += now - began
        self._counters["wait_ns"] += now - began
        handle.waited_ns += now - began
        return flag

    def _late_hint(self, entry: Entry, session: SchedulerSession, start: int) -> bool:
        """The scheduler is at a request without a hint: push one. False when it had enough of them.

        Where there is no room for it, the next visit tries again.
        """
        if entry.late_hints >= MAX_LATE_HINTS:
            return False
        if self.hint(entry, session, start):
            entry.late_hints += 1
            self._counters["late_hints"] += 1
            assert entry.handle is not None
            hints.ask(entry.handle, self._clock_ns())
        return True

    def _take(
        self, entry: Entry, handle: Handle, flag: Flag, start: int, usable: int, outcome: Outcome, now: int,
        occupied: float,
    ) -> Reply:  # fmt: skip
        """Claim what is there and answer it, or settle on recomputing."""
        if entry.wait is not None:
            self._policy.fetches.saw(entry.wait, max(start, flag.count), now)
        dropped = int(self._geometry.drop_last)
        stop = min(flag.count - dropped, usable)
        if stop <= start:
            self._note_found(entry, handle, flag)
            self.finish(entry, outcome)
            return self._recompute(entry, outcome)
        # With the block that is dropped: an un-claim publishes what was claimed, and the next answer drops it again.
        if not hints.claim(handle, flag, stop + dropped, now):
            return PENDING  # the daemon moved the flag in between; the next visit sees where
        slots = handle.session.flags.read_slots(handle.flag, start, stop)
        count = stop - start
        asynchronous = self._config.load_mode == "async" or (
            self._config.load_mode == "auto"
            and loads_beside(count * self._geometry.block_bytes, self._config.sync_load_max_bytes, occupied=occupied)
        )
        self._note_found(entry, handle, flag)
        if flag.state == FlagState.HINTED:
            self._counters["cut_short"] += 1
        entry.answer = Answer(start, count, asynchronous, slots)
        return count * self._geometry.block_tokens, asynchronous

    def _recompute(self, entry: Entry, outcome: Outcome) -> Reply:
        """There is nothing to take, and there will be nothing."""
        entry.settled = True
        if outcome == Outcome.MISS:
            self._counters["misses"] += 1
        else:
            self._counters["late" if outcome == Outcome.LATE else "recomputed"] += 1
        return NOTHING

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
        blocks = max(0, flag.count - handle.local_blocks)
        state = "pending" if flag.state == FlagState.HINTED else "ready"
        self._counters[f"shadow_{state}"] += 1
        self._counters[f"shadow_{state}_blocks"] += blocks
        log.info("kvprefetch: shadow: request=%s %s blocks=%d", entry.request.request_id, state, blocks)
