"""KV events of saved blocks: prepared when a block is copied for a save, published when the store has it.

The daemon reports over the control connection which blocks of a save are in the store, and in which medium.  Evictions
are not published: the store makes them on its own.  A reset goes with vLLM's own AllBlocksCleared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from ...shmring.wire.attach import Stored
from .geometry import Geometry

# Upstream's Mooncake connector uses this name for the store's memory; MEDIUM_CPU is the engine's own offloading.
MEDIUM_MEMORY = "cpu"


class SavedBlocks:
    """Events of the blocks on their way into the store; but for its medium, each equals the engine's own event.

    `saving`: of each slot the last two saves that filled it, and the block's event without its medium.  A report may
    come after the slot was filled again; one that was lost leaves no more than that.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self.saving: dict[int, deque[tuple[int, BlockStored]]] = {}

    def describe(self, request: Any, block: int, group: int) -> BlockStored:
        """The event of a request's full block of a KV group, without its medium."""
        hashes, groups = request.block_hashes, self._geometry.groups
        size = groups.groups[group].block_tokens
        ratio = size // groups.hash_tokens
        kind, window = self._geometry.spec_kinds[group]
        lora = request.lora_request
        # From feature 0 on: the function skips features that end before the block.
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
            group_idx=self._geometry.number(group),
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            session_id=request.session_id,
        )

    def take(self, reports: Iterable[Stored]) -> list[BlockStored]:
        """Return the events of blocks that the daemon's reports place in the store, each once."""
        events = []
        for stored in reports:
            for medium, which in ((MEDIUM_MEMORY, stored.memory), (MEDIUM_STORAGE, stored.disk), (None, stored.failed)):
                for slot in which:
                    if (event := self.drop(stored.save_id, slot)) is not None and medium is not None:
                        event.medium = medium
                        events.append(event)
        return events

    def begin(self, save_id: int, slot: int, event: BlockStored) -> None:
        """A block is copied into this slot."""
        self.saving.setdefault(slot, deque(maxlen=2)).append((save_id, event))

    def drop(self, save_id: int, slot: int) -> BlockStored | None:
        """Forget what this save has in the slot; return its event, None where it was dropped, or its epoch ended."""
        held = self.saving.get(slot, deque())
        found = next((each for each in held if each[0] == save_id), None)
        if found is None:
            return None
        held.remove(found)
        return found[1]
