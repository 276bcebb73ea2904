"""The simulation's connector: hints, asks, claims and gives back as connector/claims.py does."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.simulate.events import Loop
from benchmarks.simulate.flags import Flag
from benchmarks.simulate.node import Node
from benchmarks.simulate.waiting import Policy
from benchmarks.simulate.workload import SimRequest
from kvprefetch.connector.policy import Verdict, Wait, WaitPolicy
from kvprefetch.connector.steps import StepTimes
from kvprefetch.shmring.wire.records import FlagState

MAX_LATE_HINTS = 3  # as in connector/claims.py, whose import needs vLLM
REVIEW_NS = 500_000  # times the number of pending requests: until the next visit of one of them
STEPS_SEEN = 30  # of a run of equal steps; the averages have forgotten all others by then
MEASURED_STEPS = 8  # as in connector/scheduler.py: one in so many of those in which nothing happens is measured


def over_when_asked(seen: float, ready: float, asked: float, claimed: float) -> float:
    """Return the share of look-up and transfer, `seen` to `ready`, that was over when the scheduler asked. Any unit."""
    late = max(0, min(ready, claimed) - max(asked, seen))
    transfer = max(0, ready - seen)
    return 1.0 - min(1.0, late / transfer) if transfer else 1.0


@dataclass(slots=True)
class ClientCounters:
    """Outcomes of requests at the head of the queue."""

    deadline_misses: int = 0
    """Waits that ran to their bound."""
    given_up: int = 0
    """Verdicts to take the ready blocks although more were coming."""
    stopped: int = 0
    """Verdicts to wait only for what is under way."""
    partial: int = 0
    """Requests that loaded fewer blocks than the store held."""
    loads: int = 0
    hidden_sum: float = 0.0


class Client:
    """The connector of one engine. `review(request, at_ns)` asks the engine to visit a pending request again then."""

    def __init__(
        self, loop: Loop, policy: Policy, node: Node, block_tokens: int, review: Callable[[SimRequest, int], None]
    ) -> None:
        self._loop, self._policy, self._node, self._review = loop, policy, node, review
        self._steps = StepTimes()
        self._waits = WaitPolicy(self._steps, block_tokens)
        self._pending_count = self._unmeasured = 0
        self._queue: list[tuple[int, int, SimRequest]] = []  # pending requests in queue order; some ended meanwhile
        self.counters = ClientCounters()
        self.hinted: dict[tuple[int, int], SimRequest] = {}

    def arrived(self, request: SimRequest, local_blocks: int) -> None:
        if self._policy.hints and self._policy.on_arrival:
            self._hint(request, local_blocks)

    def _hint(self, request: SimRequest, local_blocks: int) -> bool:
        if local_blocks >= request.blocks:
            return False
        request.key = self._node.hint(request, local_blocks)
        request.hinted_local, request.asked_ns = local_blocks, 0
        self.hinted[request.key] = request
        return True

    def match(self, request: SimRequest, start: int, *, occupied: float) -> int | None:
        """Claim and count the blocks that can be loaded after `start` local ones; None if that is not known yet.

        `occupied`: running requests, as a share of the most that may run.
        """
        self._unmeasured = 0
        if self._policy.direct:
            return self._match_directly(request, start)
        if self._policy.local or not self._policy.hints or request.settled or start >= request.blocks:
            return 0
        if request.key is not None:
            flag = self._node.flag(request.key)
            if start < request.hinted_local:
                self._give_up(request)
                request.late_hints -= 1
            elif flag.state is not FlagState.HINTED:
                return self._take(request, flag, start)
        return self._pending(request, start, occupied)

    def _pending(self, request: SimRequest, start: int, occupied: float) -> int | None:
        now = self._loop.now_ns
        flag = self._node.flag(request.key) if request.key is not None else Flag()
        ready = max(start, flag.count)
        if request.wait is None:
            request.wait = Wait(self._policy.wait, self._policy.timeout_ms, now, ready)
        wait = request.wait
        limit = min(flag.found, request.blocks) if flag.found else request.blocks
        first = self._first()
        ahead = first is not None and (first.priority, first.index) < (request.priority, request.index)
        wait.hinted = request.seen_ns, max(0, flag.count - request.hinted_local)
        verdict = self._waits.verdict(wait, ready, limit, now, load=occupied, first=not ahead)
        if verdict is Verdict.STOP:
            verdict = self._stop(request, start, flag)
        if verdict is Verdict.WAIT and request.key is None and not self._late_hint(request, start):
            verdict = Verdict.TIMED_OUT
        if verdict is Verdict.WAIT:
            assert request.key is not None
            if request.asked_ns == 0:
                request.asked_ns = now
                self._node.ask(request.key)
            if not request.pending:
                request.pending = True
                self._pending_count += 1
                heapq.heappush(self._queue, (request.priority, request.index, request))
            # Time alone changes an adaptive verdict, so ask again, less often the more requests are pending.
            adaptive = self._policy.wait == "adaptive"
            self._review(request, now + REVIEW_NS * self._pending_count if adaptive else wait.bound_ns)
            return None
        self.counters.deadline_misses += verdict is Verdict.TIMED_OUT
        self.counters.given_up += verdict is Verdict.TAKE
        if request.key is None:
            request.settled = True
            return 0
        return self._take(request, flag, start)

    def _stop(self, request: SimRequest, start: int, flag: Flag) -> Verdict:
        if request.key is None or flag.found <= start or self._node.whole:
            return Verdict.TAKE
        assert request.wait is not None
        request.wait.stopped = True
        self.counters.stopped += 1
        self._node.stop(request.key)
        return Verdict.WAIT

    def _first(self) -> SimRequest | None:
        """Return the pending request that comes first in the queue."""
        while self._queue and not self._queue[0][2].pending:
            heapq.heappop(self._queue)
        return self._queue[0][2] if self._queue else None

    def _take(self, request: SimRequest, flag: Flag, start: int) -> int:
        """Claim the published blocks, or settle on recomputing."""
        if request.wait is not None:
            self._waits.saw(request.wait, max(start, flag.count), self._loop.now_ns)
        if flag.count <= start:
            self.finished(request)
            return 0
        assert request.key is not None
        request.claimed = flag.count - start
        request.claimed_ns = self._loop.now_ns
        if flag.state is FlagState.HINTED and (request.wait is None or not request.wait.stopped):
            self._node.stop(request.key)
        self._node.claim(request.key)
        return request.claimed

    def _late_hint(self, request: SimRequest, start: int) -> bool:
        """Push a hint at a visit; False if the request had MAX_LATE_HINTS before."""
        if request.late_hints >= MAX_LATE_HINTS or not self._hint(request, start):
            return False
        request.late_hints += 1
        return True

    def step_ran(self, step_ns: int, count: int, prefill_tokens: int, loading: bool) -> None:
        """Show the policy's measurements `count` equal steps that ended now, or those of them that are measured."""
        quiet = not (prefill_tokens or loading)
        for number in range(min(count, STEPS_SEEN), 0, -1):
            if quiet and self._unmeasured:
                self._unmeasured -= 1
                continue
            self._unmeasured = MEASURED_STEPS
            end_ns = self._loop.now_ns - (number - 1) * step_ns
            self._steps.began(end_ns - step_ns, prefill_tokens, executed=True, typical=not loading)
            self._steps.ended(end_ns)

    @property
    def direct(self) -> bool:
        """Whether loads come from the store itself, not from staging."""
        return self._policy.direct

    def _match_directly(self, request: SimRequest, start: int) -> int | None:
        if request.looked_up_ns:
            return max(0, request.claimed - start)
        if request.asked_ns == 0:
            request.asked_ns = self._loop.now_ns

            def answered(found: bool) -> None:
                request.looked_up_ns = self._loop.now_ns
                request.claimed = request.found if found else 0
                self._review(request, self._loop.now_ns)

            self._node.look_up(answered)
        return None

    def withdraw(self, request: SimRequest) -> None:
        """Give a claim back: the engine did not use the answer in this pass."""
        if request.key is not None and request.claimed:
            self._node.unclaim(request.key)
            request.claimed = 0

    def load_directly(self, request: SimRequest, start: int, count: int, done: Callable[[], None]) -> None:
        """Load blocks [start, start + count) from the store; then `done`, with `request.loaded_blocks` set."""

        def complete(good: int) -> None:
            request.loaded_blocks = good
            self.counters.partial += start + good < request.found
            self.counters.loads += 1
            done()

        self._node.load_directly(request, start, start + count, complete)

    def loaded(self, request: SimRequest, start: int) -> None:
        """The claimed blocks are copied: count them and give the hint back."""
        assert request.key is not None
        request.loaded_blocks = request.claimed
        if start + request.claimed < request.found:
            self.counters.partial += 1
        self._node.loaded(request.key, start, start + request.claimed)
        del self.hinted[request.key]
        self._node.finish(request.key, lambda last_byte_ns: self._count_hidden(request, last_byte_ns))
        request.key = None
        self._settle(request)

    def _count_hidden(self, request: SimRequest, last_byte_ns: int) -> None:
        """Count the share of look-up and transfer that the queue hid."""
        ready = last_byte_ns or request.looked_up_ns
        self.counters.loads += 1
        self.counters.hidden_sum += over_when_asked(
            request.seen_ns, ready, request.asked_ns or ready, request.claimed_ns
        )

    def finished(self, request: SimRequest) -> None:
        """The request ended, or was admitted without a load."""
        self._settle(request)
        self._give_up(request)

    def _settle(self, request: SimRequest) -> None:
        request.settled = True
        if request.pending:
            request.pending = False
            self._pending_count -= 1
            if (first := self._first()) is not None:  # its verdict may differ now
                self._review(first, self._loop.now_ns)

    def _give_up(self, request: SimRequest) -> None:
        if request.key is not None:
            key, request.key, request.claimed = request.key, None, 0
            del self.hinted[key]
            self._node.finish(key)
