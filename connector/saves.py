"""Saves from the scheduler's side: which blocks, into which granted slots, and what the daemon is told afterwards.

A block is saved only when its tokens are known and its KV is written by the end of this step: full blocks within
min(num_computed_tokens + num_scheduled_tokens, num_tokens) and within the block hashes, which cover known tokens only,
so that placeholders, drafts and rejected tokens never count.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..shmring.protocol import RecordKind, Saved, encode_saved
from .metadata import SaveOrder
from .session import SchedulerSession
from .support import Geometry

# Digests remembered as being in the store: 32 bytes each and about 100 of bookkeeping.
KNOWN_DIGESTS = 1 << 16
_HEAD_BYTES = 64
NULL_BLOCK = 0


@dataclass(slots=True)
class Progress:
    """What of a request's current admission was dealt with: blocks [0, saved) need no save."""

    saved: int = 0
    # Tokens of the prefill: the prompt, or after a preemption everything known when it was scheduled again.
    prefill_tokens: int = -1
    # Its KV may come from other weights than the next reset's: never saved.
    tainted: bool = False
    deferred: int = 0


@dataclass(slots=True)
class _Save:
    session: SchedulerSession
    request_id: str
    slots: list[int]
    digests: list[bytes]
    reset_generation: int
    ranks_left: int
    dropped: bool = False


class Saves:
    """Save bookkeeping of one engine."""

    def __init__(self, geometry: Geometry, *, decode: bool, counters: Counter[str]) -> None:
        self._geometry, self._decode, self._counters = geometry, decode, counters
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._waiting: dict[int, _Save] = {}
        self._copied: deque[tuple[int, _Save]] = deque()
        self._next_id = 1
        self._generation = 0

    def plan(
        self, session: SchedulerSession, progress: Progress, request: Any, scheduled_tokens: int,
        block_ids: Sequence[int],
    ) -> SaveOrder | None:  # fmt: skip
        """The save of this step for one scheduled request; None when there is nothing to save or no credit.

        `request.num_computed_tokens` does not count this step yet. Raises SegmentCorrupt.
        """
        if progress.prefill_tokens < 0:
            progress.prefill_tokens = request.num_tokens
        stop = self.storable_blocks(request, scheduled_tokens, progress)
        stop = min(stop, len(block_ids))
        if progress.tainted or stop <= progress.saved:
            progress.deferred = 0
            return None
        ratio = self._geometry.hashes_per_block
        wanted: list[tuple[int, bytes]] = []
        for block in range(progress.saved, stop):
            digest = request.block_hashes[(block + 1) * ratio - 1]
            if digest in self._known:
                self._known.move_to_end(digest)
            elif block_ids[block] != NULL_BLOCK:
                wanted.append((block, digest))
        if not wanted:
            progress.saved = stop
            return None
        most = (session.producer.max_payload_bytes - _HEAD_BYTES) // (4 + len(wanted[0][1]))
        slots = session.credits.take(min(len(wanted), most))
        progress.saved = stop if len(slots) == len(wanted) else wanted[len(slots)][0]
        progress.deferred = len(wanted) - len(slots)
        if not slots:
            return None
        taken = wanted[: len(slots)]
        digests = [bytes(digest) for _, digest in taken]
        save = _Save(session, request.request_id, slots, digests, self._generation, self._geometry.world_size)
        save_id, self._next_id = self._next_id, self._next_id + 1
        self._waiting[save_id] = save
        self.note_stored(save.digests)
        self._counters["saves"] += 1
        self._counters["save_blocks"] += len(slots)
        return SaveOrder(save_id, session.epoch, [block_ids[block] for block, _ in taken], slots)

    def storable_blocks(self, request: Any, scheduled_tokens: int, progress: Progress) -> int:
        """Full blocks whose tokens are known and whose KV is written when this step's forward is done."""
        geometry = self._geometry
        tokens: int = min(request.num_computed_tokens + scheduled_tokens, request.num_tokens)
        if not self._decode:
            tokens = min(tokens, progress.prefill_tokens)
        blocks: int = min(tokens // geometry.block_tokens, len(request.block_hashes) // geometry.hashes_per_block)
        if geometry.drop_last and tokens > progress.prefill_tokens:
            # The drafter may not have written its KV of the newest block's last token yet.
            blocks -= 1
        return max(blocks, 0)

    def acknowledge(self, counts: dict[int, int], failed: set[int]) -> None:
        """Ranks that copied (or failed to copy) saves; one that all ranks reported is queued for the daemon."""
        for save_id, ranks in counts.items():
            save = self._waiting.get(save_id)
            if save is None:
                continue  # of an epoch that has ended
            save.dropped = save.dropped or save_id in failed
            save.ranks_left -= ranks
            if save.ranks_left <= 0:
                del self._waiting[save_id]
                self._copied.append((save_id, save))

    def drop(self, request_id: str) -> None:
        """The request's KV is not what its tokens say: what was copied of it goes back unused."""
        for save in (*self._waiting.values(), *(save for _, save in self._copied)):
            if save.request_id == request_id:
                save.dropped = True
                self.note_absent(save.digests)

    def flush(self) -> None:
        """Push what all ranks copied; what finds the ring full waits for the next step. Raises SegmentCorrupt."""
        while self._copied:
            save_id, save = self._copied[0]
            dropped = save.dropped or save.reset_generation < self._generation
            digests = [] if dropped else save.digests
            record = encode_saved(Saved(save_id, save.reset_generation, dropped, save.slots, digests))
            if not save.session.producer.push(RecordKind.SAVED, record):
                return
            self._copied.popleft()
            if dropped:
                self._counters["saves_dropped"] += len(save.slots)

    def note_stored(self, digests: Sequence[bytes]) -> None:
        """These are in the store, or on their way: not copied again."""
        for digest in digests:
            self._known[digest] = None
            self._known.move_to_end(digest)
        while len(self._known) > KNOWN_DIGESTS:
            self._known.popitem(last=False)

    def note_absent(self, digests: Sequence[bytes]) -> None:
        """A lookup did not find these."""
        for digest in digests:
            self._known.pop(digest, None)

    def forget(self, session: SchedulerSession) -> None:
        """The epoch has ended: its slots mean nothing any more, and the next daemon's store may be another."""
        self._waiting = {i: save for i, save in self._waiting.items() if save.session is not session}
        self._copied = deque(item for item in self._copied if item[1].session is not session)
        self._known.clear()

    def reset(self, generation: int) -> None:
        """Whatever was copied before is of the old weights: its slots go back unused."""
        self._generation = generation
        self._known.clear()

    @property
    def unacknowledged(self) -> int:
        return len(self._waiting)

    @property
    def unpushed(self) -> int:
        return len(self._copied)
