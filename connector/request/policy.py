"""Decide whether a request at the head of the queue waits for missing blocks or takes the ready ones. Pure: no clock.

`best_effort` never waits; `timeout` waits until its bound; `wait` until the fetch ends, under a bound that only a
broken daemon reaches.  `adaptive` compares waiting with recomputing the missing blocks: their tokens, times the cost of
a prefill token (steps.py), times 1 / (1 - load).  Recomputing keeps a place and lengthens every step: the fewer places
are free, the more requests wait behind it, as in a queue by the load of its server.

* It waits while blocks came for it or another of the engine's requests within SILENCE of that time, and while the
  missing ones need less than that at the pace at which these came.  Others' blocks count: they take turns on the link.
* Otherwise it stops the fetch: the daemon orders no more, and what is under way is waited for.  It is there about as
  soon as recomputed, and would be waste.
* It takes what is ready once none of its own blocks came for STOP_FACTOR times as long.

A gain smaller than the time to the next visit is not waited for.  Before a prefill was measured every request waits: a
guess of its cost would be a guess of the verdict.  The first blocks of all tell no pace, since connections were set up
before them.  Nothing is remembered of earlier fetches.

Only the first of the waiting requests is judged, and its clock starts when it gets there.  Requests behind it are not
late: store and staging serve the queue in order.  Judged one by one, a whole queue would be recomputed.

Staged blocks are loaded before the forward or beside it (`loads_beside`) by the same price: before it, the copy holds
up every running request; beside it, only its own, by a step.  While the step under way runs it holds up nobody.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

from ..engine.steps import StepTimes
from ..words.config import Policy

SILENCE = 0.75
COPIED_IN_NS = 670_000  # as many bytes as are copied before the forward: 32 MiB over a bus of 50 GB/s
STOP_FACTOR = 2.0
# `wait` ends here at the latest; a daemon that died or hangs ends it at once.
WAIT_BOUND_NS = 300 * 10**9
# Between two visits of an idle engine: vLLM sleeps 1 ms when a step executed nothing.
IDLE_VISIT_NS = 1_250_000.0


class Verdict(enum.Enum):
    """WAIT for the next visit; TAKE what is ready, as recomputing the rest is sooner; TIMED_OUT: the bound is reached.

    STOP: as WAIT, but only for the blocks that are under way: recomputing the others is sooner.
    """

    WAIT = "wait"
    STOP = "stop"
    TAKE = "take"
    TIMED_OUT = "timed_out"


class Visit(NamedTuple):
    """vLLM asks about a request: blocks [0, start) are local, blocks [start, usable) are of use.

    `load`: share of the engine's places that are in use, below 1.
    """

    start: int
    usable: int
    now_ns: int
    load: float


@dataclass(slots=True, init=False)
class Wait:
    """One admission's wait from its first visit on; `counts`: it is judged (adaptive: once no request before it waits).

    `ready` blocks, an absolute number, were seen at `progress_ns`.  `base`: the blocks that had come for any request at
    `began_ns`, from when on the pace is measured.  `stopped`: the daemon was told to order no more blocks.  `hinted`:
    when the request was, and how many of its blocks came since; the caller sets it until it is judged.
    """

    policy: Policy
    began_ns: int
    bound_ns: int
    ready: int
    progress_ns: int
    base: int
    counts: bool
    stopped: bool
    hinted: tuple[int, int]

    def __init__(self, policy: Policy, timeout_ms: int, now_ns: int, ready: int) -> None:
        self.policy, self.ready, self.base = policy, ready, 0
        self.bound_ns = now_ns + (WAIT_BOUND_NS if policy == "wait" else timeout_ms * 1_000_000)
        self.restart(now_ns)

    def restart(self, now_ns: int) -> None:
        """The engine lost local blocks, and what came for it is of no use: another fetch begins. The bound stays."""
        self.began_ns = self.progress_ns = now_ns
        self.counts, self.stopped, self.hinted = self.policy != "adaptive", False, (0, 0)


def copy_ns(size_bytes: int, max_bytes: int) -> float:
    """About how long a copy takes where `max_bytes` are what may hold up an empty engine."""
    return COPIED_IN_NS * size_bytes / max_bytes if max_bytes else math.inf


def loads_beside(size_bytes: int, max_bytes: int, *, load: float, hidden_ns: float = 0.0) -> bool:
    """Whether a load runs beside the forward; up to `max_bytes` run before that of an empty engine.

    `hidden_ns`: for so long the step under way runs, and the copy holds up nobody.
    """
    return copy_ns(size_bytes, max_bytes) - max(hidden_ns, 0.0) > COPIED_IN_NS * (1.0 - load)


class WaitPolicy:
    """The verdicts for one engine, from its measured steps and the blocks that its visits see."""

    def __init__(self, steps: StepTimes, block_tokens: int, replayed_tokens: int = 0) -> None:
        self._steps, self._block_tokens, self._replayed_tokens = steps, block_tokens, replayed_tokens
        self._came = self._came_ns = 0  # blocks for any request that waited, and when the last ones were seen

    def cost_ns(self, start: int, stop: int, load: float) -> float:
        """What recomputing blocks [start, stop) costs the engine; inf until that was measured. `load`: as in Visit.

        Of a hit vLLM computes `replayed_tokens` in any case.  With a load of 0 it is the time that recomputing takes:
        the most that waiting for these blocks can save.
        """
        replayed, size = self._replayed_tokens, self._block_tokens
        return self._steps.prefill_ns(max(0, stop * size - replayed) - max(0, start * size - replayed)) / (1.0 - load)

    def saw(self, wait: Wait, ready: int, now_ns: int) -> None:
        """A visit finds so many blocks ready: more than before, or fewer as some were taken back."""
        if ready > wait.ready:
            self._came, self._came_ns, wait.progress_ns = self._came + ready - wait.ready, now_ns, now_ns
        wait.ready = ready

    def verdict(self, wait: Wait, ready: int, limit: int, now_ns: int, *, load: float, first: bool = True) -> Verdict:
        """One visit: blocks [0, ready) are ready and no more than [0, limit) will come.

        `load`: as in Visit; with 0 the engine visits again after IDLE_VISIT_NS.  `first`: no request before it waits.
        """
        before_ns = self._came_ns
        self.saw(wait, ready, now_ns)
        if first and not wait.counts:
            wait.counts, wait.bound_ns = True, wait.bound_ns - wait.began_ns + now_ns
            hinted_ns, came = wait.hinted
            wait.began_ns = max(hinted_ns, before_ns) if came else now_ns
            wait.base, wait.progress_ns = self._came - came, now_ns
        if not before_ns and self._came:  # the first blocks of all tell no pace
            wait.base, wait.began_ns = self._came, now_ns
        if wait.policy == "best_effort":
            return Verdict.TAKE
        if wait.counts and now_ns >= wait.bound_ns:
            return Verdict.TIMED_OUT
        if wait.policy != "adaptive" or not wait.counts:
            return Verdict.WAIT
        missing = max(0, limit - ready)
        most = SILENCE * self.cost_ns(ready, ready + missing, load)
        visit = self._steps.decode_ns if load else IDLE_VISIT_NS
        if now_ns - wait.progress_ns > STOP_FACTOR * most or (most < visit and not wait.stopped):
            return Verdict.TAKE
        seen_ns, came = max(wait.progress_ns, self._came_ns), self._came - wait.base
        silent = now_ns - seen_ns
        left = missing * (seen_ns - wait.began_ns) / came - silent if came > 0 else 0.0
        return Verdict.WAIT if wait.stopped or max(left, silent) <= most else Verdict.STOP
