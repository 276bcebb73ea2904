"""Saves from the scheduler's side: choose blocks and granted slots, then report to the daemon what was copied.

A block is saved only when its tokens are known and its KV is written by the end of this step: full blocks within
min(num_computed_tokens + num_scheduled_tokens, num_tokens) and within the block hashes.  Those cover known tokens only,
so placeholders, drafts and rejected tokens never count.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from ...kv.groups import Kind, Numbers
from ...shmring.wire.records import MAX_SAVED_BLOCKS, RecordKind, Saved, encode_saved
from ..attach.epoch import SchedulerEpoch
from ..engine.events import SavedBlocks
from ..engine.geometry import Geometry
from ..words.metadata import SaveOrder
from .known import Known
from .local_cache import LocalCache
from .request_state import RequestState

MAX_LEFT = 1 << 14  # blocks of finished requests, and states, that wait for a save slot
LEFT_LOOKS = 512  # at these in a step
MAX_SENT = 64  # saves that the daemon may not know of yet
_HEAD_BYTES = 64
NULL_BLOCK = 0


class _Block(NamedTuple):
    """A full block to save. `local`: its name in the engine's own cache. `event`: published once it is stored."""

    block_id: int
    name: bytes
    local: bytes
    event: Any


@dataclass(slots=True)
class DispatchedSave:
    """A dispatched save: its slots of the current epoch receive the blocks with these names."""

    slots: list[int]
    names: list[bytes]
    reset_generation: int
    ranks_left: int
    dropped: bool = False


class Saves:
    """Save bookkeeping of one engine. `events`: where KV events are on.

    `waiting`: saves that ranks still copy; `copied`: saves of all ranks that the daemon does not know of yet; `left`:
    blocks that wait for a slot and that no request keeps: those of finished requests, those that the store lost, and
    states.
    """

    def __init__(self, geometry: Geometry, *, decode: bool, counters: Counter[str], events: SavedBlocks | None) -> None:
        self._geometry, self._decode, self._counters, self._events = geometry, decode, counters, events
        self._ratios = [geometry.groups.ratio(group) for group in range(len(geometry.groups))]
        self._group_of = {geometry.number(group): group for group in range(len(geometry.groups))}
        self.waiting: dict[int, DispatchedSave] = {}
        self.left = OrderedDict[bytes, _Block]()  # by name, the oldest first
        self._known = Known(geometry.groups)
        # note_look_up(digests, local, found, stop): a finished look-up of blocks [local, stop) found `found` of them.
        self.note_look_up = self._known.note
        self.copied: deque[tuple[int, DispatchedSave]] = deque()
        self._sent_records = 0  # SAVED records of this epoch; the last ones, with their number and names:
        self._sent: deque[tuple[int, list[bytes]]] = deque(maxlen=MAX_SENT)
        self._next_id = 1
        self.generation = 0

    def complete(self, state: RequestState) -> bool:
        """Whether nothing of this admission will be saved any more."""
        last = (state.saved + 1) * self._geometry.block_tokens > state.prefill_tokens
        return state.tainted or (last and not self._decode)

    def plan_step(
        self, epoch: SchedulerEpoch | None, output: Any, cache: LocalCache, saving: Sequence[RequestState]
    ) -> Iterator[SaveOrder]:
        """Plan the saves of a step (vLLM's SchedulerOutput) of the requests that are SAVING. Raises SegmentCorrupt.

        Without an epoch the daemon does not know of the last reset yet: all blocks wait for slots until it does.
        vLLM asks about every request (`SchedulerSide.match`) before it schedules it, again when preempted.
        """
        block_tokens = self._geometry.block_tokens
        offers = output.kv_connector_block_state.boundary_state_offloads
        if offers and (offered := self._offered(offers, saving)):
            yield from self._plan_states(epoch, offered)
        scheduled = output.num_scheduled_tokens
        for state in saving:
            if not (tokens := scheduled.get(request_id := state.request.request_id)):
                continue
            if state.request.num_computed_tokens + tokens < (state.saved + 1) * block_tokens:
                continue  # no block of it ends in this step
            block_ids = functools.partial(output.kv_connector_block_state.get_block_ids, request_id)
            if (order := self.plan(epoch, state, tokens, block_ids)) is not None:
                yield order
            if self.complete(state):
                state.save(more=False)
        if (order := self.plan_left(epoch, cache)) is not None:
            yield order

    def _offered(
        self, offers: Mapping[str, Sequence[tuple[int, int, int]]], saving: Sequence[RequestState]
    ) -> list[_Block]:
        """Return the states to save of those that vLLM offers: group, block and the tokens of its prefix.

        This step completes them, and vLLM never writes to their blocks again while its cache names them.  Of tokens
        that a request generated the other groups' blocks are not saved either.
        """
        found, groups = dict[bytes, _Block](), self._geometry.groups
        for state in saving:
            if state.tainted or (digests := state.digests) is None:
                continue
            for number_in_vllm, block_id, tokens in offers.get(state.request.request_id, ()):
                group = self._group_of[number_in_vllm]
                if tokens % groups.unit_tokens == 0 and tokens <= state.prefill_tokens:
                    number = tokens // groups.groups[group].block_tokens - 1
                    block = self._block(state, digests, group, number, block_id)
                    if not self._known.holds(Known.of_names([block.name]))[0]:
                        found[block.name] = block
        return [*found.values()]

    def _plan_states(self, epoch: SchedulerEpoch | None, offered: list[_Block]) -> Iterator[SaveOrder]:
        """Save states, before anything that the running requests keep. Raises SegmentCorrupt.

        Those that find no slot wait beside the blocks of finished requests, as vLLM gives their blocks back, too.
        """
        left = offered
        if epoch is not None and epoch.credits.available():
            yield (order := self._order(epoch, offered))
            left = offered[len(order.slots) :]
        self._counters["save_blocks_unsaved"] += max(0, len(left) - (room := MAX_LEFT - len(self.left)))
        self.left.update((block.name, block) for block in left[:room])

    def plan(
        self,
        epoch: SchedulerEpoch | None,
        state: RequestState,
        scheduled_tokens: int,
        block_ids: Callable[[], Sequence[Sequence[int]]],
    ) -> SaveOrder | None:
        """Return this step's save of one scheduled request; None with nothing to save or no credit.

        `request.num_computed_tokens` does not count this step yet; `block_ids()` gives its block ids per group.  Raises
        SegmentCorrupt.
        """
        stop = self.storable_blocks(state, scheduled_tokens)
        if state.tainted or stop <= state.saved:
            return None
        if (digests := state.digests) is None or epoch is None or not (room := epoch.credits.available()):
            state.storable = stop  # `leave` looks which of them the request holds
            return None
        held = self._geometry.tables(block_ids())
        state.storable = stop = max(state.saved, min(stop, self._held_blocks(held)))
        wanted, state.saved = self._wanted(state, digests, range(state.saved, stop), held, room)
        if not wanted:
            return None
        order = self._order(epoch, [block for _, block in wanted])
        state.saved = min([state.saved, *(at for at, _ in wanted[len(order.slots) :])])
        return order

    def _wanted(
        self, state: RequestState, digests: list[bytes], blocks: range, block_ids: Sequence[Sequence[int]], room: int
    ) -> tuple[list[tuple[int, _Block]], int]:
        """Return up to `room` blocks that are not known to be stored, each with its number, and where the search ended.

        `block_ids`: of each of vLLM's groups.  A number stands for the blocks of all groups that end there.  Those of
        full attention come last: they stay, and vLLM gives up a window's block soon after its end.
        """
        groups, unit = self._geometry.groups, self._geometry.block_tokens
        chosen = groups.saved(blocks.start * unit, blocks.stop * unit, state.prefill_tokens, self._geometry.retention)
        others, full = list[tuple[int, int, int]](), list[Iterator[tuple[int, int, int]]]()
        for group, numbers in enumerate(chosen):
            unknown = self._unknown(digests, group, numbers, block_ids[group])
            if groups.groups[group].kind is Kind.FULL:
                full.append(unknown)
            else:
                others += unknown
        wanted, end = list[tuple[int, _Block]](), blocks.stop
        for at, group, number in chain(sorted(others), heapq.merge(*full)):
            if len(wanted) < room:
                wanted.append((at, self._block(state, digests, group, number, block_ids[group][number])))
            else:
                end = min(end, at)
                if groups.groups[group].kind is Kind.FULL:
                    break  # those behind it come later in the prompt
        return wanted, end

    def _unknown(
        self, digests: list[bytes], group: int, numbers: range | Numbers, table: Sequence[int]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield those of a group's blocks that are held and not known to be stored, each with its group and place."""
        size, unit = self._geometry.groups.groups[group].block_tokens, self._geometry.block_tokens
        for at in np.flatnonzero(~self._known.holds(self._known.keys(digests, group, numbers))).tolist():
            number = int(numbers[at])
            if table[number] != NULL_BLOCK:
                yield number * size // unit, group, number

    def _held_blocks(self, block_ids: Sequence[Sequence[int]]) -> int:
        """Return how many blocks the tables of all groups reach."""
        tables = zip(self._geometry.groups.groups, block_ids, strict=True)
        return min(len(table) * group.block_tokens for group, table in tables) // self._geometry.block_tokens

    def _block(self, state: RequestState, digests: list[bytes], group: int, number: int, block_id: int) -> _Block:
        """Return block `number` of a group, which is in `block_id`."""
        last, suffix = (number + 1) * self._ratios[group] - 1, bytes([group])
        hashes, name = state.request.block_hashes, bytes(digests[last]) + suffix
        local = name if digests is hashes else bytes(hashes[last]) + suffix
        event = None if self._events is None else self._events.describe(state.request, range(number, number + 1), group)
        return _Block(block_id, name, local, event)

    def _order(self, epoch: SchedulerEpoch, blocks: Sequence[_Block]) -> SaveOrder:
        """Order copies of the first of these blocks: as many as one record can name and free slots can hold."""
        most = (epoch.producer.max_payload_bytes - _HEAD_BYTES) // (4 + len(blocks[0].name))
        slots = epoch.credits.take(min(len(blocks), most, MAX_SAVED_BLOCKS))
        taken = blocks[: len(slots)]
        save_id, self._next_id = self._next_id, self._next_id + 1
        save = DispatchedSave(slots, [block.name for block in taken], self.generation, self._geometry.world_size)
        self.waiting[save_id] = save
        if self._events is not None:
            for slot, block in zip(slots, taken, strict=True):
                self._events.begin(save_id, slot, block.name, block.event)
        self._known.add(Known.of_names(save.names))
        self._counters["saves"] += 1
        self._counters["save_blocks"] += len(slots)
        return SaveOrder(save_id, epoch.number, [block.block_id for block in taken], slots)

    # --- blocks that finished requests left ---------------------------------------------------------------------------

    def leave(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> None:
        """Remember blocks of an ending request that found no slot: saved later if the engine's cache has them then.

        `block_ids`: of each of vLLM's groups.
        """
        if state.tainted or state.storable <= state.saved:
            return
        if (digests := state.digests) is None:
            self._counters["save_blocks_unsaved"] += state.storable - state.saved
            return
        tables = self._geometry.tables(block_ids)
        held = max(state.saved, min(state.storable, self._held_blocks(tables)))
        left, end = self._wanted(state, digests, range(state.saved, held), tables, MAX_LEFT - len(self.left))
        self.left.update((block.name, block) for _, block in left)
        self._counters["save_blocks_unsaved"] += state.storable - end

    def plan_left(self, epoch: SchedulerEpoch | None, cache: LocalCache) -> SaveOrder | None:
        """Save blocks that finished requests left, as far as there are slots. Raises SegmentCorrupt.

        Such a block is not pinned.  Copying it in this step is safe: no request of this step has been given it, and a
        later write comes later on the stream.
        """
        if epoch is None or not self.left or not (room := epoch.credits.available()):
            return None
        looked = [*islice(self.left.values(), LEFT_LOOKS)]
        chosen: list[_Block] = []
        for block, known in zip(looked, self._known.holds(Known.of_names([each.name for each in looked])), strict=True):
            if len(chosen) == room:
                break
            del self.left[block.name]
            if known:
                continue
            if cache.holds(block.block_id, block.local):
                chosen.append(block)
            else:
                self._counters["save_blocks_unsaved"] += 1
        if not chosen:
            return None
        order = self._order(epoch, chosen)
        for block in reversed(chosen[len(order.slots) :]):
            self.left[block.name] = block
            self.left.move_to_end(block.name, last=False)
        return order

    def forget_left(self) -> None:
        """Give up the blocks that finished requests left."""
        self._counters["save_blocks_unsaved"] += len(self.left)
        self.left.clear()

    def saving(self, records: int) -> set[bytes]:
        """Return the names of blocks that are being saved, but for those of the SAVED records that the daemon took."""
        while self._sent and self._sent[0][0] <= records:
            self._sent.popleft()
        saves = chain(self.waiting.values(), (save for _, save in self.copied))
        return set(chain(*(save.names for save in saves), *(some for _, some in self._sent)))

    def forget_stored(self, names: list[bytes]) -> None:
        """The store has not these blocks: they are saved when a request computes them."""
        self._known.remove(Known.of_names(names))

    def save_again(self, name: bytes, block_id: int) -> None:
        """Let a block of the engine's own cache wait for a slot."""
        self._known.remove(Known.of_names([name]))  # a look-up counts what is staged as found
        if name not in self.left and len(self.left) < MAX_LEFT:
            self.left[name] = _Block(block_id, name, name, None)
            self._counters["save_blocks_again"] += 1

    # --- the saved range --------------------------------------------------------------------------------------------

    def storable_blocks(self, state: RequestState, scheduled_tokens: int) -> int:
        """Full blocks with known tokens and with KV that is written when this step's forward is done."""
        request, geometry = state.request, self._geometry
        tokens: int = min(request.num_computed_tokens + scheduled_tokens, request.num_tokens)
        if not self._decode:
            tokens = min(tokens, state.prefill_tokens)
        blocks: int = min(tokens, len(request.block_hashes) * geometry.groups.hash_tokens) // geometry.block_tokens
        if geometry.groups.proof_tokens and tokens > state.prefill_tokens:
            # The drafter may not have written its KV of the newest block's last token yet.
            blocks -= 1
        return max(blocks, 0)

    def acknowledge(self, counts: dict[int, int], failed: set[int]) -> None:
        """Count ranks that copied (or failed to copy) saves; a save of all ranks is queued for the daemon."""
        for save_id, ranks in counts.items():
            if (save := self.waiting.get(save_id)) is None:
                continue  # of an ended epoch
            if save_id in failed:
                self._void(save_id, save)
            save.ranks_left -= ranks
            if save.ranks_left <= 0:
                del self.waiting[save_id]
                self.copied.append((save_id, save))

    def drop(self) -> None:
        """Some KV does not match its tokens: slots that were copied and not reported go back unused."""
        for save_id, save in (*self.waiting.items(), *self.copied):
            self._void(save_id, save)
        self.forget_left()

    def _void(self, save_id: int, save: DispatchedSave) -> None:
        """The daemon gets the slots back, but no block."""
        save.dropped = True
        self._known.remove(Known.of_names(save.names))
        if self._events is not None:
            for slot in save.slots:
                self._events.drop(save_id, slot)

    def flush(self, epoch: SchedulerEpoch) -> None:
        """Report saves that all ranks copied; if the ring is full, the rest in the next step. Raises SegmentCorrupt."""
        while self.copied:
            save_id, save = self.copied[0]
            names = [] if save.dropped else save.names
            record = encode_saved(Saved(save_id, save.reset_generation, save.dropped, save.slots, names))
            if not epoch.producer.push(RecordKind.SAVED, record):
                return
            self.copied.popleft()
            self._sent_records += 1
            self._sent.append((self._sent_records, names))
            if save.dropped:
                self._counters["saves_dropped"] += len(save.slots)

    def forget(self) -> None:
        """The epoch has ended: its slots mean nothing any more, and the next daemon may have another store."""
        self.waiting.clear()
        self.copied.clear()
        self._known.clear()
        self._sent.clear()
        self._sent_records = 0
        if self._events is not None:
            self._events.forget()

    def reset(self, generation: int) -> None:
        """Copies made before are of the old weights."""
        self.generation = generation
        self.drop()
        self._known.clear()
        if self._events is not None:
            self._events.forget()
