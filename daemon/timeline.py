"""One request's story, told in a single `request.done` log line."""

from __future__ import annotations

from typing import Any

from ..shmring.protocol import Done, Hint
from .events import Ending
from .planner import Request


class Timeline:
    """Collects the times of one hinted request (CLOCK_MONOTONIC nanoseconds; 0: did not happen)."""

    def __init__(self, hint: Hint, seen_ns: int) -> None:
        self.request_id = hint.request_id
        self.arrived_ns = hint.arrival_ns
        self.hint_seen_ns = seen_ns
        self.prompt_tokens = hint.prompt_tokens
        self.looked_up_ns = 0
        self.asked_ns = 0
        self.found_blocks = hint.local_blocks
        self.store_unavailable = False

    def fields(
        self, request: Request, ending: Ending, done: Done | None, block_bytes: int, now_ns: int
    ) -> dict[str, Any]:
        """The log line's fields: `*_ms` are milliseconds since the request arrived in the engine.

        `exposed_ms` is how long the scheduler had the request at its queue head and waited for us, until it claimed or
        gave up, its own steps in between included; `hidden_fraction` is the share of look-up and transfer that was
        over before it asked.
        """
        asked = done.asked_ns if done is not None and done.asked_ns else self.asked_ns
        claimed = done.claimed_ns if done is not None else 0
        loaded = done.loaded_ns if done is not None else 0
        ready = request.last_byte_ns or self.looked_up_ns
        until = claimed or now_ns
        exposed_ns = max(0, until - asked) if asked else 0
        transfer_ns = max(0, ready - self.hint_seen_ns)
        late_ns = max(0, min(ready, until) - max(asked, self.hint_seen_ns)) if asked else 0
        hidden = 1.0 - min(1.0, late_ns / transfer_ns) if transfer_ns else 1.0
        memory_blocks = request.fetched_blocks - request.disk_blocks
        return {
            "request_id": self.request_id,
            "outcome": ending.value,
            "prompt_tokens": self.prompt_tokens,
            "hint_blocks": request.blocks,
            "local_blocks": request.local,
            "found_blocks": self.found_blocks,
            "loaded_blocks": done.loaded_blocks if done is not None else 0,
            "bytes": request.fetched_blocks * block_bytes,
            "bytes_disk": request.disk_blocks * block_bytes,
            "bytes_memory": memory_blocks * block_bytes,
            "store_unavailable": self.store_unavailable,
            "arrived_ms": 0.0,
            "hint_seen_ms": self._ms(self.hint_seen_ns),
            "looked_up_ms": self._ms(self.looked_up_ns),
            "first_byte_ms": self._ms(request.first_byte_ns),
            "last_byte_ms": self._ms(request.last_byte_ns),
            "asked_ms": self._ms(asked),
            "claimed_ms": self._ms(claimed),
            "loaded_ms": self._ms(loaded),
            "ended_ms": self._ms(now_ns),
            "exposed_ms": round(exposed_ns / 1e6, 3),
            "hidden_fraction": round(hidden, 4),
        }

    def _ms(self, at_ns: int) -> float | None:
        return round((at_ns - self.arrived_ns) / 1e6, 3) if at_ns else None
