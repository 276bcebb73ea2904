"""KV events of saved blocks: prepared when a block is copied for a save, published when the store has it.

The daemon says over the control connection which blocks of a save are in the store and in which tier.  Nothing is said
of evictions, which the store makes on its own; a reset of the connector goes with vLLM's own AllBlocksCleared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from ..shmring.wire.attach import Stored
from .support import Geometry

# Upstream's Mooncake connector calls the store's memory so; MEDIUM_CPU is the engine's own offloading.
MEDIUM_MEMORY = "cpu"


class SavedBlocks:
    """Events of the blocks that are on their way into the store. `take_stored` gives what the daemon said since.

    But for its medium, a block's event says what the engine's own event of the same block says.
    """

    def __init__(self, geometry: Geometry, take_stored: Callable[[], Iterable[Stored]]) -> None:
        self._geometry, self._take_stored = geometry, take_stored
        self._saving: dict[int, dict[int, BlockStored]] = {}  # save id -> slot -> event, its medium not yet known

    def describe(self, request: Any, block: int) -> BlockStored:
        """The event of a request's full block, without its medium."""
        hashes, ratio, size = request.block_hashes, self._geometry.hashes_per_block, self._geometry.block_tokens
        lora = request.lora_request
        # From feature 0 on: it passes over those that end before the block.
        extra, _ = generate_block_hash_extra_keys(request, block * size, (block + 1) * size, 0)
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[(block + 1) * ratio - 1])],
            parent_block_hash=maybe_convert_block_hash(hashes[block * ratio - 1]) if block else None,
            token_ids=list(request.all_token_ids[block * size : (block + 1) * size]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=None,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys([extra]),
            group_idx=self._geometry.group,
            kv_cache_spec_kind=self._geometry.spec_kind,
            session_id=request.session_id,
        )

    def saving(self, save_id: int, slots: Sequence[int], events: Sequence[BlockStored]) -> None:
        """Blocks with these events are being copied into these slots."""
        self._saving[save_id] = dict(zip(slots, events, strict=True))

    def drop(self, save_id: int) -> None:
        """The save will not be stored."""
        self._saving.pop(save_id, None)

    def clear(self) -> None:
        """Nothing that was copied so far will be heard of again."""
        self._saving.clear()

    def take(self) -> list[BlockStored]:
        """The events of what is in the store by now, each once."""
        events = []
        for stored in self._take_stored():
            slots = self._saving.get(stored.save_id)
            if slots is None:
                continue  # dropped meanwhile, or of an epoch that has ended
            for medium, which in ((MEDIUM_MEMORY, stored.memory), (MEDIUM_STORAGE, stored.disk), (None, stored.lost)):
                for slot in which:
                    event = slots.pop(slot, None)
                    if event is not None and medium is not None:
                        event.medium = medium
                        events.append(event)
            if not slots:
                del self._saving[stored.save_id]
        return events
