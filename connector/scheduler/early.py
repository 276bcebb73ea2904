"""Hint at a request as it comes to the engine core, while a step runs, before the scheduler has it.

vLLM's engine core takes requests off its queue between two steps, and its scheduler asks about a new one in the same
pass: a hint sent then is up to a step late.  But its input thread makes each request with its block hashes at once
(`EngineCore.preprocess_add_request`).  The hint leaves there, and the scheduler side adopts it with the request.

The input thread reads what the scheduler's thread writes, and decides nothing.  What it finds to be local is a guess,
as it always is before the admission.  A hint of an epoch, of weights or of an adapter that have changed since counts no
more.  Where something is not known there (what several KV groups hold, an adapter that no step has read), the hint
leaves at the scheduler.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ...shmring.wire.records import Outcome
from ..attach.epoch import ALIVE, SchedulerEpoch
from ..engine import compat
from ..request import hints
from ..request.hints import Handle
from ..request.local_cache import LocalCache
from ..request.request_state import prefilled_elsewhere
from ..words import request_hints
from ..words.request_hints import NO_HINTS

if TYPE_CHECKING:
    from ..attach.link import Link
    from ..attach.resets import Resets
    from ..identity.adapters import Adapters, MaskedNames
    from ..request.claims import Claims

# A hint whose request the scheduler does not get within this time is given back: vLLM rejected it, or it was a chunk.
ADOPTED_WITHIN_NS = 30_000_000_000

log = logging.getLogger("vllm.kvprefetch.scheduler")


class Early(NamedTuple):
    """A hint that the scheduler has not adopted; `generation`: the reset that it belongs to, `names`: its adapter's."""

    handle: Handle
    generation: int
    hinted_ns: int
    names: MaskedNames | None


class EarlyHints:
    """The hints of the input thread, by request: an id may be used again. `allowed`: whether any may leave there."""

    def __init__(
        self,
        link: Link[SchedulerEpoch],
        resets: Resets,
        adapters: Adapters,
        claims: Claims,
        now_ns: Callable[[], int],
        *,
        allowed: bool,
    ) -> None:
        self._link, self._resets, self._adapters, self._claims, self._now_ns = link, resets, adapters, claims, now_ns
        self.allowed = allowed
        self.cache = LocalCache()
        self.waiting: dict[Any, Early] = {}

    # --- on the input thread ----------------------------------------------------------------------------------------

    def hint(self, request: Any) -> None:
        """Hint at a request that the scheduler will get. What this raises costs the hint and nothing else."""
        link, generation, own = self._link, self._resets.generation, NO_HINTS
        epoch = link.epoch if self.allowed else None
        if epoch is None or link.confirmed_reset < generation:
            return
        if request.resumable or request.prompt_is_token_ids is not None or request.skip_reading_prefix_cache:
            return
        if request.kv_hints is not None or request.kv_transfer_params:
            own = request_hints.parse(request.kv_hints, request.kv_transfer_params)
            if own.bad or not own.fetch or prefilled_elsewhere(request):
                return
        names = None if request.lora_request is None else self._adapters.known_names(request)
        if names is None and request.lora_request is not None:
            return
        usable = self._claims.usable_blocks(request, request.num_prompt_tokens)
        local = self.cache.guess(request, usable)
        if local is None:
            return
        usable = min(usable, local + own.max_load_tokens // self._claims.block_tokens)
        if local < usable > self._claims.worthless and epoch.status(now := self._now_ns()) == ALIVE:
            digests = request.block_hashes if names is None else names.up_to_date()
            handle = self._claims.push(request, digests, (local, usable), epoch, (now, True), own)
            if handle is not None:
                self.waiting[request] = Early(handle, generation, now, names)

    # --- on the scheduler's thread ----------------------------------------------------------------------------------

    def adopt(self, request: Any, epoch: SchedulerEpoch | None) -> Early | None:
        """The scheduler has this request: return its hint, if that counts. `epoch`: the current one."""
        early = self.waiting.pop(request, None)
        if early is None or early.handle.epoch is not epoch:  # nobody reads an ended epoch
            return None
        names = None if request.lora_request is None else self._adapters.names(request)
        same = (names and names.content) == (early.names and early.names.content)
        if not same or early.generation != self._resets.generation:
            hints.finish(early.handle, Outcome.VOIDED)
            return None
        early.handle.adopt(self._now_ns())
        return early

    def forget(self, epoch: SchedulerEpoch | None, now_ns: int) -> None:
        """Give back the hints of requests that the scheduler has not got in time."""
        for request, early in self.waiting.copy().items():  # a copy runs no Python: the other thread may enter one
            if now_ns - early.hinted_ns > ADOPTED_WITHIN_NS:
                del self.waiting[request]
                if early.handle.epoch is epoch:
                    hints.finish(early.handle, Outcome.ABORTED)


def hand_over(connector: Any, request: Any) -> None:
    """Hint at this request, for each of our connectors: `connector` may be vLLM's MultiConnector."""
    for side in compat.scheduler_sides(connector):
        side.early.hint(request)


def install() -> bool:
    """Have this process's engine cores hand requests over as they come; False where this vLLM does not let them.

    The ring's producer has two threads as long as they take turns by the GIL, so there is nothing of this without one.
    """
    core = compat.engine_core()
    if core is None or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    original = core.preprocess_add_request
    if hasattr(original, "kvprefetch"):
        return True

    @functools.wraps(original)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        made = original(self, request)
        try:
            hand_over(self.scheduler.get_kv_connector(), made[0])
        except Exception:  # the scheduler side hints when it has the request
            log.debug("kvprefetch: no early hint", exc_info=True)
        return made

    preprocess_add_request.kvprefetch = True  # type: ignore[attr-defined]
    core.preprocess_add_request = preprocess_add_request
    return True
