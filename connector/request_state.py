"""One request as vLLM knows it, from arrival to end: its states, and every transition between them.

    state      handle  answer  wait   settled  loading
    queued     any     None    any    no       no       hinted if `handle` is set, pending if `wait` is set
    answered   set     set     any    no       no       claimed for this pass only
    loading    None    None    None   any      yes      an asynchronous load runs; not settled: after a reset
    settled    None    None    None   yes      no       admitted, or nothing to take: no more hints

Other modules read the fields; only the methods below write them, and each asserts the states it may start from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .adapters import MaskedNames
from .hints import Handle
from .policy import Wait


class Claim(NamedTuple):
    """Blocks [start, start + count) of the handle, claimed, and the slots that hold them."""

    start: int
    count: int  # type: ignore[assignment]  # a field of ours, not tuple.count
    asynchronous: bool
    slots: Sequence[int]


@dataclass(init=False)
class RequestState:
    """`handle` belongs to the current epoch. `loadable`: whether the engine wants stored KV for this request.

    Of one admission: `prefill_tokens`, all tokens that are known when none of them is computed, and `usable`, the full
    blocks that leave at least one of them to compute.

    Defaults are attributes of the class: a request that arrives sets few.  Times are CLOCK_MONOTONIC ns.
    """

    request: Any
    loadable: bool
    preemptions: int
    prefill_tokens: int
    usable: int
    handle: Handle | None = None
    hinted_ns: int = 0
    answer: Claim | None = None
    wait: Wait | None = None
    settled: bool = False
    loading: bool = False
    # Its KV comes from a prefill engine, by another child of MultiConnector: until that failed, it is not loadable.
    prefilled_elsewhere: bool = False
    on_demand_hints: int = 0
    # Whether the next hint counts on blocks in the engine's own cache.
    counts_local: bool = True
    # When and in which pass the request was last deferred; 0 once that wait is charged (waits.py).
    deferred_ns: int = 0
    deferred_in: int = 0
    waited: bool = False
    # Saves of the current admission: blocks [0, saved) need none, blocks [saved, storable) could be saved, but found no
    # slot so far. `Saves` advances both.
    saved: int = 0
    storable: int = 0
    # Its KV may come from other weights or from blocks that nobody filled: never saved.
    tainted: bool = False
    # Of a request with an adapter, while its KV is shared (adapters.py).
    names: MaskedNames | None = None

    def __init__(
        self, request: Any, loadable: bool, tokens: int, usable: int, handle: Handle | None = None, hinted_ns: int = 0
    ) -> None:
        """A request of so many tokens has arrived; `handle`: of its hint, sent then."""
        self.request, self.loadable, self.preemptions = request, loadable, request.num_preemptions
        self.prefill_tokens, self.usable = tokens, usable
        if handle is not None:
            self.handle, self.hinted_ns = handle, hinted_ns
        elif loadable and prefilled_elsewhere(request):
            self.loadable, self.prefilled_elsewhere = False, True

    @property
    def queued(self) -> bool:
        """Whether a hint, a wait or an answer may be next."""
        return not (self.settled or self.loading or self.answer)

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
        self.tainted |= before is not None and self.settled
        return before is not None

    # --- queued and answered ----------------------------------------------------------------------------------------

    def hint(self, handle: Handle, now_ns: int) -> None:
        """A hint was sent."""
        assert self.handle is None and not (self.settled or self.loading or self.answer), self  # noqa: PT018
        self.handle, self.hinted_ns = handle, now_ns

    def limit(self, usable: int) -> None:
        """A hint is about to be sent, and may name no more than so many blocks."""
        self.usable = min(self.usable, usable)

    def hinted_late(self) -> None:
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
        assert not (self.settled or self.loading or self.answer or self.wait), self  # noqa: PT018
        self.wait = wait
        return wait

    def claim(self, answer: Claim) -> None:
        """The handle's blocks are claimed, and vLLM gets this answer."""
        assert self.handle is not None and not (self.settled or self.loading or self.answer), self  # noqa: PT018
        self.answer = answer

    def withdraw(self) -> Handle:
        """vLLM did not use the answer. Return the handle; the caller gives its claim back."""
        assert self.answer is not None and self.handle is not None, self  # noqa: PT018
        self.answer = None
        return self.handle

    def drop(self) -> Handle | None:
        """Give up hint and answer. Return the handle, which the caller gives back where its epoch goes on."""
        handle, self.handle, self.answer = self.handle, None, None
        return handle

    # --- admitted ---------------------------------------------------------------------------------------------------

    def dispatch(self, stop: int) -> None:
        """vLLM took the answer: its blocks up to `stop` are being loaded, and answer and handle are the load's."""
        assert self.answer is not None and self.handle is not None, self  # noqa: PT018
        self.loading, self.settled = self.answer.asynchronous, True
        self.handle = self.answer = self.wait = None
        self.saved = stop

    def settle(self) -> Handle | None:
        """Admitted without a load, or nothing to take. Return the handle, which the caller gives back."""
        self.settled, self.loading, self.wait = True, False, None
        return self.drop()

    def not_delivered(self) -> bool:
        """vLLM visits the request. Return whether a prefill engine's KV did not come: the store may have it."""
        if failed := self.prefilled_elsewhere and self.settled:
            self.loadable, self.prefilled_elsewhere, self.settled = True, False, False
        return failed

    def fail_load(self) -> None:
        """vLLM visits the request although its load was under way: the load failed with no good token."""
        assert self.loading, self
        self.loading = False

    # --- everything again -------------------------------------------------------------------------------------------

    def restart(self, tokens: int, usable: int) -> None:
        """Preempted: the blocks are gone, and all tokens, so many by now, are to be matched and saved anew."""
        assert self.handle is None, self
        self.preemptions = self.request.num_preemptions
        self.loadable, self.prefilled_elsewhere = self.loadable or self.prefilled_elsewhere, False
        self.settled, self.on_demand_hints, self.wait, self.waited = False, 0, None, False
        self.counts_local = True
        self.saved, self.storable, self.prefill_tokens, self.usable = 0, 0, tokens, usable
        self.tainted = False

    def reset(self) -> bool:
        """The weights changed: hint again. Return whether it computed with the old ones; then it is never saved."""
        assert self.handle is None, self
        self.settled, self.on_demand_hints, self.wait = False, 0, None
        old: bool = self.request.num_computed_tokens > 0
        self.tainted |= old
        return old

    def taint(self) -> None:
        """Some of its KV rests on other weights or on blocks that nobody filled."""
        self.tainted = True

    # --- waiting time (waits.py) ------------------------------------------------------------------------------------

    def defer(self, now_ns: int, in_pass: int) -> bool:
        """vLLM is to ask again, later than `now_ns`. Return whether that is the first time of this admission."""
        first, self.waited = not self.waited, True
        self.deferred_ns, self.deferred_in = now_ns, in_pass
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
    if output.total_num_scheduled_tokens != len(output.num_scheduled_tokens):  # otherwise every request has one token
        for request_id, tokens in output.num_scheduled_tokens.items():
            if tokens > 1 and (state := requests.get(request_id)) is not None:
                # More than one token left to compute: not drafts. vLLM advances num_computed_tokens afterwards.
                left = state.request.num_tokens - state.request.num_computed_tokens
                found += min(tokens, left) if left > 1 else 0
    return found
