"""One request as vLLM knows it, from arrival to end: its phase, and every way from one phase to another.

    phase      handle  answer  wait   the request
    QUEUED     any     None    any    is in vLLM's queue: hinted if `handle` is set, pending if `wait` is set
    UNSENT     None    None    any    is in the queue, and its hint found no room: it is sent when there is some
    ANSWERED   set     set     any    is claimed for this pass only
    ELSEWHERE  None    None    None   is in the queue, and another connector brings its KV from a prefill engine
    SETTLED    None    None    None   is in the queue: there was nothing to take, and it is not hinted again
    LOADING    None    None    None   has blocks, which an asynchronous load fills
    SAVING     None    None    None   has blocks and a place in the batch; some of its blocks may still be saved
    RUNNING    None    None    None   has blocks and a place, and nothing to save
    ENDED      None    None    None   is gone

Other modules read the fields; only the methods below write them, and each asserts the phases it may start from.

The waiting time of a request is the cost of each None to it, in passes over the queue.  vLLM asks about a request when
it has a free place and tokens for it; a None costs the request this pass.  A pass that ends without asking again gave
its places or tokens to others: from then on the request queues as it would without us.  So a None counts until the next
question or the end of the next pass, whichever comes first.  An answer that is ready earlier helps nobody: the
scheduler does not look in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from ..identity.adapters import MaskedNames
from .hints import Handle
from .policy import Wait


class Phase(IntEnum):
    """From SETTLED on a request gets no more hints, from LOADING on it has blocks, from SAVING on a place."""

    QUEUED = 0
    UNSENT = 1
    ANSWERED = 2
    ELSEWHERE = 3
    SETTLED = 4
    LOADING = 5
    SAVING = 6
    RUNNING = 7
    ENDED = 8


# Plain numbers: with cold caches, as in a hook of the engine, a member of an enum costs several looks more.
QUEUED, UNSENT, ANSWERED, ELSEWHERE, SETTLED, LOADING, SAVING, RUNNING, ENDED = map(int, Phase)


class Claim(NamedTuple):
    """Blocks [start, start + count) of the handle, claimed, and the slots that hold them."""

    start: int
    count: int  # type: ignore[assignment]  # a field of ours, not tuple.count
    asynchronous: bool
    slots: Sequence[int]


@dataclass(slots=True)
class Pass:
    """What belongs to one pass of the scheduler over its queue.

    `kept_places`: the last free ones, for requests before that are being looked up.  `looked_ns`: time spent looking at
    flags.  `waits`: a request waits whose wait is judged.  `answered`, `deferred`: requests that got an answer, or were
    to be asked about later, and may be in another phase by now.
    """

    kept_places: int = 0
    looked_ns: int = 0
    waits: bool = False
    answered: list[RequestState] = field(default_factory=list)
    deferred: list[RequestState] = field(default_factory=list)

    def passed_over(self, now_ns: int) -> int:
        """The next pass has ended. Return how long its requests were deferred (ns) that it did not ask about."""
        return sum(state.resume(now_ns) for state in self.deferred if state.deferred_in is self)


@dataclass(init=False, eq=False)
class RequestState:
    """`handle` belongs to the current epoch. `loadable`: whether the engine wants stored KV for this request.

    `phases`: all requests of the engine, by phase; those that entered it first come first.

    Of one admission: `prefill_tokens`, all tokens that are known when none of them is computed, and `usable`, the full
    blocks that leave at least one of them to compute.

    Defaults are attributes of the class: a request that arrives sets few.  Times are CLOCK_MONOTONIC ns.
    """

    phases: Sequence[dict[RequestState, None]]
    request: Any
    loadable: bool
    preemptions: int
    prefill_tokens: int
    usable: int
    phase: int = QUEUED
    handle: Handle | None = None
    hinted_ns: int = 0
    answer: Claim | None = None
    wait: Wait | None = None
    on_demand_hints: int = 0
    # Whether the next hint counts on blocks in the engine's own cache.
    counts_local: bool = True
    # When and in which pass the request was last deferred; 0 once that wait is charged.
    deferred_ns: int = 0
    deferred_in: Pass | None = None
    waited: bool = False
    # Saves of the current admission: blocks [0, saved) need none, blocks [saved, storable) could be saved, but found no
    # slot so far. `Saves` advances both.
    saved: int = 0
    storable: int = 0
    # Its KV may come from other weights or from blocks that nobody filled: never saved.  `unfilled`: from such blocks,
    # and others may share them.  `alone`: it is never shared, whatever it comes from.
    tainted: bool = False
    unfilled: bool = False
    alone: bool = False
    # Of a request with an adapter, while its KV is shared (adapters.py).
    names: MaskedNames | None = None

    def __init__(
        self,
        phases: Sequence[dict[RequestState, None]],
        request: Any,
        loadable: bool,
        tokens: int,
        usable: int,
        hint: tuple[Handle, int] | None = None,
    ) -> None:
        """A request of so many tokens has arrived; `hint`: the one sent for it, and when."""
        self.phases, self.request, self.loadable = phases, request, loadable
        self.preemptions, self.prefill_tokens, self.usable = request.num_preemptions, tokens, usable
        if hint is not None:
            self.handle, self.hinted_ns = hint
        elif loadable and prefilled_elsewhere(request):
            self.phase = ELSEWHERE
        phases[self.phase][self] = None

    def _enter(self, phase: int) -> None:
        assert self.phase != ENDED, self
        phases = self.phases
        del phases[self.phase][self]
        phases[phase][self] = None
        self.phase = phase

    @property
    def digests(self) -> list[bytes] | None:
        """What its blocks are called outside the engine, one for each hash; None while its KV is not shared."""
        if self.request.lora_request is None:
            hashes: list[bytes] = self.request.block_hashes
            return hashes
        return None if self.names is None else self.names.up_to_date()

    def named(self, names: MaskedNames | None) -> bool:
        """What its blocks are called from now on. Return whether they had other names; then its KV is of no use."""
        before = self.names
        if before is not None and names is not None and before.content == names.content:
            return False
        self.names = names
        self.tainted |= before is not None and self.phase >= LOADING
        return before is not None

    # --- in the queue -----------------------------------------------------------------------------------------------

    def unsent(self) -> bool:
        """There was no room for its hint. Return whether that is news."""
        assert self.phase <= UNSENT and self.handle is None, self  # noqa: PT018
        if news := self.phase == QUEUED:
            self._enter(UNSENT)  # once: it keeps its place before those that come later
        return news

    def need_no_hint(self) -> None:
        """No hint is to be sent before the scheduler asks."""
        assert self.phase <= UNSENT, self
        self._enter(QUEUED)

    def hint(self, handle: Handle, now_ns: int) -> None:
        """A hint was sent."""
        assert self.phase <= UNSENT and self.handle is None, self  # noqa: PT018
        self.handle, self.hinted_ns = handle, now_ns
        self._enter(QUEUED)

    def limit(self, usable: int) -> None:
        """A hint is about to be sent, and may name no more than so many blocks."""
        self.usable = min(self.usable, usable)

    def hinted_on_demand(self) -> None:
        """A hint was sent at a visit."""
        self.on_demand_hints += 1

    def evicted(self, now_ns: int) -> None:
        """Local blocks are gone: the next hint is free, and counts on none, as others may go while it is fetched."""
        self.on_demand_hints -= 1
        self.counts_local = False
        if self.wait is not None:
            self.wait.restart(now_ns)

    def start_wait(self, wait: Wait) -> Wait:
        """A visit found the request pending for the first time."""
        assert self.phase <= UNSENT and self.wait is None, self  # noqa: PT018
        self.wait = wait
        return wait

    def claim(self, answer: Claim, this_pass: Pass) -> None:
        """The handle's blocks are claimed, and vLLM gets this answer."""
        assert self.phase == QUEUED and self.handle is not None, self  # noqa: PT018
        self.answer = answer
        self._enter(ANSWERED)
        this_pass.answered.append(self)

    def withdraw(self) -> Handle:
        """vLLM did not use the answer. Return the handle; the caller gives its claim back."""
        assert self.answer is not None and self.handle is not None, self  # noqa: PT018
        self.answer = None
        self._enter(QUEUED)
        return self.handle

    def let_go(self) -> Handle | None:
        """Give up hint and answer. Return the handle, which the caller gives back where its epoch goes on."""
        handle, self.handle, self.answer = self.handle, None, None
        if self.phase == ANSWERED:
            self._enter(QUEUED)
        return handle

    def settle(self) -> Handle | None:
        """There is nothing to take. Return the handle, which the caller gives back."""
        assert self.phase <= ANSWERED, self
        self.wait, handle = None, self.let_go()
        self._enter(SETTLED)
        return handle

    # --- with blocks ------------------------------------------------------------------------------------------------

    def dispatch(self, stop: int) -> None:
        """vLLM took the answer: its blocks up to `stop` are being loaded, and answer and handle are the load's."""
        assert self.answer is not None, self
        phase = LOADING if self.answer.asynchronous else RUNNING
        self.handle = self.answer = self.wait = None
        self.saved = stop
        self._enter(phase)

    def admit(self) -> Handle | None:
        """Admitted without a load, or behind one. Return the handle, which the caller gives back."""
        self.wait, handle = None, self.let_go()
        self._enter(RUNNING)
        return handle

    def save(self, *, more: bool) -> None:
        """Whether some of its blocks may still be saved."""
        assert self.phase >= SAVING, self
        self._enter(SAVING if more else RUNNING)

    def not_loaded(self) -> bool:
        """vLLM visits the request: does it lose the blocks of a load that failed? Return whether that was ours.

        Of a load of ours all is computed.  What another connector did not bring the store may have.
        """
        assert self.phase >= LOADING, self
        ours = self.phase == LOADING
        self._enter(SETTLED if ours else QUEUED)
        return ours

    # --- everything again -------------------------------------------------------------------------------------------

    def restart(self, tokens: int, usable: int) -> None:
        """Preempted: the blocks are gone, and all tokens, so many by now, are to be matched and saved anew."""
        assert self.handle is None, self
        self.preemptions = self.request.num_preemptions
        self.on_demand_hints, self.wait, self.waited = 0, None, False
        self.counts_local = True
        self.saved, self.storable, self.prefill_tokens, self.usable = 0, 0, tokens, usable
        self.tainted = self.alone
        self._enter(QUEUED)

    def reset(self) -> bool:
        """The weights changed: hint again. Return whether it computed with the old ones; then it is never saved."""
        assert self.handle is None, self
        self.on_demand_hints, self.wait = 0, None
        if self.phase == SETTLED:
            self._enter(QUEUED)
        old: bool = self.request.num_computed_tokens > 0
        self.tainted |= old
        return old

    def taint(self, *, unfilled: bool = False) -> None:
        """Some of its KV rests on other weights or on blocks that nobody filled."""
        self.tainted = True
        self.unfilled |= unfilled

    def keep_alone(self) -> None:
        """Its hashes do not say what its blocks hold."""
        self.alone = self.tainted = True

    def end(self) -> Handle | None:
        """The request has ended, for whatever reason. Return the handle, which the caller gives back."""
        assert self.phase != ENDED, self
        self.wait, handle = None, self.let_go()
        del self.phases[self.phase][self]
        self.phase = ENDED
        return handle

    # --- waiting time -----------------------------------------------------------------------------------------------

    def defer(self, now_ns: int, in_pass: Pass) -> bool:
        """vLLM is to ask again, later than `now_ns`. Return whether that is the first time of this admission."""
        first, self.waited = not self.waited, True
        self.deferred_ns, self.deferred_in = now_ns, in_pass
        in_pass.deferred.append(self)
        return first

    def resume(self, now_ns: int) -> int:
        """The request is visited again, ended or passed over. Return how long it was deferred (ns), once."""
        waited, self.deferred_ns = now_ns - self.deferred_ns if self.deferred_ns else 0, 0
        if self.handle is not None:
            self.handle.waited_ns += waited
        return waited


def prefilled_elsewhere(request: Any) -> bool:
    """Whether another connector brings the request's KV from a prefill engine."""
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_prefill"))


def prefill_tokens(output: Any, requests: Mapping[str, RequestState]) -> int:
    """How many tokens of prompts this step computes: not of decodes, nor drafts."""
    found = 0
    for request_id, tokens in output.num_scheduled_tokens.items():
        if tokens > 1 and (state := requests.get(request_id)) is not None:
            # More than one token left to compute: not drafts. vLLM advances num_computed_tokens afterwards.
            left = state.request.num_tokens - state.request.num_computed_tokens
            found += min(tokens, left) if left > 1 else 0
    return found
