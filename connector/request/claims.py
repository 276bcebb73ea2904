"""From a hint to a claimed answer: the scheduler side's work for one request between arrival and allocation.

An answer is given only for blocks that are claimed, and slot numbers are read and checked under the claim, so a
dispatched load cannot fail.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from ...shmring.flags import Flag
from ...shmring.wire.records import NO_SESSION, NO_TRACE, PROTOCOL, Outcome, RecordKind, session_digest
from ..attach.epoch import SchedulerEpoch
from ..engine.geometry import Geometry
from ..words import request_hints
from ..words.config import ConnectorConfig, override
from ..words.request_hints import RequestHints
from . import hints
from .hints import EXPIRED, HINTED, READY, Handle
from .policy import Verdict, Visit, Wait, WaitPolicy, copy_ns, loads_beside
from .reported import Reported
from .request_state import UNSENT, Claim, Pass, RequestState
from .saves import Saves
from .slack import Slack

# Hints per admission after the one at arrival: for one that a reset voided, or whose daemon was replaced.
MAX_ON_DEMAND_HINTS = 3
# Blocks of dropped hints that a step sends again before it stops: their hashes are copied on the engine's thread.
RESENT_BLOCKS = 4096

Matched = tuple[int | None, bool]
NOTHING: Matched = (0, False)
PENDING: Matched = (None, False)
# A plain number and tuple.__new__: with cold caches a member of an enum, or the function that makes a named tuple,
# costs 2 us more.
_tuple = tuple.__new__
HINT = int(RecordKind.HINT)
_OVERTAKEN = (Verdict.STOP, Verdict.TAKE)
# A request's own wishes in kv_transfer_params: {"kvprefetch": {"wait_policy": ..., "wait_timeout_ms": ...}}.
OVERRIDE_KEY = "kvprefetch"

_WARN_EVERY_NS = 1_000_000_000

log = logging.getLogger("vllm.kvprefetch.scheduler")


class Clock(Protocol):
    """CLOCK_MONOTONIC, and the sleep between two looks of an idle engine."""

    def now_ns(self) -> int: ...
    def pause(self) -> None: ...


class SystemClock:
    now_ns = staticmethod(time.monotonic_ns)
    pause = staticmethod(partial(time.sleep, 50e-6))  # the kernel makes it about twice as long


class Claims:
    """The rules of hinting, waiting and claiming. Every method may raise SegmentCorrupt."""

    last_tokens = 1  # of a prompt, which are computed even when all of it is stored: vLLM samples from them

    def __init__(
        self,
        config: ConnectorConfig,
        geometry: Geometry,
        policy: WaitPolicy,
        saves: Saves | None,
        counters: Counter[str],
        clock: Clock,
    ) -> None:
        self._config, self._geometry, self._saves, self._counters = config, geometry, saves, counters
        self._policy, self._now_ns, self._pause = policy, clock.now_ns, clock.pause
        # Of several groups vLLM takes back a load that failed only where it waits for it.
        self._load_mode = config.load_mode if geometry.one_table else "async"
        self._adapter_load_mode = "sync" if geometry.takes_back_loads else "async"
        self._in_part, groups = geometry.groups.partial, geometry.groups
        # Groups.names, .digests and .blocks in numbers: on the engine's thread each call of a function takes 3 us.
        self._names, self.hash_tokens, self.proof_tokens = groups.names(1), groups.hash_tokens, groups.proof_tokens
        self.block_tokens = geometry.block_tokens
        # A hit of so many blocks saves nothing: vLLM computes as many again, and does not take it.
        self.worthless = geometry.replayed_tokens // geometry.block_tokens
        self._sync_bytes = config.sync_load_max_bytes
        self._copy_ns = copy_ns(geometry.block_bytes, self._sync_bytes)
        self._spin_ns, self._idle_wait_ns = config.spin_us * 1000, config.idle_wait_us * 1000
        self._warned_ns = -_WARN_EVERY_NS
        self._warned: set[str] = set()  # fields of requests' own hints
        self.this_pass = Pass()
        self.slack: Slack
        self.reported: Reported

    def usable_blocks(self, request: Any, tokens: int) -> int:
        """Full blocks of a request of so many tokens that leave its last ones to compute. `arrived` does the same."""
        blocks: int = (tokens - self.last_tokens) // self._geometry.block_tokens
        return min(blocks, self._geometry.groups.blocks(len(request.block_hashes)))

    def own_hints(self, request: Any) -> RequestHints:
        """The hints that a request brings with it. The first bad value of each field is one warning."""
        found = request_hints.parse(request.kv_hints, request.kv_transfer_params)
        if found.bad:
            self._counters["bad_overrides"] += 1
            for text in [found.bad[field] for field in found.bad.keys() - self._warned]:
                log.warning("kvprefetch: request %s: kv.prefetch: %s; it is ignored", request.request_id, text)
            self._warned |= found.bad.keys()
        return found

    def push(
        self,
        request: Any,
        digests: list[bytes],
        blocks: tuple[int, int],
        epoch: SchedulerEpoch,
        at: tuple[int, bool],
        own: RequestHints,
    ) -> Handle | None:
        """Hint at the second number of blocks, of which the first number are local. None without a flag or room.

        Without room the cost does not depend on the number of blocks.  `at`: the time (ns), and whether that is early.
        It counts nothing: early, the scheduler does not have the request yet, and this is another thread.
        """
        (local_blocks, usable), (now_ns, early) = blocks, at
        headers, session_id = request.trace_headers, request.session_id or own.session_id
        handle: Handle | None = epoch.producer.hint(
            HINT,
            PROTOCOL,
            early + 2 * (request.cache_salt is not None) + 4 * (request.lora_request is not None),
            HINTED,
            (usable - local_blocks) * self._names,
            (usable * self._geometry.block_tokens + self.proof_tokens) // self.hash_tokens,
            usable,
            local_blocks,
            request.num_prompt_tokens,
            now_ns,
            epoch,
            epoch.flags,
            digests,
            request.request_id,
            request.priority if own.priority is None else own.priority,
            NO_TRACE if headers is None else hints.trace_of(headers),
            session_digest(session_id) if session_id else NO_SESSION,
        )
        return handle

    def drop(self, state: RequestState, epoch: SchedulerEpoch) -> None:
        """There was no room for this request's hint: it is sent again when there is."""
        if state.unsent():
            epoch.producer.count_dropped()
            self._counters["hints_dropped"] += 1

    def hint(self, state: RequestState, epoch: SchedulerEpoch, local_blocks: int, now_ns: int) -> bool:
        """Hint at a request again; False when all is local or not shared, or when there was no room (counted)."""
        own = request_hints.parse(state.request.kv_hints, state.request.kv_transfer_params)
        state.limit(local_blocks + own.max_load_tokens // self._geometry.block_tokens)
        if (digests := state.digests) is None or max(local_blocks, self.worthless) >= state.usable:
            state.need_no_hint()
            return False
        capped = own.max_load_tokens < request_hints.NO_CAP  # of what is loaded: it counts from what is local
        counted = local_blocks if state.counts_local or capped else 0
        handle = self.push(state.request, digests, (counted, state.usable), epoch, (now_ns, False), own)
        if handle is None:
            self.drop(state, epoch)
            return False
        self._counters["hints"] += 1
        state.hint(handle, now_ns)
        return True

    def send_unsent(
        self, states: Iterable[RequestState], epoch: SchedulerEpoch, local_tokens: Callable[[Any], int]
    ) -> None:
        """Send hints of UNSENT requests, which found no room before, as far as there is room now."""
        sent = 0
        for state in states:
            request = state.request
            if sent >= RESENT_BLOCKS or not hints.fits(epoch, request, state.usable, self._geometry):
                return  # before the look at what is local, which costs time by the request's blocks
            if self.hint(state, epoch, local_tokens(request) // self._geometry.block_tokens, self._now_ns()):
                self._counters["hints_resent"] += 1
            elif state.phase == UNSENT:
                return  # whatever the segment says of its room
            sent += state.usable  # if all is local, to find that took as long

    def waits_behind(self, state: RequestState, num_computed_tokens: int) -> bool:
        """Whether `match` would only find again that this deferred request waits behind another one of the pass."""
        handle, wait = state.handle, state.wait
        if handle is None or wait is None or wait.counts or not handle.asked_ns:
            return False
        local, block_tokens = handle.local_blocks, self._geometry.block_tokens
        if not local * block_tokens <= num_computed_tokens < handle.blocks * block_tokens:
            return False
        flag = handle.look()
        return flag.state == HINTED and flag.count <= wait.ready  # more blocks say how fast the link is

    def match(self, state: RequestState, epoch: SchedulerEpoch, start: int, *, running: int) -> Matched:
        """The reply for a request with blocks [0, start) local; a claim is left in `state.answer`.

        `running`: requests that hold a place, as far as is known here; with none, a pending answer costs the engine's
        sleep.
        """
        usable, places, this_pass = state.usable, self._geometry.max_running, self.this_pass
        if start >= usable or usable <= self.worthless:
            return NOTHING
        if this_pass.kept_places and running + this_pass.kept_places >= places:
            return PENDING
        # vLLM asks only for a request that it has a place for.
        visit = _tuple(Visit, (start, usable, self._now_ns(), min(running, places - 1) / places))
        handle = state.handle
        if handle is not None:
            flag = handle.look()
            if flag.state == HINTED and start >= handle.local_blocks:
                if not epoch.alive(visit.now_ns):
                    return NOTHING
                if state.wait is None:
                    flag, visit = self._first_visit(state, handle, flag, visit)
                if flag.state == HINTED and self.slack.allowed:
                    flag, visit = self._wait_slack(state, handle, flag, visit)
                if flag.state == HINTED:
                    return self._hinted(state, handle, flag, visit)
            if flag.state == EXPIRED:
                self.give_back(state.let_go(), Outcome.VOIDED)
            elif start < handle.local_blocks:
                # Blocks that were local at the hint were evicted since: there is a gap before the staged ones.
                self.give_back(state.let_go(), Outcome.LOCAL_GAP)
                state.evicted(visit.now_ns)
            elif flag.state != HINTED:  # after a stop, nothing is no miss
                return self._take(state, handle, flag, visit, Outcome.RECOMPUTED if handle.stopped else Outcome.MISS)
        return self._unhinted(state, epoch, visit) if epoch.alive(visit.now_ns) else NOTHING

    def _unhinted(self, state: RequestState, epoch: SchedulerEpoch, visit: Visit) -> Matched:
        """There is no hint: send one and wait for it, as long as the policy allows."""
        wait = state.wait or self._start_wait(state, visit.start, visit.now_ns)
        wait.stopped, first = False, not self.this_pass.waits
        verdict = self._policy.verdict(wait, visit.start, visit.usable, visit.now_ns, load=visit.load, first=first)
        if verdict is Verdict.WAIT and self._hint_on_demand(state, epoch, visit.start):
            self.this_pass.waits |= wait.policy == "adaptive"  # one that waits at any cost decides for itself only
            return PENDING
        return self._settle(state, Outcome.RECOMPUTED if verdict in _OVERTAKEN else Outcome.TIMED_OUT)

    def _hinted(self, state: RequestState, handle: Handle, flag: Flag, visit: Visit) -> Matched:
        """The fetch goes on: wait for it, or make do with what is ready."""
        wait, this_pass = state.wait, self.this_pass
        assert wait is not None
        found = handle.epoch.flags.found(handle.flag)
        limit = min(found, visit.usable) if found and wait.policy == "adaptive" else visit.usable
        ready = max(visit.start, flag.count)
        if not wait.counts:
            wait.hinted = state.hinted_ns, max(0, flag.count - handle.local_blocks)
        wait.stopped, first = handle.stopped, not this_pass.waits
        verdict = self._policy.verdict(wait, ready, limit, visit.now_ns, load=visit.load, first=first)
        if verdict in _OVERTAKEN and wait.policy == "adaptive" and not handle.missing:
            handle.missing = max(0, limit - ready)
            handle.cost_ns = int(self._policy.cost_ns(ready, ready + handle.missing, visit.load))
        if verdict is Verdict.STOP and self._in_part and found > visit.start:
            # With a full ring the next visit that finds the same tries again.
            self._counters["stopped"] += hints.stop(handle, visit.now_ns)
        elif verdict is not Verdict.WAIT:  # STOP, too, where nothing that is under way would be of use
            outcome = Outcome.TIMED_OUT if verdict is Verdict.TIMED_OUT else Outcome.RECOMPUTED
            return self._take(state, handle, flag, visit, outcome)
        if not handle.asked_ns:
            hints.ask(handle, visit.now_ns)
        this_pass.kept_places += not state.waited and found <= handle.local_blocks
        this_pass.waits |= wait.policy == "adaptive"
        return PENDING

    def _start_wait(self, state: RequestState, ready: int, now_ns: int) -> Wait:
        """The request's first visit finds it pending; its own wishes are read now."""
        config, request = self._config, state.request
        params = request.kv_transfer_params
        if params and (wishes := params.get(OVERRIDE_KEY)) is not None:
            try:
                config = override(config, wishes)
            except ValueError as error:
                self._counters["bad_overrides"] += 1
                if now_ns - self._warned_ns >= _WARN_EVERY_NS:
                    self._warned_ns = now_ns
                    log.warning("kvprefetch: request %s: %s; the default is used", request.request_id, error)
        return state.start_wait(Wait(config.wait_policy, config.wait_timeout_ms, now_ns, ready))

    def _first_visit(self, state: RequestState, handle: Handle, flag: Flag, visit: Visit) -> tuple[Flag, Visit]:
        """Begin a wait, and look for a moment at a flag that may be about to change.

        An idle engine would sleep for a millisecond: it sleeps for less between looks.  A busy engine only finds out
        whether the store holds anything, without a system call: a miss that is deferred loses its place to requests
        behind it.
        """
        wait = self._start_wait(state, max(visit.start, flag.count), visit.now_ns)
        idle = visit.load == 0.0 and not self._geometry.lockstep
        left = (self._idle_wait_ns if idle else self._spin_ns) - self.this_pass.looked_ns
        if wait.policy == "best_effort" or left <= 0 or self._policy.cost_ns(flag.count, visit.usable, 0.0) < left:
            return flag, visit  # what could come is not worth it
        hints.ask(handle, visit.now_ns)
        found, began_ns = handle.epoch.flags.found, visit.now_ns
        now_ns = began_ns
        while flag.state == HINTED and now_ns - began_ns < left:
            if idle:
                self._pause()
            elif found(handle.flag) > handle.local_blocks:
                break
            flag, now_ns = handle.look(), self._now_ns()
        self.this_pass.looked_ns += now_ns - began_ns
        self._counters["wait_ns"] += now_ns - began_ns
        handle.waited_ns += now_ns - began_ns
        return flag, _tuple(Visit, (visit.start, visit.usable, now_ns, visit.load))

    def _wait_slack(self, state: RequestState, handle: Handle, flag: Flag, visit: Visit) -> tuple[Flag, Visit]:
        """Wait for the fetch while the step under way runs, which costs nobody anything."""
        copied = 0.0 if self._load_mode == "async" else self._copy_ns * (visit.usable - visit.start)
        until_ns = self.slack.until_ns(state, visit.now_ns, copied)
        if visit.now_ns >= until_ns or handle.stopped or state.wait is None or state.wait.policy == "best_effort":
            return flag, visit
        hints.ask(handle, visit.now_ns)
        flag, now_ns = handle.wait(int(until_ns)), self._now_ns()
        self.slack.waited(until_ns)
        self._counters["slack_ns"] += now_ns - visit.now_ns
        return flag, _tuple(Visit, (visit.start, visit.usable, now_ns, visit.load))

    def _hint_on_demand(self, state: RequestState, epoch: SchedulerEpoch, start: int) -> bool:
        """Hint a visited request. False after MAX_ON_DEMAND_HINTS; without room the next visit retries."""
        if state.on_demand_hints >= MAX_ON_DEMAND_HINTS:
            return False
        now_ns = self._now_ns()
        if self.hint(state, epoch, start, now_ns):
            state.hinted_on_demand()
            self._counters["on_demand_hints"] += 1
            assert state.handle is not None
            hints.ask(state.handle, now_ns)
        return True

    def _take(self, state: RequestState, handle: Handle, flag: Flag, visit: Visit, outcome: Outcome) -> Matched:
        """Claim what is ready and answer it; with nothing to take, settle on recomputing with `outcome`."""
        wait, geometry = state.wait, self._geometry
        if wait is not None:
            self._policy.saw(wait, max(visit.start, flag.count), visit.now_ns)
        stop = flag.count
        if stop <= visit.start or stop <= self.worthless:
            self._note_found(handle, flag)
            return self._settle(state, Outcome.RECOMPUTED if stop > visit.start else outcome)
        unit = geometry.block_tokens
        staged = stop * unit
        spans = geometry.groups.spans(handle.local_blocks * unit, staged, visit.start * unit, staged)
        first = spans[0].start
        slots = handle.claim(flag.state, stop, stop, first, spans[-1].stop, visit.now_ns)
        if slots is None:
            return PENDING  # the daemon moved the flag in between; the next visit sees where
        if len(spans) > 1:
            entries, slots = slots, array("I")
            for span in spans:
                slots += entries[span.start - first : span.stop - first]
        # With an adapter in the step that computes with it, and so has just read it if it was not loaded.
        count, mode = stop - visit.start, self._load_mode if state.names is None else self._adapter_load_mode
        asynchronous = mode == "async" or not self.reported.all
        if mode == "auto" and not asynchronous:
            size_bytes = count * geometry.block_bytes
            hidden_ns = self.slack.hidden_ns(visit.now_ns)
            asynchronous = loads_beside(size_bytes, self._sync_bytes, load=visit.load, hidden_ns=hidden_ns)
        self.slack.copies(visit.now_ns, self._copy_ns * count)
        if (spared_ns := self._policy.cost_ns(visit.start, stop, 0.0)) < math.inf:
            handle.spared_ns = int(spared_ns)
        self._note_found(handle, flag)
        if flag.state == HINTED:
            self._counters["cut_short"] += 1
            if not handle.stopped:  # with a full ring the daemon's next publication finds the claim
                hints.stop(handle, visit.now_ns)
        state.claim(_tuple(Claim, (visit.start, count, asynchronous, slots)), self.this_pass)
        return count * geometry.block_tokens, asynchronous

    def _settle(self, state: RequestState, outcome: Outcome) -> Matched:
        """There is nothing to take, and there will be nothing."""
        self.give_back(state.settle(), outcome)
        if outcome == Outcome.MISS:
            self._counters["misses"] += 1
        else:
            self._counters["timed_out" if outcome == Outcome.TIMED_OUT else "recomputed"] += 1
        return NOTHING

    def _note_found(self, handle: Handle, flag: Flag) -> None:
        """Learn from a finished look-up which blocks need no save."""
        if self._saves is None or flag.state != READY:
            return  # the found word is written before READY
        found = min(handle.epoch.flags.found(handle.flag), handle.blocks)
        self._saves.note_look_up(handle.digests, handle.local_blocks, found, handle.blocks)

    def withdraw(self, state: RequestState) -> None:
        """Take back an answer that was not used."""
        hints.unclaim(state.withdraw())

    def give_back(self, handle: Handle | None, outcome: Outcome) -> None:
        """Give a handle back that its request has given up."""
        if handle is not None:
            hints.finish(handle, outcome)
