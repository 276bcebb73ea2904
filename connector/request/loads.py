"""Follow loads from dispatch until every rank reported them, whatever becomes of their request or epoch."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...kv.groups import Kind
from ..attach.epoch import SchedulerEpoch
from ..engine.geometry import Geometry
from ..words.metadata import LoadOrder
from .hints import Handle
from .request_state import Claim, RequestState

_FULL = Kind.FULL  # a name of the module: with cold caches a member of an enum costs several looks more


class Load(NamedTuple):
    """`handle`'s slots hold `blocks` of the request until `ranks_left` is 0."""

    request_id: str
    handle: Handle
    blocks: range
    ranks_left: int


def not_given(request_id: str, tokens: int) -> RuntimeError:
    """To go on would be wrong: the engine would compute on blocks that nobody fills."""
    return RuntimeError(f"blocks were allocated for an answer that was not given: request={request_id} tokens={tokens}")


class Loads:
    """The dispatched loads of one engine, `running`, and the `orders` of this pass."""

    def __init__(self, geometry: Geometry, counters: Counter[str]) -> None:
        self._geometry, self._counters = geometry, counters
        self.running: dict[int, Load] = {}
        self.orders: list[LoadOrder] = []
        self._next_id = 1
        # Of the load dispatched last.  Its handle would keep the digests of a request that may be long gone.
        self._last = ("", 0, 0)  # request, epoch, flag

    def dispatch(self, state: RequestState, allocated: Any, tokens: int) -> None:
        """Order the load of the first `tokens` of the request's answer into its blocks; the answer is used up.

        `allocated`: vLLM's KVCacheBlocks.  Raises RuntimeError without an answer of so many tokens.
        """
        request_id, count = state.request.request_id, tokens // self._geometry.block_tokens
        answer, handle = state.answer, state.handle
        if answer is None or handle is None or tokens > answer.count * self._geometry.block_tokens:
            raise not_given(request_id, tokens)
        stop = answer.start + count
        state.dispatch(stop)
        load_id, self._next_id = self._next_id, self._next_id + 1
        blocks, slots = self._blocks(answer, count, allocated.blocks)
        # Without the Python function that makes a named tuple: each costs 2 to 3 us with cold caches.
        names = state.names
        adapter = None if names is None else (names.number, names.content)
        order = (load_id, request_id, handle.epoch.number, answer.asynchronous, blocks, slots, adapter)
        self.orders.append(tuple.__new__(LoadOrder, order))
        load = tuple.__new__(Load, (request_id, handle, range(answer.start, stop), self._geometry.world_size))
        self.running[load_id] = load
        self._last = request_id, handle.epoch.number, handle.flag
        self._counters["loads"] += 1
        self._counters["load_blocks"] += count

    def _blocks(
        self, answer: Claim, count: int, tables: Sequence[Sequence[Any]]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the ids of the blocks to load, and the slot of each; nothing where vLLM's blocks are not ours.

        `tables`: vLLM's blocks of each of its groups.
        """
        groups, unit = self._geometry.groups, self._geometry.block_tokens
        if self._geometry.numbers is not None:
            tables = self._geometry.tables(tables)
        start, stop, nothing = answer.start * unit, (answer.start + count) * unit, array("I")
        ids = array("I")
        for group, table, items in zip(groups.groups, tables, groups.items(start, stop), strict=True):
            first = start // group.block_tokens
            if first < items.start and any(block.block_id for block in table[first : items.start]):
                return nothing, nothing  # the engine counts on blocks that nobody fills
            found = array("I", [block.block_id for block in table[items.start : items.stop]])
            if group.kind is not _FULL and not all(found):
                return nothing, nothing  # vLLM gave up a block that is needed
            ids += found
        slots = answer.slots
        if count != answer.count:
            end = (answer.start + answer.count) * unit
            slots = [slot for span in groups.spans(start, end, start, stop) for slot in slots[span.start : span.stop]]
        if len(ids) != len(slots):
            return nothing, nothing
        return ids, slots

    def epochs(self) -> set[int]:
        """Epochs whose memory a rank may still read, or will. From any thread."""
        return {load.handle.epoch.number for load in list(self.running.values())}

    def acknowledge(self, counts: dict[int, int], failed: set[int]) -> list[Load]:
        """Count ranks that ended (or failed to do) loads. Return the loads that all ranks have ended now."""
        self._counters["failed_loads"] += len(failed & self.running.keys())
        done: list[Load] = []
        for load_id, ranks in counts.items():
            load = self.running.get(load_id)
            if load is None:
                self._counters["unknown_loads"] += 1
                continue
            if load.ranks_left <= ranks:
                done.append(self.running.pop(load_id))
            else:
                self.running[load_id] = load._replace(ranks_left=load.ranks_left - ranks)
        return done

    def disk_blocks(self, request_id: str, epoch: SchedulerEpoch | None) -> int | None:
        """Blocks that came from disk of the load dispatched last; None: not known, or another request's load.

        The daemon counts all that it fetched, which may be more than were loaded. Raises SegmentCorrupt.
        """
        last_id, last_epoch, flag = self._last
        if epoch is None or (last_id, last_epoch) != (request_id, epoch.number):
            return None
        return epoch.flags.disk(flag)
