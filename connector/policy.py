"""Decide whether a request at the head of the queue waits for missing blocks or takes the ready ones. Pure: no clock.

`best_effort` never waits; `timeout` waits until its bound; `wait` until the fetch ends, under a bound that only a
broken daemon reaches.  `adaptive` compares two measured times:

* recomputing the missing blocks: their tokens, times the cost of a prefill token (steps.py);
* waiting for them: the latency to the first blocks that other requests saw lately, by their number, then the pace of
  this request's own blocks (the others' until it is known), rounded up to visits: nobody looks in between.

It starts to wait when waiting is expected to take no longer than recomputing, and stops at LEAVE_FACTOR times that, so
that noise does not cut a wait short.  Blocks that were expected get PATIENCE times the time that they were expected to
take.  Two bounds hold whatever the blocks do; "recomputing" is the time that it takes:

* Nothing came for RISK of recomputing the missing blocks, and for PATIENCE times the silence that was expected.
* The wait has cost more than its blocks saved: by RISK of recomputing all of them, and by the smaller of PATIENCE times
  the wait that was expected and of recomputing all of them.

So on an empty engine a request takes at most twice as long as recomputing at once, plus one visit, and at most
(1 + RISK) times as long where nothing is known of fetches.  A gain smaller than one visit (a short prompt, a few
blocks) is not waited for.

An expectation is fixed when a wait begins and whenever blocks come, so it does not grow while nothing comes.  Only
blocks that came make one: after a wait that ended in silence, the next ones have no patience until blocks come again.

Recomputing keeps a place and lengthens every step: the fewer places are free, the more requests wait behind it.  So it
counts 1 / (1 - load) times, as the time in a queue grows with the load of its server.

Only the first of the waiting requests is judged, and its clock starts when it gets there.  Requests behind it are not
late: store and staging serve the queue in order.  Judged one by one, a whole queue would be recomputed.

Where recomputing overtakes the fetch by little, blocks under way are on average as soon as recomputing them, and would
be waste.  So up to STOP_FACTOR times recomputing the daemon is told to order no more, and the request waits for these,
under the same two bounds.  Either is final: afterwards the ready blocks are claimed, and the rest is recomputed.

Visits say little of the arrival of the first blocks: after a long step, or seconds without a free place, only that they
came since the last visit.  So a latency that fits the belief leaves the belief as it is.

Staged blocks are loaded before the forward or beside it (`loads_beside`) by the same price: before it, the copy holds
up every running request; beside it, only its own, by a step.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .steps import StepTimes

Policy = Literal["best_effort", "wait", "timeout", "adaptive"]

RISK = 0.5
PATIENCE = 2.0
LEAVE_FACTOR = 1.25
STOP_FACTOR = 2.0
# `wait` ends here at the latest; a daemon that died or hangs ends it at once.
WAIT_BOUND_NS = 300 * 10**9
# Between two visits of an idle engine: vLLM sleeps 1 ms when a step executed nothing.
IDLE_VISIT_NS = 1_250_000.0
# The weight of what is known of fetches halves in this waiting time; after so long without a wait it is forgotten, so
# that the next request finds out.
_MEMORY_NS = 0.5e9
_FORGET_NS = 10 * 10**9


class Verdict(enum.Enum):
    """WAIT for the next visit; TAKE what is ready, as recomputing the rest is sooner; LATE: the bound is reached.

    STOP: as WAIT, but only for the blocks that are under way: recomputing the others is sooner.
    """

    WAIT = "wait"
    STOP = "stop"
    TAKE = "take"
    LATE = "late"


class Visit(NamedTuple):
    """vLLM asks about a request: blocks [0, start) are local, blocks [start, usable) are of use.

    `load`: share of the engine's places that are in use, below 1.
    """

    start: int
    usable: int
    now_ns: int
    load: float


@dataclass(slots=True)
class Wait:
    """One admission's wait from its first visit on; `counts`: it is judged (adaptive: once no request before it waits).

    Block counts are absolute. `visited_ns`: the last visit that found it waiting.  What was expected, each 0 where
    nothing was known: `expected_ns`, the whole wait at its begin, `first_ns`, its part up to the first blocks, and
    `block_ns`, the time per block when the last ones came, which were `came`.  `stopped`: the daemon was told to order
    no more blocks.
    """

    policy: Policy
    began_ns: int
    bound_ns: int
    began_ready: int
    ready: int
    progress_ns: int
    visited_ns: int
    # The first progress: (when, blocks ready). The pace is what came after it.
    first: tuple[int, int] | None = None
    visits: int = 0
    counts: bool = True
    expected_ns: float = 0.0
    first_ns: float = 0.0
    block_ns: float = 0.0
    came: int = 0
    stopped: bool = False

    @classmethod
    def begin(cls, policy: Policy, timeout_ms: int, now_ns: int, ready: int) -> Wait:
        bound = WAIT_BOUND_NS if policy == "wait" else timeout_ms * 1_000_000
        return cls(policy, now_ns, now_ns + bound, ready, ready, now_ns, now_ns, counts=policy != "adaptive")

    def first_in_line(self, ready: int, now_ns: int) -> None:
        """No request before it waits any more: from now on it is judged."""
        if not self.counts:
            self.counts = True
            self.began_ns, self.bound_ns, self.progress_ns = now_ns, self.bound_ns - self.began_ns + now_ns, now_ns
            self.visited_ns = now_ns
            self.began_ready = self.ready = ready

    def refetched(self, ready: int) -> None:
        """Blocks were taken back; clock and bounds go on."""
        self.began_ready, self.ready, self.first = ready, ready, None

    def silence_ns(self, missing: int) -> float:
        """Time without blocks that was expected when the last ones came, or when it began; 0 when nothing was known."""
        return self.first_ns if self.first is None else self.block_ns * min(self.came, missing)

    def pace_ns(self, until_ns: int) -> float:
        """Time per block of those that came after the first ones, up to then; the shorter one with and without these.

        0 while only the first ones are there.
        """
        if self.first is None or self.ready == self.first[1]:
            return 0.0
        first_ns, first_ready = self.first
        overall = (until_ns - self.began_ns) / (self.ready - self.began_ready)
        return min((until_ns - first_ns) / (self.ready - first_ready), overall)


class _FirstBlocks:
    """The time until the first blocks came, by their number: a short prompt's come sooner than those of a long one.

    A line through what was seen, by least squares with forgetting.  It neither falls nor goes below zero; one number of
    blocks alone makes a time per block.  Beyond the most that was seen it is level: more come one after the other.
    """

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = self._most = 0.0

    @property
    def total_ns(self) -> float:
        return self._y

    def add(self, blocks: int, passed_ns: float) -> None:
        """So many blocks came together, or were missing at the end of a wait in silence."""
        x = float(blocks)
        self._n, self._x, self._y = self._n + 1, self._x + x, self._y + passed_ns
        self._xx, self._xy = self._xx + x * x, self._xy + x * passed_ns
        self._most = max(self._most, x)

    def fade(self, keep: float) -> None:
        self._n, self._x, self._y = keep * self._n, keep * self._x, keep * self._y
        self._xx, self._xy = keep * self._xx, keep * self._xy
        if not keep:
            self._most = 0.0

    def expected_ns(self, blocks: int) -> float:
        """The time until the first of so many blocks; 0 when nothing is known."""
        if not self._n:
            return 0.0
        x, y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - x * x
        slope = (self._xy / self._n - x * y) / spread if spread > 1e-6 * x * x else y / x
        return max(0.0, y + min(max(slope, 0.0), y / x) * (min(blocks, self._most) - x))


class Fetches:
    """The arrival of blocks for requests that waited lately: the latency to the first ones, and the pace after them."""

    def __init__(self) -> None:
        self._firsts = _FirstBlocks()
        self._first_blocks = 0.0
        self._pace_ns = self._blocks = 0.0
        self._seen_ns = -_FORGET_NS
        self._came = False  # whether blocks are the last that is known, not silence

    def saw(self, wait: Wait, ready: int, now_ns: int) -> None:
        """Record progress. Ignored while others wait before it: the elapsed time then measures their fetches."""
        if not wait.counts:
            return
        passed, blocks = now_ns - wait.progress_ns, ready - wait.ready
        if blocks <= 0 or passed <= 0:
            return
        if wait.first is None:
            wait.first = (now_ns, ready)
            believed = max(self.latency_ns(blocks, now_ns), wait.visited_ns - wait.progress_ns)
            self._first(blocks, min(believed, passed), blocks, now_ns)
        else:
            self._next(passed, blocks, now_ns)
        wait.ready, wait.progress_ns, wait.came = ready, now_ns, blocks
        wait.block_ns = wait.pace_ns(now_ns) or self.remaining_ns(1, now_ns)
        self._came = True

    def gave_up(self, wait: Wait, missing: int, now_ns: int) -> None:
        """A wait ended in silence: the fetch takes at least so long, which is news when less was expected."""
        passed = now_ns - wait.progress_ns
        if wait.first is None and passed > self.latency_ns(missing, now_ns):
            self._first(missing, passed, 0, now_ns)
            self._came = False
        elif wait.first is not None and passed > self.remaining_ns(1, now_ns):
            self._next(passed, 1, now_ns)
            self._came = False

    def expects(self, now_ns: int) -> bool:
        """Whether what is known gives patience: it comes from blocks, not from waits that ended in silence."""
        return self._came and self._known(now_ns)

    def latency_ns(self, blocks: int, now_ns: int) -> float:
        """Time from the first visit to the first of so many blocks; 0 when not known."""
        return self._firsts.expected_ns(blocks) if self._known(now_ns) else 0.0

    def remaining_ns(self, blocks: int, now_ns: int) -> float:
        """Time for so many blocks after the first ones; 0 when not known.

        It is the shorter of the times with and without the first ones: visits are far apart, so the blocks after the
        first ones may be the few that missed a visit.
        """
        if not self._blocks or not self._known(now_ns):
            return 0.0
        overall = (self._firsts.total_ns + self._pace_ns) / (self._first_blocks + self._blocks)
        return blocks * min(overall, self._pace_ns / self._blocks)

    def _known(self, now_ns: int) -> bool:
        return now_ns - self._seen_ns < _FORGET_NS

    def _first(self, awaited: int, passed_ns: float, blocks: int, now_ns: int) -> None:
        self._fade(passed_ns, now_ns)
        self._firsts.add(awaited, passed_ns)
        self._first_blocks += blocks

    def _next(self, passed_ns: int, blocks: int, now_ns: int) -> None:
        self._fade(passed_ns, now_ns)
        self._pace_ns += passed_ns
        self._blocks += blocks

    def _fade(self, passed_ns: float, now_ns: int) -> None:
        keep = 0.5 ** (passed_ns / _MEMORY_NS) if now_ns - self._seen_ns < _FORGET_NS else 0.0
        self._firsts.fade(keep)
        self._first_blocks *= keep
        self._pace_ns *= keep
        self._blocks *= keep
        self._seen_ns = now_ns


def loads_beside(size_bytes: int, max_bytes: int, *, load: float) -> bool:
    """Whether a load runs beside the forward; up to `max_bytes` run before that of an empty engine."""
    return size_bytes > max_bytes * (1.0 - load)


class WaitPolicy:
    """The verdicts for one engine, from its measured steps and fetches."""

    def __init__(self, steps: StepTimes, block_tokens: int) -> None:
        self.fetches = Fetches()
        self._steps, self._block_tokens = steps, block_tokens

    def recompute_ns(self, blocks: int) -> float:
        """Time to recompute so many blocks: the most that waiting for them can save."""
        return self._steps.prefill_ns(blocks * self._block_tokens)

    def verdict(self, wait: Wait, ready: int, limit: int, now_ns: int, *, load: float, first: bool = True) -> Verdict:
        """One visit: blocks [0, ready) are ready and no more than [0, limit) will come.

        `load`: as in Visit; with 0 the engine visits again after IDLE_VISIT_NS.  `first`: no request before it waits.
        """
        if first:
            wait.first_in_line(ready, now_ns)
        elif not wait.counts:
            return Verdict.WAIT
        if ready < wait.ready:
            wait.refetched(ready)
        self.fetches.saw(wait, ready, now_ns)
        wait.visits, wait.visited_ns = wait.visits + 1, now_ns
        verdict = self._judge(wait, max(0, limit - ready), now_ns, load)
        if verdict in (Verdict.TAKE, Verdict.LATE) and wait.visits > 1:
            self.fetches.gave_up(wait, max(1, limit - ready), now_ns)
        return verdict

    def _judge(self, wait: Wait, missing: int, now_ns: int, load: float) -> Verdict:
        if wait.policy == "best_effort":
            return Verdict.TAKE
        if now_ns >= wait.bound_ns:
            return Verdict.LATE
        if wait.policy != "adaptive":
            return Verdict.WAIT
        price = 1.0 / (1.0 - load)
        saved = price * self.recompute_ns(missing)
        expected = self._expected_ns(wait, missing, now_ns)
        if wait.visits == 1 and self.fetches.expects(now_ns):
            wait.expected_ns, wait.first_ns = expected, self.fetches.latency_ns(missing, now_ns)
        if now_ns - wait.progress_ns > max(RISK * saved, PATIENCE * wait.silence_ns(missing)):
            return Verdict.TAKE
        gained = wait.ready - wait.began_ready
        lost = now_ns - wait.began_ns - price * self.recompute_ns(gained)
        total = price * self.recompute_ns(gained + missing)
        if lost > max(RISK * total, min(PATIENCE * wait.expected_ns, total)):
            return Verdict.TAKE
        visit = IDLE_VISIT_NS if load == 0.0 else max(self._steps.step_ns, 1.0)
        most, latency = LEAVE_FACTOR * saved, self.fetches.latency_ns(missing, now_ns)
        if wait.visits == 1:
            most = saved if latency <= max(RISK * saved, wait.first_ns) else 0.0
            expected += bool(latency) * visit / 2  # it is known from the last visit that found nothing
        seen = visit * max(1, math.ceil(expected / visit))
        if seen <= most and not wait.stopped:
            return Verdict.WAIT
        if wait.visits == 1:
            wait.expected_ns = 0.0  # nothing was promised
        if wait.stopped and seen <= STOP_FACTOR * saved:
            return Verdict.WAIT
        return Verdict.STOP if most >= visit and seen <= STOP_FACTOR * saved else Verdict.TAKE

    def _expected_ns(self, wait: Wait, missing: int, now_ns: int) -> float:
        """Time that the missing blocks still take; 0 when nothing is known."""
        silent = now_ns - wait.progress_ns
        if wait.first is None:
            first = max(0.0, self.fetches.latency_ns(missing, now_ns) - silent)
            return first + self.fetches.remaining_ns(missing, now_ns)
        late = silent > PATIENCE * wait.silence_ns(missing)  # then it is slower than it was
        pace = wait.pace_ns(now_ns if late else wait.progress_ns)
        left = missing * pace if pace else self.fetches.remaining_ns(missing, now_ns)
        return left if late else max(0.0, left - silent)
