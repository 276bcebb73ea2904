"""The traces of one engine's requests: the times of each, for a single `request.done` log line. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...shmring.wire.records import NAMED_BY, Done, Hint
from ..planning.requests import Request
from ..planning.runs import Lane
from .causes import cause
from .events import Ending

Lacked = tuple[str, int, Sequence[bytes]]  # a request's id, the first block that the store lacked, and names from there


class Work(NamedTuple):
    """What fetches of a lane did since the daemon started, those of all engines together.

    `busy_ns`: at least one was in flight.  `starved_ns`: this engine's next one found no room in staging.  `hour`: the
    last hour's bytes per second; None where not known.
    """

    lane: Lane = Lane.MEMORY
    moved_bytes: int = 0
    busy_ns: int = 0
    starved_ns: int = 0
    hour: float | None = None


class Met(NamedTuple):
    """The announcement that a request had: since when (CLOCK_MONOTONIC ns), of how many blocks."""

    since_ns: int
    blocks: int


@dataclass
class Trace:
    """Collects the times of one hinted request (CLOCK_MONOTONIC nanoseconds; 0: did not happen)."""

    hint: Hint  # without its hashes
    hint_seen_ns: int
    kv_groups: int = 1
    met: Met | None = None
    gap_ns: int | None = None
    looked_up_ns: int = 0
    asked_ns: int = 0
    found_blocks: int = 0  # at the look-up's answer, like the next three
    staged_blocks: int = 0
    unavailable: bool = False  # the store did not say
    before: Work = field(default_factory=Work)
    after: Work | None = None  # when the last block was published, or given up
    answered_ns: int = 0

    def fields(
        self,
        request: Request,
        ending: Ending,
        done: Done | None,
        block_bytes: int,
        now_ns: int,
        work: Work,
        adopted_ns: int = 0,
    ) -> dict[str, Any]:
        """Return the log line's fields: `*_ms` are milliseconds since the request arrived in the engine.

        `exposed_ms` is how long the scheduler waited for us, as the engine counted: the passes in which it had room for
        the request and could not take it.  Without the engine's count, it is the time from its question until the
        fetch, or the request, ended.  `unseen_ms` is the part of it after the answer: the scheduler looks once a step,
        and waited for its own step.  `hidden_fraction` is the share of look-up and transfer for which the scheduler did
        not wait; None where nothing was fetched or loaded.
        """
        asked = done.asked_ns if done is not None and done.asked_ns else self.asked_ns
        claimed = done.claimed_ns if done is not None else 0
        loaded = done.loaded_ns if done is not None else 0
        ready = self.answered_ns or request.last_byte_ns or self.looked_up_ns
        until = claimed or now_ns
        exposed_ns = max(0, until - asked) if asked else 0
        if done is not None:
            exposed_ns = min(exposed_ns, done.waited_ns)
        elif request.final:
            exposed_ns = min(exposed_ns, max(0, ready - asked))
        loaded_blocks = done.loaded_blocks if done is not None else 0
        came = request.last_byte_ns or self.looked_up_ns
        transfer_ns = max(0, came - self.hint_seen_ns)
        late_ns = min(exposed_ns, max(0, min(came, until) - max(asked, self.hint_seen_ns)))
        hidden = 1.0 - min(1.0, late_ns / transfer_ns) if transfer_ns else 1.0
        unseen_ns = max(0, asked + exposed_ns - max(ready, asked)) if request.final and ready and asked else 0
        memory_blocks = request.fetched_blocks - request.disk_blocks
        events = {
            "adopted_ms": adopted_ns if self.hint.early and adopted_ns >= self.hint.arrival_ns else 0,
            "hint_seen_ms": self.hint_seen_ns,
            "looked_up_ms": self.looked_up_ns,
            "first_byte_ms": request.first_byte_ns,
            "last_byte_ms": request.last_byte_ns,
            "answered_ms": self.answered_ns,
            "visited_ms": asked,
            "claimed_ms": claimed,
            "loaded_ms": loaded,
            "ended_ms": now_ns,
        }
        times = dict[str, float | None]()
        for name, at_ns in events.items():
            times[name] = round((at_ns - self.hint.arrival_ns) / 1e6, 3) if at_ns else None
        line = {
            "request_id": self.hint.request_id,
            "outcome": ending.value,
            "prompt_tokens": self.hint.prompt_tokens,
            "hint_blocks": self.hint.blocks,
            "local_blocks": self.hint.local_blocks,
            "found_blocks": self.found_blocks,
            "loaded_blocks": loaded_blocks,
            "kv_groups": self.kv_groups,
            "bytes": request.fetched_blocks * block_bytes,
            "bytes_disk": request.disk_blocks * block_bytes,
            "bytes_memory": memory_blocks * block_bytes,
            "taken_back": request.taken_back,
            "store_unavailable": self.unavailable,
            "arrived_ms": 0.0,
            **times,
            "exposed_ms": round(exposed_ns / 1e6, 3),
            "unseen_ms": round(unseen_ns / 1e6, 3),
            "missing_blocks": done.missing if done is not None else 0,
            "spared_ms": round(done.spared_ns / 1e6, 3) if done is not None and done.spared_ns else None,
            "recompute_ms": round(done.cost_ns / 1e6, 3) if done is not None and done.missing else None,
            "announced_ms": round((self.hint.arrival_ns - self.met.since_ns) / 1e6, 3) if self.met else None,
            "announced_blocks": self.met.blocks if self.met else 0,
            "announced_staged": min(self.staged_blocks, self.met.blocks) if self.met else 0,
            "session_gap_ms": round(self.gap_ns / 1e6, 3) if self.gap_ns is not None else None,
            "hidden_fraction": round(hidden, 4) if request.last_byte_ns or loaded_blocks else None,
            **self._reasons(request, work),
        }
        trace = self.hint.trace
        parent = f"00-{trace[:16].hex()}-{trace[16:].hex()}-01" if any(trace) else None
        return {**line, "cause": cause(line), "traceparent": parent}

    def _reasons(self, request: Request, work: Work) -> dict[str, Any]:
        """Return what the cause of a slow request is judged by; `work`: what its lane did until now."""
        failure, after = request.failure, self.after or work
        moved, busy_ns = after.moved_bytes - self.before.moved_bytes, after.busy_ns - self.before.busy_ns
        wanted = self.looked_up_ns > 0 and self.found_blocks > self.hint.local_blocks
        return {
            "medium": self.before.lane.name.lower() if wanted else None,
            "store_bytes_s": round(moved / busy_ns * 1e9) if wanted and busy_ns else None,
            "hour_bytes_s": round(work.hour) if wanted and work.hour is not None else None,
            "room_ms": round((after.starved_ns - self.before.starved_ns) / 1e6, 3) if wanted else 0.0,
            "failed": failure.why if failure is not None else None,
            "named_by": NAMED_BY[self.hint.named_by % 4] or None,
            "owners": failure.owners if failure is not None else "",
        }
