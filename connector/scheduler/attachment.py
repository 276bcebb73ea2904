"""The epoch that the requests of an engine's scheduler use, and what of them a reset or the next epoch voids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...shmring.errors import SegmentCorrupt
from ...shmring.wire.records import Outcome
from ..attach.epoch import SchedulerEpoch
from ..attach.link import Link
from ..attach.resets import News, Resets
from ..engine.events import SavedBlocks
from ..engine.geometry import Geometry
from ..identity.adapters import Adapters
from ..request import hints
from ..request.hints import Handle
from ..request.loads import Load, Loads
from ..request.local_cache import LocalCache
from ..request.request_state import RequestState
from ..request.saves import Saves
from ..words.config import ConnectorConfig
from ..words.guards import detaching
from ..words.metadata import KVPrefetchMetadata, RankWeights
from ..words.stats import Tally


class Attachment:
    """One engine's requests, and the epoch that they use. `cache`: the engine's own prefix cache.

    `quiet`: the metadata of a step with nothing to do.
    """

    _now_ns: Callable[[], int]

    def __init__(
        self,
        config: ConnectorConfig,
        geometry: Geometry,
        link: Link[SchedulerEpoch],
        adapters: Adapters,
        *,
        publish: bool,
    ) -> None:
        self.cache = LocalCache()
        self.counters = Tally()
        self.requests: dict[str, RequestState] = {}  # the oldest first
        self._geometry = geometry
        self.link, self.resets = link, Resets(link, geometry.world_size)
        self.adapters = adapters
        self.events = SavedBlocks(geometry, config.event_lifetime_s) if publish else None
        self.loads = Loads(geometry, self.counters)
        self.saves = Saves(geometry, decode=config.save_decode_cache, counters=self.counters, events=self.events)
        self.quiet = KVPrefetchMetadata()
        self._epoch: SchedulerEpoch | None = None
        self._stale_local = False

    def live_epochs(self) -> tuple[int, ...]:
        """The epochs that load orders name, or may name from now on.

        The link's thread calls it, too, after it dropped its epoch: an epoch missing then is never named again,
        because `_usable_epoch` looks at the link once more after it adopted an epoch.  The epoch is read first: an
        order of its epoch is among the loads before the epoch changes.
        """
        epoch = self._epoch
        return tuple(self.loads.epochs() | ({epoch.number} if epoch is not None else set()))

    @detaching(None)
    def disk_tokens(self, request: Any) -> int | None:
        """Tokens that came from disk of this request's load, if it is the one dispatched last; None: not known."""
        blocks = self.loads.disk_blocks(request.request_id, self._epoch)
        return None if blocks is None else blocks * self._geometry.block_tokens

    def take_events(self) -> Sequence[Any]:
        """vLLM KV events of blocks that are in the store by now, or count as lost."""
        events, stored = self.events, self.link.stored
        return () if events is None else events.take([stored.popleft() for _ in range(len(stored))], self._now_ns())

    def _announce(self, load: Load, now_ns: int, *, failed: Collection[int]) -> None:
        """The store has what came from it. Raises SegmentCorrupt."""
        state, handle = self.requests.get(load.request_id), load.handle
        if self.events is not None and not failed:
            request = None if state is None or state.tainted else state.request  # before a reset the store had others
            disk = bool(handle.epoch.flags.disk(handle.flag))
            self.events.loaded(request, handle.digests, load.blocks, disk=disk, now_ns=now_ns)

    @detaching(None)
    def _give_back(self, handle: Handle | None, outcome: Outcome) -> None:
        """A request has ended that vLLM may not have admitted, or what was found for it is of no use."""
        if handle is not None:
            hints.finish(handle, outcome)

    def reset(self) -> bool:
        """The weights changed, or will. True at once: no later key can name older KV."""
        self.resets.begin()
        self._void()
        # A running request goes on filling the engine's own prefix cache on top of its old KV.
        old = [state.reset() for state in self.requests.values()]
        self._stale_local = any(old) or self.cache.blocks() > 0
        self.adapters.reset(self.requests.values())
        return True

    def _void(self) -> None:
        """Later keys name other weights: give up what is staged, and what is being saved, of those before."""
        self._usable_epoch()
        for state in self.requests.values():
            self._give_back(state.let_go(), Outcome.VOIDED)
        self.saves.reset(self.resets.generation)
        self._tell()

    def _tell(self) -> None:
        self.resets.tell(self._epoch)
        self._renew_quiet()

    def _renew_quiet(self) -> None:
        epochs = () if self._epoch is None else (self._epoch.number,)
        self.quiet = KVPrefetchMetadata(live_epochs=epochs, weights=self.resets.step._replace(computes=True))

    def _weights_reported(self, reports: Mapping[int, RankWeights]) -> None:
        news = self.resets.hear(reports)
        if news is News.CHANGED:
            self.reset()
        elif news is News.OTHERS:
            self._void()
        self.resets.agree(reports)
        self._tell()

    def _usable_epoch(self) -> SchedulerEpoch | None:
        """The link's epoch, unless its daemon does not know of the last reset."""
        link = self.link
        while (epoch := link.epoch) is not self._epoch:
            self.adopt(epoch)
        if link.confirmed_reset < self.resets.generation:
            self.resets.tell(epoch)
            return None
        return epoch

    def detach(self, error: SegmentCorrupt) -> None:
        """The daemon's memory cannot be right: drop the epoch."""
        self.counters["detached"] += 1
        self.link.detach(self._epoch, str(error))
        self.adopt(None)

    def adopt(self, epoch: SchedulerEpoch | None) -> None:
        """Another epoch: handles, undispatched claims and saves of the old one are void."""
        self._epoch = epoch
        self._renew_quiet()
        for state in self.requests.values():
            state.let_go()
        self.saves.forget()
