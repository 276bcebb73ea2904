"""The simulation's engine: vLLM's scheduling pass, step times from measured rates, a KV pool with a prefix cache.

A pass first goes on with running requests.  Then it visits waiting ones by priority and arrival, while there are slots,
tokens and KV blocks, and passes over a request that the connector cannot answer yet.  It visits a pending request again
only after its flag moved or its policy asked for it: a visit in between would give the same answer.  For that reason,
too, steps that only decode run as one event, cut at the next step's end when there is something to schedule.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from benchmarks.simulate.client import Client
from benchmarks.simulate.events import NS, Event, Loop, ns
from benchmarks.simulate.pool import KVPool
from benchmarks.simulate.workload import SimRequest
from kvprefetch.connector.policy import loads_beside
from kvprefetch.kv.groups import Group, Groups, Kind


def full_attention(block_tokens: int) -> Groups:
    """Return one KV group of full attention."""
    return Groups((Group(Kind.FULL, block_tokens),), block_tokens)


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Limits and rates. A step takes `step_s`, `sequence_s` per decoding request, and the time of prefill and loads."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 4096
    block_bytes: int = 4 << 20
    pool_blocks: int = 4096
    prefill_tokens_per_s: float = 25_000.0
    step_s: float = 0.008
    sequence_s: float = 0.00005
    admit_s: float = 0.0
    """Added to a step for each request that it starts."""
    copy_bytes_per_s: float = 20e9
    """From staging into the KV pool."""
    sync_load_max_bytes: int = 32 << 20
    """Larger loads run beside the steps of an engine with few requests, and end at least one step later."""
    idle_poll_s: float = 0.00124
    """Between two passes of an engine that has nothing to run but waits for KV."""
    groups: Groups = field(default_factory=partial(full_attention, 64))
    """KV groups with blocks of one size."""

    @property
    def block_tokens(self) -> int:
        return self.groups.unit_tokens

    def load_bytes(self, start: int, count: int) -> int:
        """Bytes of blocks [start, start + count) of a prefix, of all groups."""
        items = self.groups.items(start * self.block_tokens, (start + count) * self.block_tokens)
        return sum(map(len, items)) * self.block_bytes

    def kv_blocks(self, tokens: int) -> int:
        """KV blocks that a request of so many tokens needs at most at a time, of all groups.

        A window needs its own and those of one step; states need two (vLLM's `align` mode).
        """
        all_of_it = -(-tokens // self.block_tokens)
        blocks = 0
        for group in self.groups.groups:
            if group.kind is Kind.STATE:
                blocks += 2
            elif group.window_tokens:
                most = group.window_tokens - 1 + self.max_num_batched_tokens
                blocks += min(all_of_it, -(-most // self.block_tokens) + 1)
            else:
                blocks += all_of_it
        return blocks


class Engine:
    """Serves requests, and calls `ended(request)` once for each. `roomy`: all that the store holds is local."""

    def __init__(self, loop: Loop, model: EngineModel, *, roomy: bool, ended: Callable[[SimRequest], None]) -> None:
        self._loop, self._model, self._roomy, self._ended = loop, model, roomy, ended
        self.client: Client
        self.pool = KVPool(model.pool_blocks)
        self._visits: list[tuple[int, int, SimRequest]] = []
        self._loaded: deque[SimRequest] = deque()
        self._prefilling: deque[SimRequest] = deque()
        self._decoding: list[tuple[int, int, SimRequest]] = []  # by the decode step with which a request is complete
        self._decoding_count = 0
        self._aborting: list[SimRequest] = []
        self._steps = 0
        self._step: Event | None = None
        self._step_start_ns = self._step_ns = self._step_count = self._step_prefill = 0
        self._prefilled: list[SimRequest] = []
        self._copied: list[tuple[SimRequest, int]] = []
        self._copying_until_ns = 0
        self._admit_ns = ns(model.admit_s)
        self._idle = True
        self._full = False  # the last pass found no KV blocks
        self._unfinished = 0
        self._next_pass_ns = 0  # of an idle engine with requests

    # --- from outside -----------------------------------------------------------------------------------------------

    def add(self, request: SimRequest) -> None:
        """A request arrives."""
        total = self._total_blocks(request)
        if total > self.pool.capacity and not self._roomy:
            raise ValueError(f"request larger than the KV pool: blocks={total} pool_blocks={self.pool.capacity}")
        self._unfinished += 1
        self.client.arrived(request, self._local(request))
        self._make_visible(request)
        if request.abort_ns:
            self._loop.at(max(request.abort_ns, self._loop.now_ns), partial(self._abort, request))

    def changed(self, request: SimRequest) -> None:
        """The flag of a request moved."""
        if request.state == "waiting" and not request.visible:
            self._make_visible(request)

    def review(self, request: SimRequest, at_ns: int) -> None:
        """Visit a pending request again at this time."""
        self._loop.at(max(at_ns, self._loop.now_ns), partial(self.changed, request))

    def _make_visible(self, request: SimRequest) -> None:
        request.visible = True
        heapq.heappush(self._visits, (request.priority, request.index, request))
        self._poke()

    def _abort(self, request: SimRequest) -> None:
        if request.state == "waiting":
            self._end(request, "aborted")
        elif request.state != "ended":
            self._aborting.append(request)
            self._cut()

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> int:
        return self._decoding_count + len(self._prefilling)

    def _poke(self) -> None:
        """Schedule anew: at once if idle, after the present step if a slot is free."""
        if self._idle:
            self._idle = False
            self._loop.at(max(self._loop.now_ns, self._next_pass_ns), self._pass)
        elif self._running < self._model.max_num_seqs:
            self._cut()

    def _cut(self) -> None:
        """End a run of equal steps with the present one."""
        if self._idle:
            self._poke()
        elif self._step is not None and self._step_count > 1:
            count = max(1, -(-(self._loop.now_ns - self._step_start_ns) // self._step_ns))
            if count < self._step_count:
                self._step.cancel()
                self._step_count = count
                self._step = self._loop.at(self._step_start_ns + count * self._step_ns, self._step_end)

    def _pass(self) -> None:
        """Run one scheduling pass and begin its step."""
        for request in self._aborting:
            if request.state != "ended":
                self._end(request, "aborted")
        self._aborting.clear()
        model = self._model
        budget = model.max_num_batched_tokens - self._decoding_count
        extra_ns = 0
        for request in self._prefilling:
            budget -= self._prefill(request, budget)
        while budget > 0 and self._running < model.max_num_seqs:
            if self._loaded:
                request = self._loaded.popleft()
                if request.state == "ended":
                    continue
            else:
                admitted = self._admit()
                if admitted is None:
                    break
                request, load_ns = admitted
                if load_ns is None:
                    continue  # loads beside the steps
                extra_ns += load_ns
            extra_ns += self._admit_ns
            request.state = "prefilling"
            self._prefilling.append(request)
            budget -= self._prefill(request, budget)
        prefill_tokens = model.max_num_batched_tokens - self._decoding_count - budget
        if not self._running:
            self._idle = True
            if self._unfinished:  # vLLM sleeps a moment after a step that executed nothing
                self._next_pass_ns = self._loop.now_ns + ns(model.idle_poll_s)
            return
        once_ns = ns(model.step_s + self._decoding_count * model.sequence_s)
        once_ns += extra_ns + round(prefill_tokens / model.prefill_tokens_per_s * NS)
        count = 1
        if not self._prefilling and not self._loaded and self.blocked():
            count = self._first_finish() - self._steps
        self._step_start_ns, self._step_ns, self._step_count = self._loop.now_ns, max(1, once_ns), count
        self._step_prefill = prefill_tokens
        self._step = self._loop.after(self._step_ns * count, self._step_end)

    def blocked(self) -> bool:
        """Whether another pass would admit nobody unless something happens first."""
        return self._running >= self._model.max_num_seqs or not self._visits or self._full

    def _first_finish(self) -> int:
        while self._decoding[0][2].state == "ended":
            heapq.heappop(self._decoding)
        return self._decoding[0][0]

    def _prefill(self, request: SimRequest, budget: int) -> int:
        tokens = min(budget, request.remaining)
        request.remaining -= tokens
        if request.remaining == 0 and tokens:
            self._prefilled.append(request)
        return tokens

    def _admit(self) -> tuple[SimRequest, int | None] | None:
        """Return the next request that can run, and the time its load adds to the step (None: it runs beside)."""
        self._full = False
        while self._visits:
            request = self._visits[0][2]
            if request.state != "waiting" or not request.visible:
                heapq.heappop(self._visits)
                continue
            local = self._local(request)
            occupied = self._running / self._model.max_num_seqs
            loadable = self.client.match(request, local, occupied=occupied)
            if loadable is None:
                heapq.heappop(self._visits)
                request.visible = False
                continue
            if not self._roomy and not self.pool.allocate(request, self._total_blocks(request)):
                self.client.withdraw(request)
                self._full = True
                return None
            heapq.heappop(self._visits)
            request.visible = False
            request.local_blocks = local
            request.remaining = request.prompt_tokens - (local + loadable) * self._model.block_tokens
            size = self._model.load_bytes(local, loadable)
            copy_ns = round(size / self._model.copy_bytes_per_s * NS)
            if not loadable:
                self.client.finished(request)
            elif self.client.direct:
                request.state = "loading"
                self.client.load_directly(request, local, loadable, partial(self._loaded_directly, request, loadable))
                return request, None
            elif not self._model.groups.partial or loads_beside(size, self._model.sync_load_max_bytes, load=occupied):
                request.state = "loading"
                self._copying_until_ns = max(self._copying_until_ns, self._loop.now_ns) + copy_ns
                self._loop.at(self._copying_until_ns, partial(self._load_done, request, local))
                return request, None
            else:
                self._copied.append((request, local))
            return request, copy_ns
        return None

    def _load_done(self, request: SimRequest, local: int) -> None:
        """A load beside the steps is complete. An aborted request held its blocks until now."""
        self.client.loaded(request, local)
        self._after_load(request)

    def _loaded_directly(self, request: SimRequest, wanted: int) -> None:
        request.remaining += (wanted - request.loaded_blocks) * self._model.block_tokens
        self._after_load(request)

    def _after_load(self, request: SimRequest) -> None:
        if request.state == "ended":
            self.pool.release(request)
            self._poke()
            return
        request.state = "loaded"
        self._loaded.append(request)
        self._poke()

    def _step_end(self) -> None:
        self._step = None
        now = self._loop.now_ns
        self._steps += self._step_count
        self.client.step_ran(self._step_ns, self._step_count, self._step_prefill, bool(self._copied))
        for request, local in self._copied:
            self.client.loaded(request, local)
        self._copied.clear()
        while self._decoding and self._decoding[0][0] <= self._steps:
            request = heapq.heappop(self._decoding)[2]
            if request.state == "decoding":
                self._decoding_count -= 1
                self._end(request, "finished")
        for request in self._prefilled:
            if request.state != "prefilling":
                continue
            self._prefilling.remove(request)
            request.first_token_ns = now
            if request.output_tokens <= 1:
                self._end(request, "finished")
            else:
                request.state = "decoding"
                self._decoding_count += 1
                heapq.heappush(self._decoding, (self._steps + request.output_tokens - 1, request.index, request))
        self._prefilled.clear()
        self._pass()

    def _end(self, request: SimRequest, outcome: str) -> None:
        if request.state == "decoding" and outcome == "aborted":
            self._decoding_count -= 1
        if request.state == "prefilling" and request in self._prefilling:
            self._prefilling.remove(request)
        loading = request.state == "loading"
        if not loading:  # a load under way goes on, and its hint with it
            self.client.finished(request)
        if request.held_blocks and not loading:
            self.pool.release(request)
        request.state, request.outcome, request.ended_ns = "ended", outcome, self._loop.now_ns
        self._full = False
        self._unfinished -= 1
        self._ended(request)

    def _local(self, request: SimRequest) -> int:
        return request.found if self._roomy else self.pool.local_blocks(request)

    def _total_blocks(self, request: SimRequest) -> int:
        return self._model.kv_blocks(request.prompt_tokens + request.output_tokens)
