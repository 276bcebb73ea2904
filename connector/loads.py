"""Loads from their dispatch until every rank reported them; the end of their request or epoch does not touch them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .claims import Entry
from .hints import Handle
from .metadata import LoadOrder
from .session import SchedulerSession
from .support import Geometry


@dataclass(slots=True)
class Load:
    """`handle`'s slots hold `blocks` of the request until `ranks_left` is 0."""

    request_id: str
    handle: Handle
    blocks: range
    ranks_left: int


class Loads:
    """The dispatched loads of one engine, `running`, and the orders of this pass."""

    def __init__(self, geometry: Geometry, counters: Counter[str]) -> None:
        self._geometry, self._counters = geometry, counters
        self.running: dict[int, Load] = {}
        self._orders: list[LoadOrder] = []
        self._next_id = 1
        self._last: Load | None = None

    def dispatch(self, entry: Entry, block_ids: Sequence[int], tokens: int) -> None:
        """Order the load of the first `tokens` of the request's answer into its blocks; the answer is used up."""
        answer, handle = entry.answer, entry.handle
        assert answer is not None
        assert handle is not None
        count = tokens // self._geometry.block_tokens
        stop = answer.start + count
        load_id, self._next_id = self._next_id, self._next_id + 1
        self._orders.append(
            LoadOrder(
                load_id, entry.request.request_id, handle.session.epoch, answer.asynchronous,
                list(block_ids[answer.start : stop]), answer.slots[:count],
            )
        )  # fmt: skip
        load = Load(entry.request.request_id, handle, range(answer.start, stop), self._geometry.world_size)
        self.running[load_id] = self._last = load
        entry.answer, entry.handle, entry.settled = None, None, True
        entry.loading = answer.asynchronous
        entry.progress.saved = stop
        self._counters["loads"] += 1
        self._counters["load_blocks"] += count

    def take_orders(self) -> list[LoadOrder]:
        """The loads dispatched since the last call."""
        orders, self._orders = self._orders, []
        return orders

    @property
    def pending(self) -> bool:
        """Whether a load was dispatched that not every rank has reported."""
        return bool(self.running or self._orders)

    def epochs(self) -> set[int]:
        """Those whose memory a rank may still read. From any thread."""
        return {load.handle.session.epoch for load in list(self.running.values())}

    def acknowledge(self, counts: dict[int, int], failed: set[int]) -> list[Load]:
        """Ranks that ended (or failed to do) loads; the loads that all ranks ended now."""
        self._counters["failed_loads"] += len(failed & self.running.keys())
        done: list[Load] = []
        for load_id, ranks in counts.items():
            load = self.running.get(load_id)
            if load is None:
                self._counters["unknown_loads"] += 1
                continue
            load.ranks_left -= ranks
            if load.ranks_left <= 0:
                done.append(self.running.pop(load_id))
        return done

    def disk_blocks(self, request_id: str, session: SchedulerSession | None) -> int | None:
        """Of the load dispatched last, which is this request's, the blocks that came from disk; None: not known.

        As the daemon says, so it may be more than were loaded. Raises SegmentCorrupt.
        """
        load = self._last
        if load is None or load.request_id != request_id or load.handle.session is not session:
            return None
        return load.handle.session.flags.disk(load.handle.flag)
