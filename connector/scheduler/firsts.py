"""Says in the engine's log, once each, that blocks went to the store, and that a prefix came from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from ..request.loads import Load
from ..request.policy import WaitPolicy
from ..request.request_state import RequestState
from ..request.saves import DispatchedSave

log = logging.getLogger("vllm.kvprefetch")


class Firsts:
    """Who just installed kvprefetch sees whether it works. `save` and `hit` are true until the first one."""

    def __init__(self, policy: WaitPolicy, block_tokens: int) -> None:
        self.save = self.hit = True
        self._policy, self._block_tokens = policy, block_tokens

    def saved(self, copied: Iterable[tuple[int, DispatchedSave]]) -> None:
        """All ranks copied these saves, which go to the daemon now."""
        if blocks := sum(len(save.names) for _, save in copied if not save.dropped):
            self.save = False
            text = "kvprefetch: first save: %d blocks go to the store; requests load them once this engine's own cache "
            log.info(text + "has dropped them", blocks)

    def loaded(self, load: Load, state: RequestState | None) -> None:
        """A load of all ranks went well. `state`: of its request, if that has not ended."""
        self.hit = False
        tokens = len(load.blocks) * self._block_tokens
        prompt = "" if state is None else f" of {state.request.num_prompt_tokens}"
        saved_s = self._policy.cost_ns(load.blocks.start, load.blocks.stop, 0.0) / 1e9
        saved = f", saved {saved_s:.2f} s of computing" if math.isfinite(saved_s) else ""
        log.info("kvprefetch: first prefix from the store: %d%s tokens%s", tokens, prompt, saved)
