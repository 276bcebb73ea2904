"""The scheduler side: hints at arrival, one flag load per poll, claims before answers, slots back when acknowledged.

Rules that keep the engine's contract:

* An answer is given only for claimed blocks with slot numbers that were read and checked, so a dispatched load cannot
  fail.  It is honoured even when the daemon dies right after: the bytes lie in segments that the workers have mapped
  and nobody writes any more.  A claim that its pass does not use is given up at the pass's end, but for one whose load
  vLLM waits for: it names the blocks in a later pass.
* A dispatched load belongs to its load_id: finish, abort, preemption and an ended epoch do not touch it.
* A request is settled once it was admitted, missed, or used up its hints on demand: none more until it is preempted.
* After a reset nothing is hinted, loaded or saved before the weights have an id that the daemon knows (resets.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from ...shmring.errors import SegmentCorrupt
from ...shmring.wire.records import Outcome
from ..attach.epoch import ALIVE, SchedulerEpoch
from ..attach.link import Link
from ..engine.geometry import Geometry
from ..engine.steps import MAX_IN_FLIGHT, StepTimes
from ..identity.adapters import Adapters
from ..request import hints
from ..request.claims import NOTHING, PENDING, Claims, Clock, Matched, SystemClock
from ..request.hints import Handle
from ..request.loads import not_given
from ..request.policy import WaitPolicy
from ..request.reported import Reported
from ..request.request_state import (
    ANSWERED,
    ELSEWHERE,
    LOADING,
    RUNNING,
    SAVING,
    SETTLED,
    UNSENT,
    Pass,
    Phase,
    RequestState,
    prefill_tokens,
    prefilled_elsewhere,
)
from ..request.slack import Slack
from ..words.config import ConnectorConfig
from ..words.guards import detaching
from ..words.metadata import KVPrefetchMetadata, KVPrefetchWorkerMeta
from ..words.request_hints import NO_HINTS
from .attachment import Attachment
from .early import EarlyHints
from .firsts import Firsts
from .uses import Uses

MEASURED_STEPS = 8  # of the steps with nothing to do one in so many is measured


class SchedulerSide(Attachment):
    """One engine's scheduler. With `publish`, `take_events` gives KV events."""

    def __init__(
        self,
        config: ConnectorConfig,
        geometry: Geometry,
        link: Link[SchedulerEpoch],
        *,
        clock: Clock | None = None,
        publish: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        clock, self._saving = clock or SystemClock(), geometry.saves and config.mode == "on"
        adapters = adapters or Adapters(geometry.world_size)
        super().__init__(config, geometry, link, adapters, publish=publish and self._saving)
        self.phases: list[dict[RequestState, None]] = [{} for _ in Phase]  # the same, by phase
        self._unfilled = False  # whether one of them may have blocks which a failed load left unfilled
        self._pass_before = Pass()
        # Those that a step in flight may have admitted: that step's number - 1, their hashes, and vLLM's blocks.
        self.admitted = deque[tuple[int, list[bytes], Sequence[Sequence[Any]]]]()
        self._now_ns, self._hinting = clock.now_ns, config.hint_on_arrival
        self.steps = StepTimes()
        self.policy = WaitPolicy(self.steps, geometry.block_tokens, geometry.replayed_tokens)
        self._firsts = Firsts(self.policy, geometry.block_tokens)
        saves = self.saves if self._saving else None
        self.uses = Uses(geometry, link, saves, self.events)
        self.claims = Claims(config, geometry, self.policy, saves, self.counters, clock)
        ahead = geometry.ahead and not geometry.lockstep
        self.slack = self.claims.slack = Slack(self.steps, allowed=ahead, overlap=geometry.fenced_blocks)
        self.reported = self.claims.reported = Reported(self.steps, overlapping=geometry.overlapping)
        early = geometry.loads and config.hint_on_arrival
        self.early = EarlyHints(link, self.resets, self.adapters, self.claims, clock.now_ns, allowed=early)
        # While nothing goes on, and vLLM asked about and admitted no request in this pass: the steps that may go by
        # with the metadata `quiet` before plan_step has to see one (the hook build_connector_meta counts them).
        self.quiet_steps = 0
        # Of a prompt of tokens mixed with embeddings vLLM hashes each embedding, also where a token counts: its blocks
        # have other prompts' hashes.  Once one came, blocks of embeddings in the engine's own cache may be such blocks.
        self._mixed = False

    # --- arrival ----------------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A new request: send one hint, unless there is nothing to gain."""
        if request.resumable or request.prompt_is_token_ids is not None:
            self._arrived_alone(request)
            return
        if self.early.waiting and self._adopt(request):
            return
        geometry, claims, own, names = self._geometry, self.claims, NO_HINTS, None
        tokens, digests = request.num_prompt_tokens, request.block_hashes
        hashed = len(digests) * claims.hash_tokens - claims.proof_tokens
        usable = max(0, min(tokens - claims.last_tokens, hashed) // geometry.block_tokens)
        if request.lora_request is not None:
            digests = (names := self.adapters.names(request)) and names.up_to_date()
        handle: Handle | None = None
        full: SchedulerEpoch | None = None  # that has no room for the hint
        now, hinting = 0, self._hinting
        if request.kv_hints is not None or request.kv_transfer_params:
            own = claims.own_hints(request)
            hinting = hinting and not prefilled_elsewhere(request)
        loadable = geometry.loads and own.fetch and not request.skip_reading_prefix_cache
        if loadable and digests and hinting:
            try:
                epoch, link = self._epoch, self.link
                if epoch is not link.epoch or link.confirmed_reset < self.resets.generation:
                    epoch = self._usable_epoch()
                if epoch is not None and epoch.status(now := self._now_ns()) == ALIVE:
                    local = self.cache.tokens(request) // geometry.block_tokens
                    if own is not NO_HINTS:
                        usable = min(usable, local + own.max_load_tokens // geometry.block_tokens)
                    if local < usable > claims.worthless:
                        handle = claims.push(request, digests, (local, usable), epoch, (now, False), own)
                        if handle is None:
                            full = epoch
                        else:
                            self.counters["hints"] += 1
            except SegmentCorrupt as error:
                self.detach(error)
        hint = None if handle is None else (handle, now)
        self.requests[request.request_id] = state = RequestState(self.phases, request, loadable, tokens, usable, hint)
        if names is not None:
            state.names = names
        if full is not None:
            claims.drop(state, full)
            self.quiet_steps = 0

    def _arrived_alone(self, request: Any) -> None:
        """Nothing of it is shared: vLLM never asks about a session's later chunks, and may cut its tokens back."""
        if request.prompt_is_token_ids is not None and not self._mixed:
            self._mixed = True
            self.saves.forget_left()
        state = RequestState(self.phases, request, False, request.num_prompt_tokens, 0)
        state.keep_alone()
        self.requests[request.request_id] = state

    def _adopt(self, request: Any) -> bool:
        """Whether this request was hinted at before it came here, and that counts."""
        self._usable_epoch()
        try:
            early = self.early.adopt(request, self._epoch)
        except SegmentCorrupt as error:
            self.detach(error)
            return False
        if early is None:
            return False
        self.counters["hints"] += 1
        hint, tokens = (early.handle, early.hinted_ns), request.num_prompt_tokens
        state = RequestState(self.phases, request, True, tokens, early.handle.blocks, hint)
        self.requests[request.request_id] = state
        state.names = early.names
        return True

    def _ambiguous(self, request: Any) -> bool:
        """Whether its blocks in the engine's own cache may be those of a mixed prompt, once one came."""
        return request.prompt_embeds is not None

    # --- matching ---------------------------------------------------------------------------------------------------

    def match(self, request: Any, num_computed_tokens: int) -> Matched:
        """vLLM's get_num_new_matched_tokens: may be asked any number of times, makes no system call while pending."""
        self.quiet_steps = 0
        state = self.requests.get(request.request_id)
        if state is None:
            return NOTHING
        this_pass = self.claims.this_pass
        try:
            if state.deferred_ns:
                if (
                    this_pass.waits
                    and not self._stale_local
                    and self.link.epoch is self._epoch
                    and self.claims.waits_behind(state, num_computed_tokens)
                ):
                    self.counters["waits"] += state.defer(state.deferred_ns, this_pass)
                    return PENDING
                self.counters["wait_ns"] += state.resume(self._now_ns())
            if state.preemptions != request.num_preemptions:
                state.restart(tokens := request.num_tokens, self.claims.usable_blocks(request, tokens))
            start = num_computed_tokens // self._geometry.block_tokens
            if start and self._unfilled:
                self._unfilled = any(each.unfilled for each in self.requests.values())
            if (start and (self._stale_local or self._unfilled)) or (self._mixed and self._ambiguous(request)):
                state.taint()
            if state.phase >= LOADING and state.not_loaded():
                # It has no blocks, but vLLM keeps it before requests that do. PENDING lets those run and free blocks.
                return PENDING
            if state.phase >= ELSEWHERE or not state.loadable:
                return self._used(state, start) if start and state.phase != SETTLED else NOTHING
            if (answer := state.answer) is not None:
                if answer.start == start:
                    return answer.count * self._geometry.block_tokens, answer.asynchronous
                self.claims.withdraw(state)
            epoch, link = self._epoch, self.link
            if epoch is not link.epoch or link.confirmed_reset < self.resets.generation:
                epoch = self._usable_epoch()
            if epoch is None or (request.lora_request is not None and state.names is None):
                return NOTHING
            if start >= state.usable:
                return self._used(state, start)
            running = len(self.phases[SAVING]) + len(self.phases[RUNNING])
            reply = self.claims.match(state, epoch, start, running=running)
            if reply[0] is None and state.wait is not None:  # otherwise it only gives way to requests before it
                self.counters["waits"] += state.defer(self._now_ns(), this_pass)
            return reply
        except SegmentCorrupt as error:
            self.detach(error)
            return NOTHING

    def _used(self, state: RequestState, blocks: int) -> Matched:
        """A request is about to use so many local blocks, which no hint named, and needs no others."""
        if not state.tainted and (digests := state.digests) and (epoch := self._usable_epoch()):
            self.uses.say(digests, blocks, epoch, self._now_ns())
        return NOTHING

    # --- after allocation -------------------------------------------------------------------------------------------

    def allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM's update_state_after_alloc; `blocks`: the request's, vLLM's KVCacheBlocks."""
        self.quiet_steps = 0
        state = self.requests.get(request.request_id)
        if num_external_tokens > 0:
            if state is None:
                raise not_given(request.request_id, num_external_tokens)
            self.loads.dispatch(state, blocks, num_external_tokens)
        elif state is not None:
            self._admitted_without_load(state)
        if self.slack.allowed and request.use_structured_output and state is not None:
            self.slack.grammars.add(state)
        (admitted := self.admitted).append((self.steps.begun, request.block_hashes, blocks.blocks))
        while admitted[0][0] < self.steps.begun - MAX_IN_FLIGHT:
            admitted.popleft()
        if state is not None and self._saving and state.phase == RUNNING and not self.saves.complete(state):
            state.save(more=True)

    @detaching(None)
    def _admitted_without_load(self, state: RequestState) -> None:
        """Recomputed, all local, or another connector's: also the second call after an asynchronous load."""
        self.claims.give_back(state.admit(), Outcome.UNUSED)

    # --- the step ---------------------------------------------------------------------------------------------------

    def _is_still(self) -> bool:
        """Whether nothing goes on that the next step would have to see, if it only decodes."""
        return not (
            self.loads.running
            or (self.phases[SAVING] and self._epoch is not None)
            or self.saves.left
            or self.saves.copied
            or self.phases[UNSENT]
            or self.link.absent
            or self.uses.to_look_at
            or self._pass_before.deferred
        )

    def take_loads(self, output: Any) -> KVPrefetchMetadata:
        """The step's metadata with the loads dispatched in this pass: they are in it whatever else goes wrong."""
        weights = self.resets.step._replace(computes=bool(output.num_scheduled_tokens))
        orders, self.loads.orders = self.loads.orders, []
        if orders or weights.computes:
            self.reported.begins()
        overlap = bool(orders) and self.slack.overlaps(output)
        live = self.live_epochs() if self.loads.running else self.quiet.live_epochs
        return KVPrefetchMetadata(orders, live_epochs=live, weights=weights, overlap=overlap)

    def plan_step(self, output: Any, meta: KVPrefetchMetadata) -> None:
        """The rest of build_connector_meta: give up unused answers, plan saves, push SAVED records."""
        total, prefill, now = output.total_num_scheduled_tokens, 0, self._now_ns()
        if total != len(output.num_scheduled_tokens):  # otherwise every request has one token
            prefill = prefill_tokens(output, self.requests)
        self.steps.began(now, prefill, executed=total > 0, typical=not meta.loads)
        if self.slack.expected is not None:
            self.slack.launched(now)
        before, self._pass_before, self.claims.this_pass = self._pass_before, self.claims.this_pass, Pass()
        if before.deferred:
            self.counters["wait_ns"] += before.passed_over(now)
        try:
            epoch = self._usable_epoch()
            for state in self._pass_before.answered:
                if state.phase == ANSWERED:
                    self.claims.withdraw(state)
            if self.early.waiting:
                self.early.forget(self._epoch, now)
            if self.link.absent or self.uses.to_look_at:
                stale = self._stale_local or self._mixed
                self.uses.heal(epoch, self.cache, self.requests.values(), stale=stale)
            saving, unsent = self.phases[SAVING], self.phases[UNSENT]
            if self._epoch is not None and (saving or unsent or self.saves.left) and self._epoch.status(now) == ALIVE:
                if unsent and epoch is not None:
                    self.claims.send_unsent([*unsent], epoch, self.cache.tokens)
                meta.saves.extend(self.saves.plan_step(epoch, output, self.cache, [*saving]))
            if self.saves.copied and self._epoch is not None:
                self.saves.flush(self._epoch)
        except SegmentCorrupt as error:
            self.detach(error)
        self.quiet_steps = MEASURED_STEPS if self._is_still() else 0

    def step_ended(self) -> bool:
        """The output of the oldest step in flight was processed. Return whether the statistics are to be reported."""
        now = self._now_ns()
        if self.slack.expected is not None:
            self.counters["slack_overruns"] += self.slack.ended(now)
        return self.steps.report_due(now, busy=bool(self.requests))

    def outputs(self, worker_meta: Any, *, failed_blocks: Collection[int] = ()) -> None:
        """vLLM's update_connector_output: the ranks' reports, and the blocks that a load left unfilled.

        The load may be another connector's (MultiConnector).  The engine recomputes these blocks, but steps in flight
        have used their old content, also for requests that share them.
        """
        if failed_blocks:
            self.saves.drop()
            for state in self.requests.values():
                if state.phase >= LOADING:
                    state.taint(unfilled=True)
                    self._unfilled = True
            self.cache.forget(failed_blocks, [(hashes, blocks[0]) for _, hashes, blocks in self.admitted])
        if not isinstance(worker_meta, KVPrefetchWorkerMeta):
            return
        if worker_meta.adapters:  # before the saves: some of them may be of another content than they are named after
            if self.adapters.read(worker_meta.adapters):
                self.saves.drop()
            for state in self.adapters.name(self.requests.values()):
                self._give_back(state.let_go(), Outcome.VOIDED)
        if worker_meta.weights:
            self._weights_reported(worker_meta.weights)
        if worker_meta.saves:
            self.saves.acknowledge(worker_meta.saves, worker_meta.failed_saves)
            if self._firsts.save:
                self._firsts.saved(self.saves.copied)
        try:
            if worker_meta.loads:
                now = self._now_ns()
                if self.uses.lost:
                    self.uses.loaded()
                for load in self.loads.acknowledge(worker_meta.loads, worker_meta.failed_loads):
                    if load.handle.epoch is self._epoch:
                        self._announce(load, now, failed=worker_meta.failed_loads)
                        hints.finish(load.handle, Outcome.LOADED, loaded=load.blocks, loaded_ns=now)
                    if self._firsts.hit and not worker_meta.failed_loads:
                        self._firsts.loaded(load, self.requests.get(load.request_id))
            if self.saves.copied and self._epoch is not None:
                self.saves.flush(self._epoch)
        except SegmentCorrupt as error:
            self.detach(error)
        if not self._is_still():
            self.quiet_steps = 0
        elif not self.quiet_steps:
            self.quiet_steps = MEASURED_STEPS

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although it has no request: acknowledgements come with steps."""
        if self.loads.running or self.saves.waiting:
            return True
        epoch, soon = self._epoch, bool(self.saves.copied or self.link.absent or self.uses.to_look_at)
        if epoch is None or not (soon or self.saves.left):
            return False
        try:
            return epoch.status(self._now_ns()) == ALIVE and (soon or epoch.credits.available() > 0)
        except SegmentCorrupt as error:
            self.detach(error)
            return False

    # --- ends -------------------------------------------------------------------------------------------------------

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]] = ((),)) -> None:
        """The request has ended, for whatever reason, and gives these blocks back; a dispatched load goes on."""
        state = self.requests.pop(request.request_id, None)
        if not self.requests:
            self.steps.skip_to(0)
        if state is None:
            return
        self.slack.grammars.discard(state)
        if state.preemptions == request.num_preemptions and not (
            self._stale_local or (self._mixed and self._ambiguous(request))
        ):
            self.saves.leave(state, block_ids)
        if state.deferred_ns:
            self.counters["wait_ns"] += state.resume(self._now_ns())
        if (handle := state.end()) is not None:
            self._give_back(handle, Outcome.ABORTED)
