"""Follow loads from dispatch until every rank reported them, whatever becomes of their request or epoch."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .hints import Handle
from .metadata import LoadOrder
from .request_state import RequestState
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

    def dispatch(self, state: RequestState, block_ids: Sequence[int], tokens: int) -> None:
        """Order the load of the first `tokens` of the request's answer into its blocks; the answer is used up."""
        answer, handle = state.answer, state.handle
        assert answer is not None
        assert handle is not None
        request_id, count = state.request.request_id, tokens // self._geometry.block_tokens
        stop = answer.start + count
        load_id, self._next_id = self._next_id, self._next_id + 1
        order = LoadOrder(
            load_id,
            request_id,
            handle.session.epoch,
            answer.asynchronous,
            block_ids=array("I", block_ids[answer.start : stop]),
            slots=answer.slots[:count],
        )
        self._orders.append(order)
        load = Load(request_id, handle, range(answer.start, stop), self._geometry.world_size)
        self.running[load_id] = self._last = load
        state.dispatch(stop)
        self._counters["loads"] += 1
        self._counters["load_blocks"] += count

    def take_orders(self) -> list[LoadOrder]:
        """The loads dispatched since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def epochs(self) -> set[int]:
        """Epochs whose memory a rank may still read. From any thread."""
        return {load.handle.session.epoch for load in list(self.running.values())}

    def acknowledge(self, counts: dict[int, int], failed: set[int]) -> list[Load]:
        """Count ranks that ended (or failed to do) loads. Return the loads that all ranks have ended now."""
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
        """Blocks that came from disk of the load dispatched last; None: not known, or another request's load.

        The daemon counts all that it fetched, which may be more than were loaded. Raises SegmentCorrupt.
        """
        load = self._last
        if load is None or load.request_id != request_id or load.handle.session is not session:
            return None
        return load.handle.session.flags.disk(load.handle.flag)
