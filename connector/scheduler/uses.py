"""Says which blocks of the engine's own cache requests use, and has those saved again that the store lost.

vLLM's cache answers for a block without a question to the store, and a store evicts first what nobody asks for.  So the
daemon asks for the blocks that requests use.  A hint names those of its request; a USED record names those of a request
without a hint, once in half a lease for each prefix.  The daemon's answer is a message `Absent` on the link: it names
at most MAX_ABSENT blocks, and a step takes one message.  What the link drops, a later use brings again.

A block of an adapter's is stored under another name than vLLM's cache has for it: the next request that uses it saves
it, as it does where no slot is free.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from ...shmring.wire.records import RecordKind, encode_used
from ..attach.epoch import SchedulerEpoch
from ..attach.link import Link
from ..engine.events import SavedBlocks
from ..engine.geometry import Geometry
from ..request.local_cache import LocalCache
from ..request.request_state import RequestState
from ..request.saves import Saves

MOST_PREFIXES = 4096  # of which it is known when they were said; others are said early
MAX_LOST = 4096  # blocks that the store lost, and that the engine's cache may have once a load has filled them
LOOKS = 256  # at these in a step
_USED = int(RecordKind.USED)


class Uses:
    """`saves`: of an engine that saves; another one heals nothing.

    `lost`: blocks that the store has not, and the engine's cache had not, either, the oldest first.  `to_look_at`: so
    many of them may be in the cache now.
    """

    def __init__(
        self, geometry: Geometry, link: Link[SchedulerEpoch], saves: Saves | None, events: SavedBlocks | None
    ) -> None:
        self._groups, self._link, self._saves, self._events = geometry.groups, link, saves, events
        self._said: dict[bytes, int] = {}  # when, by the last digest of a prefix; the oldest first
        self.lost: dict[bytes, None] = {}
        self.to_look_at = 0
        self._of = 0, 0  # epoch and reset

    def loaded(self) -> None:
        """A load has ended: the cache may have more blocks."""
        self.to_look_at = len(self.lost)

    def say(self, digests: list[bytes], blocks: int, epoch: SchedulerEpoch, now_ns: int) -> None:
        """A request without a hint uses so many leading blocks of the engine's own cache. Raises SegmentCorrupt.

        `digests`: those that its blocks are stored under.
        """
        self._know(epoch)
        groups = self._groups
        blocks = min(blocks, groups.blocks(len(digests)))
        if not blocks:
            return
        stop = groups.digests(blocks)
        last, again_ns = digests[stop - 1], epoch.use_again_ns
        if now_ns - self._said.get(last, -again_ns) < again_ns or not epoch.alive(now_ns):
            return
        if epoch.producer.push(_USED, encode_used(blocks, digests[:stop])):
            self._said.pop(last, None)
            self._said[last] = now_ns
            if self._events is not None:
                self._events.used(digests, blocks, now_ns)
            if len(self._said) > MOST_PREFIXES:
                del self._said[next(iter(self._said))]

    def _know(self, epoch: SchedulerEpoch) -> None:
        """Forget what was of another epoch, or of other weights."""
        if (now := (epoch.number, self._link.confirmed_reset)) != self._of:
            self._of = now
            self._said.clear()
            self._forget_lost()

    def _forget_lost(self) -> None:
        self.lost.clear()
        self.to_look_at = 0

    def heal(
        self, epoch: SchedulerEpoch | None, cache: LocalCache, states: Iterable[RequestState], *, stale: bool
    ) -> None:
        """Have blocks saved again that the daemon says are absent; in this step, if there are slots.

        Not while some of the engine's own cache may not be what its names say, nor without an epoch that is of use: a
        later use brings them again.
        """
        told, saves = self._link.absent, self._saves
        if epoch is None or saves is None or stale or any(state.tainted and not state.alone for state in states):
            told.clear()
            self._forget_lost()
            return
        self._know(epoch)
        if told:
            absent = told.popleft()
            if absent.epoch == epoch.number and absent.reset_generation == saves.generation:
                raw, size = bytes.fromhex(absent.names), absent.name_bytes
                saving = saves.saving(absent.saved_records)
                names = [raw[start : start + size] for start in range(0, len(raw), size)]
                names = [name for name in names if name not in saving]
                saves.forget_stored(names)
                self.lost.update(dict.fromkeys(names))
                for name in [*islice(self.lost, max(0, len(self.lost) - MAX_LOST))]:
                    del self.lost[name]
                self.to_look_at = len(self.lost)
        looked = [*islice(self.lost, min(LOOKS, self.to_look_at))]
        self.to_look_at -= len(looked)
        for name in looked:
            del self.lost[name]
            if (block_id := cache.find(name)) is None:
                self.lost[name] = None  # behind the others
            else:
                saves.save_again(name, block_id)
